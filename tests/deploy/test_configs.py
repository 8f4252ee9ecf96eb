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


def test_there_are_configs() -> None:
    assert {"demo.yaml", "qwen2.5-vl-7b.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config(path: Path) -> None:
    settings = load_settings(path)
    application = build_app(settings)
    assert application._bound_deployment.name == INGRESS
    document = serve_config(read_yaml(path), settings)
    parsed = ServeDeploySchema.model_validate(document)
    assert parsed.applications[0].import_path == IMPORT_PATH
    assert AppSettings.model_validate(parsed.applications[0].args) == settings


def test_the_demo_fits_two_cores_and_has_its_models() -> None:
    settings = load_settings(next(path for path in CONFIGS if path.name == "demo.yaml"))
    assert settings.worker.num_replicas >= 2
    assert num_cpus_needed(settings) <= 2
    check_models(settings)


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
