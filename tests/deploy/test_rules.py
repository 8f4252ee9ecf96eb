"""Alerts and recording rules: Prometheus' own checks, their cases, their names, their runbook."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from deploy.observe import RULES
from deploy.settings import AppSettings
from tests.deploy.promql import Rule, exported, rules, selectors
from tests.e2e.conftest import ROOT

CASES = sorted((Path(__file__).parent / "prometheus").glob("*.test.yml"))
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
ALERTS = [rule for rule in rules() if rule.is_alert]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None and "CI" not in os.environ, reason="needs `prometheus`"
)


def promtool(*args: str) -> None:
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("path", sorted(RULES.glob("*.yml")), ids=lambda path: path.stem)
def test_prometheus_takes_the_rules(path: Path) -> None:
    promtool("check", "rules", str(path))


@needs_promtool
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_alerts_fire_and_do_not(path: Path) -> None:
    promtool("test", "rules", str(path))


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    fires, does_not = set(), set()
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            has_fired = {c["alertname"] for c in test["alert_rule_test"] if c["exp_alerts"]}
            fires |= has_fired
            # Not merely too early in the life of one that fires in the end.
            does_not |= {c["alertname"] for c in test["alert_rule_test"]} - has_fired
    names = {alert.name for alert in ALERTS}
    assert fires == names
    # That one has no near miss: there are series, or there are none.
    assert names - does_not <= {"SpecserveMetricsAbsent"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_h3_rules_name_only_what_is_exported(rule: Rule) -> None:
    """H3, H4: a renamed metric left rules that never fire and dashboards without data."""
    known = exported() | {
        recorded.name: {"namespace", "model", "modality", "worker"}
        for recorded in rules()
        if not recorded.is_alert
    }
    found = selectors(rule.expr)
    assert found
    for name, labels in found:
        assert labels <= known[name], name


def test_every_alert_says_why_and_has_its_section() -> None:
    text = (RULES / "alerts.yml").read_text()
    sections = re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)
    assert sections == [alert.name for alert in ALERTS]
    for group in yaml.safe_load(text)["groups"]:
        for rule in group["rules"]:
            name = rule["alert"]
            assert set(rule["annotations"]) == {"summary", "description", "runbook"}, name
            assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
            assert rule["labels"]["severity"] in ("warning", "critical")
    for comment in re.findall(r"((?: +#.*\n)+) +- alert:", text):
        assert "Why:" in comment
        assert "Floor:" in comment
    assert len(re.findall(r"Why:", text)) == len(ALERTS)


def has_setting(kind: Any, path: list[str]) -> bool:
    """Return whether settings of a class have a key."""
    if not path:
        return True
    names = AppSettings.model_fields if kind is AppSettings else {f.name for f in fields(kind)}
    if path[0] not in names:
        return False
    hint = get_type_hints(kind)[path[0]]
    inner = next((t for t in (hint, *get_args(hint)) if is_dataclass(t)), None)
    return not path[1:] or (inner is not None and has_setting(inner, path[1:]))


@pytest.mark.parametrize("name", ["README.md", "docs/runbook.md", "docs/api.md"])
def test_settings_that_documents_name_exist(name: str) -> None:
    """A setting of another name is refused, so advice with one is no help."""
    sections = "|".join(AppSettings.model_fields)
    found = re.findall(rf"`((?:{sections})(?:\.\w+)+)", (ROOT / name).read_text())
    assert name == "docs/api.md" or found
    unknown = [s for s in found if not has_setting(AppSettings, s.split("."))]
    # Names of reports, not of settings.
    assert [s for s in unknown if s not in ("speculation.report", "speculation.enabled")] == []
