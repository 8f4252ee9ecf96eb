"""Changing what runs while streams run: they end as they would have, and new ones are taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from deploy.app import APP_NAME, compose
from tests.deploy.conftest import app_settings, wait_until
from tests.deploy.fake_worker import FakeWorker
from tests.deploy.test_app import joined, stream, text_of, values

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

NUM_STREAMS = 6
# At 2 tokens every 20 ms: longer than the replicas' grace of a second.
NUM_TOKENS = 300


@pytest.fixture
def deploy(ray_url: str, model_dir: Path) -> Iterator[Callable[..., None]]:
    """Return a function that deploys the application with other settings; undone at the end."""

    def run(**worker: Any) -> None:
        app = compose(app_settings(model_dir, **worker), FakeWorker)
        serve.run(app, name=APP_NAME, route_prefix="/")

    yield run
    run()
    wait_until(lambda: len(values(ray_url, "requests_running")) == 2, 60)


@pytest.mark.parametrize(
    "change",
    [{"num_replicas": 1}, {"health_check_period_s": 7}, {"num_threads": 3}],
    ids=["scale down", "new options", "new worker"],
)
def test_e11_streams_outlive_a_change(
    ray_url: str, deploy: Callable[..., None], change: dict[str, Any]
) -> None:
    """E11: a replica that was to go took requests until it was killed: 5xx, and cut streams."""
    with ThreadPoolExecutor(NUM_STREAMS + 1) as pool:
        streams = [pool.submit(stream, ray_url, max_tokens=NUM_TOKENS) for _ in range(NUM_STREAMS)]
        wait_until(lambda: sum(values(ray_url, "requests_running").values()) == NUM_STREAMS)
        changing = pool.submit(deploy, **change)
        late = _ask_until(ray_url, changing)
        results = [future.result() for future in streams]
        changing.result()
    for items in [*results, *late]:
        assert items[-1] == "[DONE]"
        num_tokens = NUM_TOKENS if items in results else 20
        assert joined(items) == text_of(num_tokens)
    assert late, "nobody came during the change"


def _ask_until(url: str, changing: Future[None]) -> list[list[Any]]:
    """Send short streams one after the other, as long as the change takes."""
    answers = []
    while not changing.done():
        answers.append(stream(url))  # asserts a 200
        time.sleep(0.05)
    return answers


def test_the_application_answers_after_all_this(ray_url: str) -> None:
    assert httpx.get(f"{ray_url}/health").status_code == 200
    assert joined(stream(ray_url)) == text_of(20)
