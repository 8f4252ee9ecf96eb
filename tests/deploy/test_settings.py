"""Settings: one direction, defaults in one place, helpful errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from deploy.settings import (
    DEMO_MODELS,
    AppSettings,
    check_models,
    load_settings,
    parse_settings,
    read_yaml,
)
from serving.config import ServingConfig
from workers.config import EngineConfig, ModelConfig
from workers.errors import ConfigError
from workers.telemetry.config import TelemetryConfig

MINIMAL: dict[str, Any] = {"model_id": "m", "target": {"path": "org/model"}}


def parse(**values: Any) -> AppSettings:
    return parse_settings({**MINIMAL, **values}, "test.yaml")


def test_what_is_left_out_is_left_to_the_dataclasses() -> None:
    """Defaults stand in one place: a changed default must reach a minimal file."""
    settings = parse()
    assert settings.engine_config() == EngineConfig("m", ModelConfig("org/model"))
    serving = ServingConfig("m", "org/model", max_open_requests=settings.ingress_open)
    assert settings.serving_config() == serving


def test_every_value_arrives() -> None:
    settings = parse(
        target={"path": "a", "revision": "r", "dtype": "bfloat16"},
        speculation={"method": "draft_model", "draft": {"path": "b"}, "num_draft_tokens": 7},
        cache={"num_blocks": 9},
        scheduler={"max_running": 3, "max_waiting": 4},
        worker={
            "device": "cuda", "attention_backend": "sdpa", "num_threads": 2, "num_replicas": 5,
            "stall_timeout_s": 7,
        },
        ingress={
            "max_replays": 0, "max_body_bytes": 10, "images": {"max_images": 1},
            "api_key_file": "/keys", "api_key_env": "KEYS", "cors_origins": ["https://a.example"],
            "access_log": False, "keep_alive_s": 0,
            "worker_wait_s": 8, "max_request_s": 9,
        },
        observability={"log_level": "DEBUG", "log_format": "json"},
    )  # fmt: skip
    engine = settings.engine_config()
    assert engine.target == ModelConfig("a", "r", "bfloat16")
    assert engine.speculation.draft == ModelConfig("b")
    assert (engine.speculation.num_draft_tokens, engine.cache.num_blocks) == (7, 9)
    assert (engine.device, engine.attention_backend, engine.num_threads) == ("cuda", "sdpa", 2)
    assert engine.stall_timeout_s == 7
    serving = settings.serving_config()
    assert (serving.max_replays, serving.max_body_bytes, serving.images.max_images) == (0, 10, 1)
    assert (serving.path, serving.revision) == ("a", "r")
    assert (serving.api_key_file, serving.api_key_env) == ("/keys", "KEYS")
    assert (serving.cors_origins, serving.access_log) == (("https://a.example",), False)
    assert (serving.worker_wait_s, serving.max_request_s) == (8, 9)
    assert serving.keep_alive_s == 0
    assert engine.telemetry == serving.telemetry == TelemetryConfig("DEBUG", "json")
    assert settings.worker_ongoing == 7
    assert settings.ingress_open == 5 * 7 + settings.worker.max_queued_requests
    assert serving.max_open_requests == settings.ingress_open < settings.ingress_ongoing


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode1_id": 1}, "mode1_id"),
        ({"target": {"path": "a", "dtyp": "x"}}, "target.dtyp"),
        ({"target": {"path": "a", "dtype": "int4"}}, "model.dtype='int4'"),
        ({"target": {}}, "target.path"),
        ({"target": None}, "target"),
        ({"model_id": ""}, "model_id"),
        ({"cache": {"block_size": 17}}, "multiple of 16"),
        ({"cache": {"block_size": "many"}}, "cache.block_size"),
        ({"scheduler": {"max_running": 0}}, "scheduler.max_running"),
        ({"speculation": {"method": "draft_model"}}, "needs a draft"),
        ({"speculation": {"method": "psychic"}}, "speculation.method"),
        ({"speculation": {"method": "ngram", "draft": {"path": "b"}}}, "speculation.draft"),
        ({"speculation": {"method": "nextn", "draft": {"path": "b"}}}, "speculation.draft"),
        ({"speculation": {"method": "ngram", "ngram_min": 0}}, "speculation.ngram_min"),
        ({"speculation": {"method": "ngram", "ngram_min": 5}}, "speculation.ngram_max"),
        ({"worker": {"num_replicas": 0}}, "num_replicas"),
        ({"worker": {"num_threads": 0}}, "num_threads"),
        ({"worker": {"stall_timeout_s": 0}}, "stall_timeout_s"),
        ({"speculation": {"breaker": {"open_s": 0}}}, "speculation.breaker.open_s"),
        ({"speculation": {"breaker": {"opens": 1}}}, "speculation.breaker.opens"),
        ({"ingress": {"max_replays": -1}}, "ingress.max_replays"),
        ({"ingress": {"worker_wait_s": 0}}, "ingress.worker_wait_s"),
        ({"ingress": {"max_request_s": -1}}, "ingress.max_request_s"),
        ({"ingress": {"images": {"max_image": 1}}}, "ingress.images.max_image"),
        *(
            ({"worker": {key: value}}, f"worker.{key}")
            for key in ("num_cpus", "num_gpus", "graceful_shutdown_timeout_s")
            for value in (-1, float("nan"), float("inf"), ".nan", True)
        ),
        *(
            ({"ingress": {key: value}}, f"ingress.{key}")
            for key in ("health_check_period_s", "health_check_timeout_s")
            for value in (-1, 0, float("nan"), float("-inf"), True)
        ),
        ({"worker": {"max_queued_requests": 0}}, "worker.max_queued_requests"),
        ({"worker": {"max_queued_requests": -1}}, "worker.max_queued_requests"),
        ({"worker": {"max_ongoing_requests": 0}}, "worker.max_ongoing_requests"),
        ({"ingress": {"max_ongoing_requests": -3}}, "ingress.max_ongoing_requests"),
        ({"ingress": {"health_timeout_s": float("nan")}}, "ingress.health_timeout_s"),
        ({"ingress": {"health_timeout_s": 0}}, "ingress.health_timeout_s"),
        ({"ingress": {"max_replays": True}}, "ingress.max_replays"),
        *(
            ({"ingress": {"images": {key: value}}}, f"ingress.images.{key}")
            for key in ("max_images", "max_bytes", "max_pixels", "max_total_pixels")
            for value in (0, -1, True)
        ),
        ({"observability": {"log_level": "info"}}, "observability.log_level"),
        ({"observability": {"log_format": "xml"}}, "observability.log_format"),
        ({"observability": {"log_interval_s": -1}}, "observability.log_interval_s"),
        ({"observability": {"trace_endpoint": "collector:4317"}}, "observability.trace_endpoint"),
        ({"observability": {"trace_ratio": 1.5}}, "observability.trace_ratio"),
        ({"http": {"port": -1}}, "http.port"),
        ({"http": {"port": 65536}}, "http.port"),
        ({"http": {"port": True}}, "http.port"),
        ({"http": {"host": ""}}, "http.host"),
        ({"http": {"host": " "}}, "http.host"),
        *(
            ({"worker": {"device": device}}, "worker.device")
            for device in ("", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0 ", "meta", "CPU")
        ),
        ({"cache": {"gpu_memory_fraction": float("nan")}}, "cache.gpu_memory_fraction"),
        ({"speculation": {"num_draft_tokens": True}}, "speculation.num_draft_tokens"),
        ({"cache": {5: 1}}, "cache"),
        ({5: 1}, "5"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    """A value that passes here fails as a traceback of Ray's or torch's, or is ignored."""
    with pytest.raises(ConfigError) as caught:
        parse_settings({**MINIMAL, **values}, "test.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_are_named_to_serve_too() -> None:
    """Serve validates a config's arguments itself, without `parse_settings`."""
    with pytest.raises(ConfigError, match=r"worker\.num_cpus"):
        AppSettings.model_validate({**MINIMAL, "worker": {"num_cpus": True}})
    settings = parse(cache={"prefix_caching": False})
    assert AppSettings.model_validate(settings) == settings
    assert not settings.cache.prefix_caching


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11", None])
def test_devices(device: str | None) -> None:
    assert parse(worker={"device": device}).worker.device == device


def test_limits_of_one_are_kept() -> None:
    """Zero is refused, and what is given is never taken for what was left out."""
    settings = parse(worker={"max_ongoing_requests": 1}, ingress={"max_ongoing_requests": 1})
    assert (settings.worker_ongoing, settings.ingress_open) == (1, 1)
    assert parse(worker={"num_cpus": 1, "num_gpus": "0.5"}).worker.num_gpus == 0.5


def test_numbers_may_be_strings() -> None:
    """Serve's `key=value` arguments are strings."""
    assert parse(worker={"num_replicas": "3"}).worker.num_replicas == 3


def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model_id: m\ntarget: {path: ./here}\n"
        "speculation: {method: draft_model, draft: {path: 'demo:draft'}}\n"
    )
    settings = load_settings(file)
    assert settings.target.path == str(tmp_path / "here")
    # The file's own form is kept until an engine is configured, so that it stays portable.
    assert settings.speculation.draft == ModelConfig("demo:draft")
    draft = settings.engine_config().speculation.draft
    assert draft is not None
    assert draft.path == str(DEMO_MODELS / "draft")
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_models(settings)


@pytest.mark.parametrize("text", ["", "- a", "a: [", "\xff"])
def test_unreadable_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read_yaml(file)
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        read_yaml(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_id: a\nmodel_id: b\n", "line 2: the key 'model_id' stands twice"),
        ("cache:\n  num_blocks: 1\n  num_blocks: 2\n", "'num_blocks' stands twice"),
        ("a: {b: 1, c: {d: 1, 'd': 2}}\n", "'d' stands twice"),
        ("? [a]\n: 1\n", "cannot be read"),
        ("a: 2024-99-99\n", "cannot be read"),
        ("target: {path: ~nobody-of-this-name/x}\n", "target.path"),
        ('speculation: {draft: {path: "./a\\0"}}\n', "speculation.draft.path"),
    ],
)
def test_mistakes_in_files(tmp_path: Path, text: str, message: str) -> None:
    """YAML takes the last of two equal keys silently; paths raise errors that are not ours."""
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_merged_keys_are_no_duplicates(tmp_path: Path) -> None:
    """A merge is there to be overridden."""
    file = tmp_path / "c.yaml"
    file.write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\n")
    assert read_yaml(file)["d"] == {"b": 3, "c": 2}


def test_no_default_stands_twice() -> None:
    """The settings' own optional copies of other classes' fields must all default to None."""
    own = {f.name for f in dataclasses.fields(type(parse().worker))}
    shared = own & {f.name for f in dataclasses.fields(EngineConfig)}
    assert shared == {"device", "attention_backend", "num_threads", "stall_timeout_s"}
    assert all(getattr(parse().worker, name) is None for name in shared)
    limits = {"max_body_bytes", "max_replays", "health_timeout_s"}
    assert all(getattr(parse().ingress, name) is None for name in limits)


def test_the_key_file_is_found_from_the_settings_file(tmp_path: Path) -> None:
    """The ingress runs in another folder, where a relative path would name another file."""
    path = tmp_path / "a.yaml"
    path.write_text("model_id: m\ntarget: {path: org/model}\ningress: {api_key_file: ./keys}\n")
    assert load_settings(path).serving_config().api_key_file == str(tmp_path / "keys")
    path.write_text("model_id: m\ntarget: {path: org/model}\ningress: {api_key_file: keys}\n")
    with pytest.raises(ConfigError, match=r"ingress\.api_key_file"):
        load_settings(path)
