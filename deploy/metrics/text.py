"""Writes a ledger as Prometheus' text.

Owns which processes' numbers are added up and which are shown apart. Knows no Ray. Invariant: a
scrape holds every family, under one name and type, and each of its series once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from deploy.metrics.families import BUILD, OF_ROLE, PREFIX, UP, labels_of
from deploy.metrics.ledger import Ledger
from workers.contracts import Role
from workers.telemetry.meter import Family, Kind, Labels, Value, plus

# Values of the labels of `BUILD`.
Build = tuple[str, str, str]


def render(ledger: Ledger, build: Build, now_s: float) -> str:
    """Return all that was reported, as Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(_Scrape(ledger, build, now_s))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


@dataclass(frozen=True, slots=True)
class _Scrape:
    """A collector, in the shape that `prometheus_client` asks for."""

    ledger: Ledger
    build: Build
    now_s: float

    def collect(self) -> Iterable[Metric]:
        """Yield every family."""
        for role, families in OF_ROLE.items():
            for family in families:
                yield _metric(family, labels_of(family), self._series(role, family))
        yield _metric(UP, labels_of(UP), self._ups())
        yield _metric(BUILD, BUILD.labels, [(self.build, 1.0)])

    def _series(self, role: Role, family: Family) -> Iterable[tuple[Labels, Value]]:
        """Return the family's series, each under all its labels."""
        is_gauge = family.kind is Kind.GAUGE
        summed: dict[Labels, Value] = {}
        for model_id, number, slot in self.ledger.slots(role):
            if is_gauge and not slot.is_heard(self.now_s):
                continue
            series = slot.snapshot.get(family.name, {}) if is_gauge else slot.total(family)
            place = (model_id, str(number)) if family.is_per_worker else (model_id,)
            for labels, value in series.items():
                key = (*place, *labels)
                summed[key] = plus(summed[key], value) if key in summed else value
        return summed.items()

    def _ups(self) -> Iterator[tuple[Labels, Value]]:
        for model_id, number, slot in self.ledger.slots(Role.WORKER):
            is_heard = slot.is_heard(self.now_s)
            is_missed = self.ledger.is_missed(Role.WORKER, model_id, number, self.now_s)
            if is_heard or is_missed:
                yield (model_id, str(number)), float(is_heard)


def _metric(
    family: Family, labels: tuple[str, ...], series: Iterable[tuple[Labels, Value]]
) -> Metric:
    name = PREFIX + family.name
    if family.kind is Kind.HISTOGRAM:
        return _histogram(HistogramMetricFamily(name, family.help, labels=labels), family, series)
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = make(name, family.help, labels=labels)
    for values, number in series:
        assert not isinstance(number, list)
        metric.add_metric(values, number)
    return metric


def _histogram(
    metric: HistogramMetricFamily, family: Family, series: Iterable[tuple[Labels, Value]]
) -> Metric:
    bounds = [*(f"{bound:g}" for bound in family.buckets), "+Inf"]
    for values, cells in series:
        assert isinstance(cells, list)
        counts = accumulate(cells[:-1])
        metric.add_metric(values, list(zip(bounds, counts, strict=True)), cells[-1])
    return metric
