"""Counters, gauges and histograms of one process, as plain numbers.

Owns what a family of series is, and the values of one process's families. Knows no Prometheus and
no other process: the exporter reads snapshots, adds them up and renders them. Invariants: a value
belongs to a family that was declared, under as many label values as that has labels; counters and
histograms only grow; a snapshot is a copy that nothing changes any more.

Not thread-safe: each meter is written and read on one thread (or event loop).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a family's numbers mean."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """The series of one name."""

    # Without the prefix `specserve_`, and a counter's without `_total`.
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    # Upper bounds of a histogram's buckets, ascending, infinity left out.
    buckets: tuple[float, ...] = ()
    # Whether each worker's numbers are shown, and not only their sum.
    is_per_worker: bool = False


# Label values of a series, in the order of the family's labels.
Labels = tuple[str, ...]
# A counter or a gauge; or a histogram's buckets, each for itself, the infinite one, and the sum.
Value = float | list[float]
# Family's name -> its series.
Snapshot = dict[str, dict[Labels, Value]]


def counter(name: str, text: str, *labels: str, is_per_worker: bool = False) -> Family:
    """Declare a counter."""
    return Family(name, Kind.COUNTER, text, labels, is_per_worker=is_per_worker)


def gauge(name: str, text: str, *labels: str, is_per_worker: bool = False) -> Family:
    """Declare a gauge."""
    return Family(name, Kind.GAUGE, text, labels, is_per_worker=is_per_worker)


def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Family:
    """Declare a histogram; of all workers together, as it is many series already."""
    return Family(name, Kind.HISTOGRAM, text, labels, buckets)


class Meter:
    """The values of one process."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = {family.name: family for family in families}
        self._values: Snapshot = {name: {} for name in self._families}
        for family in self._families.values():
            if not family.labels:
                self.touch(family)

    def touch(self, family: Family, *labels: str) -> None:
        """Let a series exist: `rate()` does not see the first event of one that did not."""
        self._series(family, labels)

    def add(self, family: Family, number: float = 1, *labels: str) -> None:
        """Count."""
        series = self._series(family, labels)
        series[labels] += number  # type: ignore[operator]

    def set(self, family: Family, number: float, *labels: str) -> None:
        """Set a gauge."""
        self._series(family, labels)[labels] = float(number)

    def observe(self, family: Family, value: float, *labels: str, times: int = 1) -> None:
        """Put a value into a histogram, so many times."""
        cells = self._series(family, labels)[labels]
        assert isinstance(cells, list)
        cells[bisect_left(family.buckets, value)] += times
        cells[-1] += value * times

    def snapshot(self) -> Snapshot:
        """Return a copy of all values."""
        return {name: copied(series) for name, series in self._values.items()}

    def _series(self, family: Family, labels: Labels) -> dict[Labels, Value]:
        series = self._values[family.name]
        if labels not in series:
            if len(labels) != len(family.labels):
                raise ValueError(f"{family.name} has labels {family.labels}, not {labels}")
            is_histogram = family.kind is Kind.HISTOGRAM
            series[labels] = [0.0] * (len(family.buckets) + 2) if is_histogram else 0.0
        return series


def copied(series: Mapping[Labels, Value]) -> dict[Labels, Value]:
    """Return a copy that shares nothing that changes."""
    return {key: value[:] if isinstance(value, list) else value for key, value in series.items()}


def plus(one: Value, other: Value) -> Value:
    """Add two values of a series."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [a + b for a, b in zip(one, other, strict=True)]
    if isinstance(one, list) or isinstance(other, list):
        raise ValueError(f"values of different families: {one} and {other}")
    return one + other


def minus(value: Value) -> Value:
    """Return the negative of a value."""
    return [-cell for cell in value] if isinstance(value, list) else -value


def total(snapshot: Snapshot, family: Family, **labels: str) -> float:
    """Return the sum of a counter's or a gauge's series with these label values."""
    wanted = [(family.labels.index(name), value) for name, value in labels.items()]
    return sum(
        value
        for key, value in snapshot.get(family.name, {}).items()
        if not isinstance(value, list) and all(key[i] == text for i, text in wanted)
    )


def by_label(snapshot: Snapshot, family: Family) -> dict[str, float]:
    """Return the values of a counter or gauge with one label."""
    return {
        key[0]: value
        for key, value in snapshot.get(family.name, {}).items()
        if not isinstance(value, list)
    }
