"""Every file in `configs/` loads, builds and renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from deploy.app import IMPORT_PATH, INGRESS, METRICS, WORKER, build_app, num_cpus_needed
from deploy.serve_config import serve_config
from deploy.settings import AppSettings, check_models, load_settings, read_yaml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


# File -> target, method, draft, drafts a step.
EXPECTED = {
    "demo.yaml": ("demo:target", "draft_model", "demo:draft", 4),
    "demo-nextn.yaml": ("demo:nextn", "nextn", None, 3),
    "llama-3.1-8b.yaml": (
        "meta-llama/Llama-3.1-8B-Instruct",
        "draft_model",
        "meta-llama/Llama-3.2-1B-Instruct",
        4,
    ),
    "ngram.yaml": ("Qwen/Qwen2.5-Coder-7B-Instruct", "ngram", None, 8),
    "qwen2.5-vl-7b.yaml": (
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "draft_model",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        4,
    ),
    "qwen3-vl-8b.yaml": (
        "Qwen/Qwen3-VL-8B-Instruct",
        "draft_model",
        "Qwen/Qwen3-VL-2B-Instruct",
        3,
    ),
    "qwen3.5-9b-nextn.yaml": ("Qwen/Qwen3.5-9B", "nextn", None, 3),
}


def test_there_are_configs() -> None:
    assert {path.name for path in CONFIGS} == set(EXPECTED)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_what_a_config_serves(path: Path) -> None:
    settings = load_settings(path)
    speculation = settings.speculation
    draft = None if speculation.draft is None else speculation.draft.path
    served = (settings.target.path, speculation.method, draft, speculation.num_draft_tokens)
    assert served == EXPECTED[path.name]
    is_demo = path.name.startswith("demo")
    assert settings.worker.device == ("cpu" if is_demo else "cuda")
    assert settings.worker.num_gpus == (0 if is_demo else 1)
    assert settings.http.host == ("127.0.0.1" if is_demo else "0.0.0.0")
    # Both models compute in one type; a draft in another would only be slower.
    if not is_demo:
        assert settings.target.dtype == "bfloat16"
        assert speculation.draft is None or speculation.draft.dtype == "bfloat16"


def test_the_ngram_sizes_arrive() -> None:
    speculation = load_settings(CONFIGS[0].parent / "ngram.yaml").engine_config().speculation
    assert (speculation.ngram_max, speculation.ngram_min) == (4, 2)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config(path: Path) -> None:
    settings = load_settings(path)
    application = build_app(settings)
    assert application._bound_deployment.name == INGRESS
    document = serve_config(read_yaml(path), settings)
    parsed = ServeDeploySchema.model_validate(document)
    assert parsed.applications[0].import_path == IMPORT_PATH
    assert AppSettings.model_validate(parsed.applications[0].args) == settings


@pytest.mark.parametrize("name", ["demo.yaml", "demo-nextn.yaml"])
def test_the_demos_fit_two_cores(name: str) -> None:
    settings = load_settings(CONFIGS[0].parent / name)
    assert settings.worker.num_replicas >= 2
    assert num_cpus_needed(settings) <= 2


def test_the_demo_has_its_models() -> None:
    check_models(load_settings(CONFIGS[0].parent / "demo.yaml"))


def test_serve_converts_the_builder_s_argument() -> None:
    """Serve reads the annotation at run time; a string there would switch the checks off."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call

    args: dict[str, Any] = {"model_id": "m", "target": {"path": "a"}}
    call(build_app, args)
    with pytest.raises(ValueError, match="mode1_id"):
        call(build_app, {**args, "mode1_id": 1})


def test_deployments_are_named_for_serve_configs() -> None:
    """A config's `deployments:` section refers to these names; a change breaks it late."""
    assert (WORKER, METRICS, INGRESS) == ("worker", "metrics", "ingress")
