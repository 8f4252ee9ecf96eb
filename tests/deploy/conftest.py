"""The session's one Ray instance, with the application over fake workers."""

from __future__ import annotations

import json
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.fake_worker import FakeWorker
from tests.serving.doubles import make_hf_tokenizer

# Ray's modules use deprecated parts of other libraries when they are first imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray
    from ray import serve

    from deploy.app import APP_NAME, compose
from deploy.settings import AppSettings, parse_settings

MODEL_ID = "fake"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an ingress needs of a checkpoint: tokenizer, processor, config; no weights."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_hf_tokenizer()
    tokenizer.save_pretrained(path)
    config = {
        "model_type": "qwen2_5_vl",
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    }
    (path / "config.json").write_text(json.dumps(config))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2,
        "size": {"shortest_edge": 784, "longest_edge": 12544},
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Poll until true; return the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "waited too long"
        time.sleep(0.02)
    return time.monotonic() - started


def app_settings(model_dir: Path, **worker: Any) -> AppSettings:
    """Return the application's settings, with changes to its workers."""
    replica = {"num_cpus": 0.1, "graceful_shutdown_timeout_s": 1}
    return parse_settings(
        {
            "model_id": MODEL_ID,
            "target": {"path": str(model_dir)},
            "worker": {**replica, "num_replicas": 2, **worker},
            "ingress": {
                "num_cpus": 0.1,
                "graceful_shutdown_timeout_s": 30,
                "health_timeout_s": 2,
            },
        },
        "test",
    )


@pytest.fixture(scope="session")
def ray_url(model_dir: Path) -> Iterator[str]:
    """The application's URL, with two fake workers."""
    settings = app_settings(model_dir)
    port = free_port()
    ray.init(
        address="local", num_cpus=2, object_store_memory=100 * 1024**2, include_dashboard=False,
        log_to_driver=False, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        app = compose(settings, FakeWorker)
        serve.run(app, name=APP_NAME, route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 30)
        yield url
    finally:
        serve.delete(APP_NAME)
        ray.shutdown()
