"""Dashboards and the table of metrics: up to date, of Grafana's shape, of names that exist."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import deploy.grafana.__main__ as boards
import deploy.metrics.__main__ as readme
from deploy.metrics.families import exported_name
from deploy.metrics.table import GROUPS, with_table
from deploy.observe import GRAFANA
from tests.deploy.promql import (
    FAMILIES,
    dashboards,
    exported,
    label_values,
    panel_queries,
    panels,
    selectors,
)
from workers.telemetry.meter import Kind

BOARDS = dashboards()
SCHEMA = Path(__file__).parent / "grafana_dashboard.schema.json"
# What Grafana still draws.
PANELS = {"timeseries", "stat", "table", "heatmap", "bargauge"}


def ids(path: Path) -> str:
    return path.stem


@pytest.fixture(params=BOARDS, ids=ids)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BOARDS[request.param]


def test_they_are_as_the_code_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(boards.BOARDS) == {path.stem for path in BOARDS}
    assert boards.main(is_check=True) == 0, capsys.readouterr().out
    assert readme.main(is_check=True) == 0, capsys.readouterr().out


def test_a_stale_one_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boards, "FOLDER", tmp_path)
    assert boards.main(is_check=True) == 1
    assert boards.main(is_check=False) == 0
    assert boards.main(is_check=True) == 0
    file = tmp_path / "speculation.json"
    file.write_text(file.read_text().replace("Acceptance", "Accepted"))
    capsys.readouterr()
    assert boards.main(is_check=True) == 1
    assert capsys.readouterr().out == "not up to date: speculation; run `make generate`\n"
    text = readme.README.read_text()
    changed = text.replace("Draft tokens verified.", "Draft tokens.")
    assert with_table(changed) == text != changed
    with pytest.raises(ValueError, match="no <!--"):
        with_table("a document without a place for it")


def test_the_table_holds_every_series_once() -> None:
    assert Counter(f for _, families in GROUPS for f in families) == Counter(FAMILIES)


def test_h9_they_have_the_shape_of_grafana_s(board: dict[str, Any]) -> None:
    """H9: an option in an old place was silently ignored by a newer Grafana."""
    schema = json.loads(SCHEMA.read_text())
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(board))
    assert [error.message for error in errors] == []
    assert board["schemaVersion"] >= 39
    assert {panel["type"] for panel in panels(board)} <= PANELS


def test_h1_h2_no_data_source_is_named(board: dict[str, Any]) -> None:
    """H1, H2: the author's data source, or inputs that provisioning does not fill in."""
    variables = board["templating"]["list"]
    assert [v["name"] for v in variables] == ["datasource", "namespace", "model", "worker"]
    assert variables[0]["query"] == "prometheus"
    sources = [v["datasource"] for v in variables[1:]]
    sources += [panel["datasource"] for panel in panels(board)]
    sources += [target["datasource"] for p in panels(board) for target in p["targets"]]
    assert all(s == {"type": "prometheus", "uid": "${datasource}"} for s in sources)
    assert "__inputs" not in board
    assert "DS_" not in json.dumps(board)


def test_h1_each_has_an_address_of_its_own() -> None:
    """H1: dashboards with the same uid, or a new one each time, replace each other."""
    uids = [board["uid"] for board in BOARDS.values()]
    assert len(set(uids)) == len(uids) == 3
    assert all(uid.startswith("specserve-") for uid in uids)
    assert all("id" not in board or board["id"] is None for board in BOARDS.values())


def test_every_panel_says_what_it_shows(board: dict[str, Any]) -> None:
    for panel in panels(board):
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles) or board["uid"] == "specserve-speculation"


def test_panels_do_not_overlap(board: dict[str, Any]) -> None:
    places: Counter[tuple[int, int]] = Counter()
    for panel in panels(board):
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        for y in range(grid["y"], grid["y"] + grid["h"]):
            places.update((x, y) for x in range(grid["x"], grid["x"] + grid["w"]))
    assert max(places.values()) == 1


def test_h3_f6_queries_name_only_what_is_exported(board: dict[str, Any]) -> None:
    """H3, F6: counters without `_total` and renamed metrics left panels empty."""
    known = exported()
    queries = [*panel_queries(board), *((label, s) for s, label in label_values(board))]
    assert len(queries) > 20
    for title, query in queries:
        for name, labels in selectors(query):
            assert labels <= known[name], (title, name)


def test_f11_rates_come_from_counters(board: dict[str, Any]) -> None:
    """F11: a gauge of throughput kept its last value on an idle server: there is none."""
    endings = {Kind.COUNTER: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count"), Kind.GAUGE: ()}
    grows = {exported_name(family) + end for family in FAMILIES for end in endings[family.kind]}
    for title, query in panel_queries(board):
        has_rate = "rate(" in query or "increase(" in query
        assert has_rate == any(name in grows for name, _ in selectors(query)), title
    assert not any(word in f.name for f in FAMILIES for word in ("throughput", "per_second"))


def test_provisioning_finds_them() -> None:
    folder = GRAFANA / "provisioning"
    provider = yaml.safe_load((folder / "dashboards" / "specserve.yaml").read_text())
    assert provider["providers"][0]["options"]["path"] == "${SPECSERVE_DASHBOARDS}"
    source = yaml.safe_load((folder / "datasources" / "specserve.yaml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"
