"""Meters, and how what they hold is passed on."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.contracts import Report, Role
from workers.errors import WorkerLost
from workers.telemetry import series
from workers.telemetry.meter import (
    Meter,
    Snapshot,
    counter,
    gauge,
    histogram,
    minus,
    plus,
    total,
)
from workers.telemetry.reporter import Reporter

COUNT = counter("count", "Things.", "kind")
PLAIN = counter("plain", "Things.")
LEVEL = gauge("level", "How high.")
SIZES = histogram("sizes", "Sizes.", (1.0, 2.0, 4.0))


def test_a_family_without_labels_exists_from_the_start() -> None:
    """`increase()` does not see the first event of a series that did not exist."""
    snapshot = Meter((COUNT, PLAIN, SIZES)).snapshot()
    assert snapshot == {"count": {}, "plain": {(): 0.0}, "sizes": {(): [0.0] * 5}}


def test_values_lie_in_the_bucket_whose_bound_they_do_not_pass() -> None:
    meter = Meter((SIZES,))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        meter.observe(SIZES, value)
    meter.observe(SIZES, 3.0, times=2)
    assert meter.snapshot()["sizes"][()] == [2, 1, 3, 1, 0.5 + 1 + 1.5 + 4 + 9 + 6]


def test_a_snapshot_does_not_change_any_more() -> None:
    meter = Meter((COUNT, SIZES))
    meter.add(COUNT, 2, "a")
    before = meter.snapshot()
    meter.add(COUNT, 1, "a")
    meter.observe(SIZES, 1)
    assert before == {"count": {("a",): 2.0}, "sizes": {(): [0.0] * 5}}


def test_a_series_has_its_family_s_labels() -> None:
    meter = Meter((COUNT,))
    with pytest.raises(ValueError, match=r"labels \('kind',\)"):
        meter.add(COUNT, 1)
    with pytest.raises(KeyError):
        meter.add(PLAIN)


def test_totals_are_over_the_series_asked_for() -> None:
    both = counter("both", "Things.", "kind", "place")
    meter = Meter((both,))
    for number, labels in enumerate((("a", "x"), ("a", "y"), ("b", "x")), 1):
        meter.add(both, number, *labels)
    snapshot = meter.snapshot()
    assert total(snapshot, both) == 6
    assert total(snapshot, both, kind="a") == 3
    assert total(snapshot, both, place="x", kind="b") == 3


@given(st.lists(st.integers(0, 100), min_size=3, max_size=3))
def test_a_value_less_itself_is_nothing(cells: list[int]) -> None:
    value = [float(cell) for cell in cells]
    assert plus(value, minus(value)) == [0.0] * 3
    assert plus(1.5, minus(1.5)) == 0
    with pytest.raises(ValueError, match="different families"):
        plus(1.0, value)


def test_names_and_labels_are_fit_for_prometheus() -> None:
    names = [family.name for family in series.FAMILIES]
    assert len(set(names)) == len(names)
    for family in series.FAMILIES:
        assert not family.name.endswith("_total")
        assert not {"model", "worker", "le"} & set(family.labels)
        assert list(family.buckets) == sorted(set(family.buckets))
        assert family.help.endswith(".")


class Taker:
    """What reports are pushed to."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.num_failures = 0

    async def push(self, report: Report) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise WorkerLost("the exporter is gone")
        self.reports.append(report)


def make_reporter(meter: Meter, taker: Taker) -> Reporter:
    async def read() -> Snapshot:
        return meter.snapshot()

    return Reporter(Role.WORKER, "m", "w1", read, taker.push, interval_s=0.01)


async def test_what_changed_is_passed_on_and_what_did_not_is_not() -> None:
    meter, taker = Meter((PLAIN,)), Taker()
    reporter = make_reporter(meter, taker)
    reporter.start()
    reporter.start()  # again: health checks do
    for _ in range(3):
        meter.add(PLAIN)
        await asyncio.sleep(0.1)
    await reporter.stop()
    counts = [report.snapshot["plain"][()] for report in taker.reports]
    assert counts[-1] == 3
    # One each, and the last one; the first may have been taken before the first count.
    assert 4 <= len(counts) <= 5
    numbers = [report.number for report in taker.reports]
    assert numbers == sorted(set(numbers))
    assert [report.is_last for report in taker.reports] == [False] * (len(counts) - 1) + [True]
    assert {(r.role, r.model_id, r.source) for r in taker.reports} == {(Role.WORKER, "m", "w1")}


async def test_an_exporter_that_is_gone_costs_nothing_that_was_counted() -> None:
    meter, taker = Meter((PLAIN,)), Taker()
    taker.num_failures = 3
    reporter = make_reporter(meter, taker)
    meter.add(PLAIN, 7)
    reporter.start()
    while not taker.reports:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await reporter.stop()
    assert taker.reports[0].snapshot["plain"][()] == 7
    assert taker.num_failures == 0


async def test_a_process_that_has_nothing_to_tell_is_still_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silence means that a worker is gone."""
    monkeypatch.setattr("workers.telemetry.reporter.HEARTBEAT_S", 0.05)
    taker = Taker()
    reporter = make_reporter(Meter((PLAIN,)), taker)
    reporter.start()
    while len(taker.reports) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await reporter.stop()
