"""The line that a worker writes about what it did, and what it knows of the costs of steps."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.activity import ActivityLog
from workers.costs import StepCosts
from workers.telemetry import series
from workers.telemetry.meter import Meter

BY = ("ngram", "text")


def work(meter: Meter, tokens: int, drafts: int, accepted: int) -> None:
    meter.add(series.GENERATED_TOKENS, tokens)
    meter.add(series.DRAFTS, 1, *BY)
    meter.add(series.DRAFT_TOKENS, drafts, *BY)
    meter.add(series.ACCEPTED_TOKENS, accepted, *BY)


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, int]]:
    return [
        {k.removeprefix("new_"): v for k, v in vars(record).items() if k.startswith("new_")}
        for record in caplog.records
    ]


def test_a_line_holds_what_is_new(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    meter, log = Meter(series.FAMILIES), ActivityLog(10)
    log.show(meter.snapshot(), 0)
    work(meter, 30, 12, 9)
    meter.set(series.BLOCKS, 8)
    meter.set(series.FREE_BLOCKS, 6)
    meter.set(series.RUNNING, 2)
    log.show(meter.snapshot(), 5)  # not due
    log.show(meter.snapshot(), 10)
    work(meter, 5, 4, 1)
    log.show(meter.snapshot(), 20)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "30 tokens (3.0/s), 0 of prompts; 2 running, 0 waiting; K/V 25% held;"
        " 9 of 12 drafts accepted (0.75), length 10.00; 0 draft failures"
    )
    assert "5 tokens (0.5/s)" in second
    assert "1 of 4 drafts accepted (0.25)" in second


def test_an_idle_worker_is_silent_and_the_last_line_does_not_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    meter, log = Meter(series.FAMILIES), ActivityLog(10)
    for now_s in (0, 10, 20, 30):
        log.show(meter.snapshot(), now_s)
    assert not caplog.records
    work(meter, 1, 1, 1)
    log.show(meter.snapshot(), 31, is_last=True)
    assert len(caplog.records) == 1


def test_it_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    meter, log = Meter(series.FAMILIES), ActivityLog(0)
    work(meter, 1, 1, 1)
    log.show(meter.snapshot(), 0)
    log.show(meter.snapshot(), 1000, is_last=True)
    assert not caplog.records


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15)), max_size=20))
def test_f2_all_lines_together_are_the_counters(done: list[tuple[int, int]]) -> None:
    """F2: the log said 0.80 where the counters said something else."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("workers.activity")
    level, logger.level = logger.level, logging.INFO
    logger.addHandler(handler)
    meter, log, now_s = Meter(series.FAMILIES), ActivityLog(10), 0.0
    log.show(meter.snapshot(), now_s)
    for number, wait_s in done:
        work(meter, number + 1, number, number // 2)
        now_s += wait_s
        log.show(meter.snapshot(), now_s)
    log.show(meter.snapshot(), now_s, is_last=True)
    logger.removeHandler(handler)
    logger.setLevel(level)
    for name, wanted in (
        ("new_tokens", sum(number + 1 for number, _ in done)),
        ("new_draft_tokens", sum(number for number, _ in done)),
        ("new_accepted_tokens", sum(number // 2 for number, _ in done)),
        ("new_drafts", len(done)),
    ):
        assert sum(vars(record)[name] for record in records) == wanted


def test_costs_are_means_and_lie_between_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.estimate(1) is None
    for seconds in (1.0, 3.0):
        costs.observe(2, seconds)
    costs.observe(6, 4.0)
    assert costs.estimate(2) == pytest.approx(2.0)
    assert costs.estimate(4) == pytest.approx(3.0)
    # Beyond what was ever run nothing is known.
    assert costs.estimate(1) is None
    assert costs.estimate(7) is None


def test_costs_follow_a_change() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(4, 1.0)
    for _ in range(50):
        costs.observe(4, 2.0)
    assert costs.estimate(4) == pytest.approx(2.0, rel=0.01)


def test_big_steps_of_similar_sizes_are_taken_together() -> None:
    costs = StepCosts()
    costs.observe(1000, 1.0)
    assert costs.estimate(1020) == 1.0
    assert costs.estimate(1100) is None


@given(st.dictionaries(st.integers(1, 4000), st.floats(0.001, 1.0), min_size=1, max_size=20))
def test_an_estimate_is_bounded_by_its_neighbours(measured: dict[int, float]) -> None:
    costs = StepCosts()
    for size, seconds in measured.items():
        costs.observe(size, seconds)
    sizes = sorted(measured)
    for low, high in pairwise(sizes):
        estimate = costs.estimate((low + high) // 2)
        assert estimate is not None
        assert min(measured.values()) - 1e-9 <= estimate <= max(measured.values()) + 1e-9
