"""Panels and dashboards of one style.

Owns look and layout: rows of panels on Grafana's grid of 24 columns, the variables, the links.
Knows no metrics. Invariants: no data source is named, each is chosen by the variable; every panel
has a description, a unit, and a text for when there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

SOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "specserve"
# Set with every change that a dashboard's owner should notice.
VERSION = 1

# Where a value turns orange and red, as `((0.8, "orange"), (0.95, "red"))`; green before the first.
Steps = tuple[tuple[float, str], ...]
Panel = timeseries.Panel | stat.Panel | table.Panel | heatmap.Panel


@dataclass(frozen=True, slots=True)
class Query:
    """A query and how its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over time."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    steps: Steps = ()
    is_stacked: bool = False
    # Lowest and highest value shown; None = as the data are.
    bottom: float | None = 0
    top: float | None = None

    def build(self) -> Panel:
        """Return the panel."""
        panel = (
            timeseries.Panel()
            .fill_opacity(40 if self.is_stacked else 8)
            .line_width(1)
            .show_points(common_models.VisibilityMode.NEVER)
            .legend(
                common.VizLegendOptions()
                .display_mode(common_models.LegendDisplayMode.TABLE)
                .placement(common_models.LegendPlacement.BOTTOM)
                .show_legend(True)
                .calcs(["lastNotNull", "max"])
            )
            .tooltip(
                common.VizTooltipOptions()
                .mode(common_models.TooltipDisplayMode.MULTI)
                .sort(common_models.SortOrder.DESCENDING)
            )
            .thresholds(thresholds(self.steps))
        )
        if self.is_stacked:
            panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
        if self.steps:
            mode = common_models.GraphThresholdsStyleMode.DASHED
            panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(mode))
        if self.bottom is not None:
            panel.min(self.bottom)
        if self.top is not None:
            panel.max(self.top)
        return panel.targets([_target(query) for query in self.queries])


@dataclass(frozen=True, slots=True)
class Number:
    """One number, as of now."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    steps: Steps = ()
    decimals: int = 2

    def build(self) -> Panel:
        """Return the panel."""
        return (
            stat.Panel()
            .graph_mode(common_models.BigValueGraphMode.AREA)
            .color_mode(common_models.BigValueColorMode.VALUE)
            .decimals(self.decimals)
            .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            .thresholds(thresholds(self.steps))
            .targets([_target(query) for query in self.queries])
        )


@dataclass(frozen=True, slots=True)
class Heat:
    """A histogram's buckets over time."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]

    def build(self) -> Panel:
        """Return the panel."""
        buckets = prometheus_models.PromQueryFormat.HEATMAP
        return (
            heatmap.Panel()
            .calculate(False)
            .targets([_target(query).format(buckets) for query in self.queries])
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """A table of labels."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    # Columns that say nothing.
    hidden: tuple[str, ...]

    def build(self) -> Panel:
        """Return the panel."""
        rows = prometheus_models.PromQueryFormat.TABLE
        drop = models.DataTransformerConfig(
            id_val="organize", options={"excludeByName": dict.fromkeys(self.hidden, True)}
        )
        return (
            table.Panel()
            .with_transformation(drop)
            .targets([_target(query).format(rows).instant() for query in self.queries])
        )


Content = Chart | Number | Heat | Facts


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title, all of one size, left to right."""

    title: str
    panels: Sequence[Content]
    # Of 24.
    width: int = 8
    height: int = 8


def thresholds(steps: Steps) -> board.ThresholdsConfig:
    """Return a scale of colours."""
    first = models.Threshold(value=None, color="green")
    rest = [models.Threshold(value=value, color=color) for value, color in steps]
    mode = models.ThresholdsMode.ABSOLUTE
    return board.ThresholdsConfig().mode(mode).steps([first, *rest])


def make_dashboard(
    uid: str, title: str, description: str, rows: Sequence[Row], variables: dict[str, str]
) -> models.Dashboard:
    """Return a dashboard.

    Args:
        uid: Its address, which never changes.
        title: Its name.
        description: What it is for.
        rows: What it shows.
        variables: Name -> the query of its values.
    """
    made = (
        board.Dashboard(title)
        .uid(uid)
        .description(description)
        .version(VERSION)
        .tags([TAG])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_others())
        .with_variable(
            board.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for name, query in variables.items():
        made.with_variable(_variable(name, query))
    for row in rows:
        made.with_row(board.Row(row.title))
        for content in row.panels:
            made.with_panel(
                content.build()
                .title(content.title)
                .description(content.description)
                .unit(content.unit)
                .no_value("nothing yet")
                .datasource(SOURCE)
                .span(row.width)
                .height(row.height)
            )
    return made.build()


def _others() -> board.DashboardLink:
    kind = models.DashboardLinkType.DASHBOARDS
    return (
        board.DashboardLink("Dashboards").type(kind).tags([TAG]).keep_time(True).include_vars(True)
    )


def _variable(name: str, query: str) -> board.QueryVariable:
    return (
        board.QueryVariable(name)
        .label(name.capitalize())
        .query(query)
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _target(query: Query) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query.expr).legend_format(query.legend).datasource(SOURCE)
