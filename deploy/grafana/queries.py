"""PromQL for the dashboards, from the families that the code counts.

Owns how rates, ratios and quantiles are written. Knows no panels. Invariants: a query names no
series that is not exported, since it is made of the families; and it never gives NaN: where nothing
was counted, a ratio and a quantile give nothing (a comparison drops NaN), and a rate gives 0.
"""

from __future__ import annotations

from deploy.metrics.families import exported_name
from workers.telemetry.meter import Family, Kind

_PLACE = 'namespace=~"$namespace", model=~"$model"'


def series(family: Family, ending: str = "", **labels: str) -> str:
    """Return a selector of the series that the dashboard's variables leave.

    Args:
        family: Whose.
        ending: Of a histogram's name: `_bucket`, `_sum` or `_count`.
        labels: Patterns that they match.
    """
    place = _PLACE
    if family.is_per_worker:
        place += ', worker=~"$worker"'
    matchers = "".join(f', {name}=~"{pattern}"' for name, pattern in labels.items())
    return f"{exported_name(family)}{ending}{{{place}{matchers}}}"


def total(family: Family, *by: str, **labels: str) -> str:
    """Return the sum of gauges."""
    return f"sum{_by(by)} ({series(family, **labels)})"


def rate(family: Family, *by: str, ending: str = "", **labels: str) -> str:
    """Return the sum of counters' growth a second."""
    return f"sum{_by(by)} (rate({series(family, ending, **labels)}[$__rate_interval]))"


def increase(
    family: Family, *by: str, ending: str = "", window: str = "$__rate_interval", **labels: str
) -> str:
    """Return the sum of counters' growth."""
    return f"sum{_by(by)} (increase({series(family, ending, **labels)}[{window}]))"


def buckets(family: Family) -> str:
    """Return how many observations fell below each bound of a histogram, for a heat map."""
    assert family.kind is Kind.HISTOGRAM
    return increase(family, "le", ending="_bucket")


def ratio(part: str, whole: str) -> str:
    """Return a quotient, and nothing where it is 0 / 0."""
    return f"({part} / {whole}) >= 0"


def mean(family: Family, *by: str, **labels: str) -> str:
    """Return the mean of what a histogram observed lately."""
    assert family.kind is Kind.HISTOGRAM
    return ratio(
        rate(family, *by, ending="_sum", **labels), rate(family, *by, ending="_count", **labels)
    )


def quantile(share: float, family: Family, *by: str, **labels: str) -> str:
    """Return a quantile of what a histogram observed lately."""
    assert family.kind is Kind.HISTOGRAM
    growth = rate(family, "le", *by, ending="_bucket", **labels)
    return f"histogram_quantile({share:g}, {growth}) >= 0"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""
