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

MINIMAL: dict[str, Any] = {"model_id": "m", "target": {"path": "org/model"}}


def parse(**values: Any) -> AppSettings:
    return parse_settings({**MINIMAL, **values}, "test.yaml")


def test_what_is_left_out_is_left_to_the_dataclasses() -> None:
    """Defaults stand in one place: a changed default must reach a minimal file."""
    settings = parse()
    assert settings.engine_config() == EngineConfig("m", ModelConfig("org/model"))
    assert settings.serving_config() == ServingConfig("m", "org/model")


def test_every_value_arrives() -> None:
    settings = parse(
        target={"path": "a", "revision": "r", "dtype": "bfloat16"},
        speculation={"method": "draft_model", "draft": {"path": "b"}, "num_draft_tokens": 7},
        cache={"num_blocks": 9},
        scheduler={"max_running": 3, "max_waiting": 4},
        worker={"device": "cuda", "attention_backend": "sdpa", "num_threads": 2, "num_replicas": 5},
        ingress={"max_replays": 0, "max_body_bytes": 10, "images": {"max_images": 1}},
    )
    engine = settings.engine_config()
    assert engine.target == ModelConfig("a", "r", "bfloat16")
    assert engine.speculation.draft == ModelConfig("b")
    assert (engine.speculation.num_draft_tokens, engine.cache.num_blocks) == (7, 9)
    assert (engine.device, engine.attention_backend, engine.num_threads) == ("cuda", "sdpa", 2)
    serving = settings.serving_config()
    assert (serving.max_replays, serving.max_body_bytes, serving.images.max_images) == (0, 10, 1)
    assert (serving.path, serving.revision) == ("a", "r")
    assert settings.worker_ongoing == 7
    assert settings.ingress_ongoing == 5 * 7 + settings.worker.max_queued_requests


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
        ({"worker": {"num_replicas": 0}}, "num_replicas"),
        ({"worker": {"num_threads": 0}}, "num_threads"),
        ({"ingress": {"max_replays": -1}}, "ingress.max_replays"),
        ({"ingress": {"images": {"max_image": 1}}}, "ingress.images.max_image"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**values)
    assert message in str(caught.value)


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


def test_no_default_stands_twice() -> None:
    """The settings' own optional copies of other classes' fields must all default to None."""
    own = {f.name for f in dataclasses.fields(type(parse().worker))}
    shared = own & {f.name for f in dataclasses.fields(EngineConfig)}
    assert shared == {"device", "attention_backend", "num_threads"}
    assert all(getattr(parse().worker, name) is None for name in shared)
    limits = {"max_body_bytes", "max_replays", "health_timeout_s"}
    assert all(getattr(parse().ingress, name) is None for name in limits)
