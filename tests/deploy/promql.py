"""What queries ask for, found by a parser, and the series that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from deploy.metrics.families import EXPORTER, OF_ROLE, exported_name, labels_of
from deploy.observe import GRAFANA, RULES
from workers.telemetry.meter import Kind

# What Prometheus adds to every series of a target, or to a histogram's buckets.
TARGET_LABELS = {"namespace", "job", "instance"}
FAMILIES = (*(family for families in OF_ROLE.values() for family in families), *EXPORTER)


@dataclass(frozen=True)
class Rule:
    """A rule of Prometheus."""

    name: str
    expr: str
    is_alert: bool


def exported() -> dict[str, set[str]]:
    """Return the name of each series that is exported -> the names of its labels."""
    found = {}
    for family in FAMILIES:
        name, labels = exported_name(family), {*labels_of(family), *TARGET_LABELS}
        if family.kind is Kind.HISTOGRAM:
            found[f"{name}_bucket"] = {*labels, "le"}
            found[f"{name}_sum"] = found[f"{name}_count"] = labels
        else:
            found[name] = labels
    return found


def rules() -> list[Rule]:
    """Return every rule that is shipped."""
    found = []
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                name = rule.get("alert") or rule["record"]
                found.append(Rule(name, rule["expr"], "alert" in rule))
    return found


def dashboards() -> dict[Path, dict[str, Any]]:
    """Return every dashboard that is shipped."""
    return {path: json.loads(path.read_text()) for path in sorted(GRAFANA.glob("*.json"))}


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels that show something."""
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels") or ()


def filled_in(text: str) -> str:
    """Return a panel's or a variable's query as Grafana sends it, with everything selected."""
    text = re.sub(r"\$__(rate_interval|interval|range)\b", "1m", text)
    return re.sub(r"\$(namespace|model|worker)\b", ".*", text)


def panel_queries(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """Return title and query of every panel."""
    return [
        (panel["title"], filled_in(target["expr"]))
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def label_values(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """Return selector and label of every query of a variable."""
    found = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", filled_in(variable["query"]))
            assert match, variable["query"]
            found.append((match[1], match[2]))
    return found


def selectors(expr: str) -> list[tuple[str, set[str]]]:
    """Return name and labels of every selector of a query.

    Raises:
        ValueError: It is no query.
    """
    found: list[tuple[str, set[str]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name or "", {m.name for m in node.matchers.matchers}))

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found
