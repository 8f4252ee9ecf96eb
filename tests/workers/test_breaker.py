"""When drafting is left off, and when it is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.config import BreakerConfig, SpeculationConfig
from workers.errors import ConfigError
from workers.spec.breaker import Breaker, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(BreakerConfig(max_failures=3, window=6, open_s=10, max_open_s=35), clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failed()


def test_it_opens_at_the_last_of_too_many_failures(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert (breaker.state, breaker.num_opened) == (CLOSED, 0)
    breaker.failed()
    assert (breaker.state, breaker.num_opened) == (OPEN, 1)


def test_failures_that_are_long_ago_do_not_count(breaker: Breaker) -> None:
    for _ in range(20):
        fail(breaker, 2)
        for _ in range(4):
            breaker.succeeded()
    assert breaker.state is CLOSED
    fail(breaker, 1)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state is OPEN


def test_a_trial_that_goes_well_closes_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 9.9
    assert breaker.state is OPEN
    clock.now_s += 0.1
    assert breaker.state is HALF_OPEN
    breaker.succeeded()
    assert breaker.state is CLOSED
    fail(breaker, 2)  # those before are forgotten
    assert breaker.state is CLOSED


def test_trials_that_fail_are_ever_more_seldom(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    for wait_s in (10, 20, 35, 35):
        clock.now_s += wait_s - 0.01
        assert breaker.state is OPEN
        clock.now_s += 0.01
        assert breaker.state is HALF_OPEN
        breaker.failed()
    assert breaker.num_opened == 5
    clock.now_s += 35
    breaker.succeeded()
    fail(breaker, 3)
    clock.now_s += 10  # and it begins again with the short wait
    assert breaker.state is HALF_OPEN


@given(st.lists(st.sampled_from(["fail", "succeed", 1.0, 7.0, 40.0]), max_size=200))
def test_a_dead_drafter_costs_a_bounded_number_of_tries(events: list[str | float]) -> None:
    clock = Clock()
    breaker = Breaker(BreakerConfig(max_failures=3, window=6, open_s=10, max_open_s=35), clock)
    for event in events:
        if isinstance(event, float):
            clock.now_s += event
        elif breaker.state is not OPEN:  # an open one is told nothing
            breaker.failed() if event == "fail" else breaker.succeeded()
    # From here on nothing goes well any more: at most 3 tries, then one a wait.
    start_s, tries = clock.now_s, 0
    for _ in range(4_000):
        clock.now_s += 0.1
        if breaker.state is not OPEN:
            breaker.failed()
            tries += 1
    assert tries <= 3 + (clock.now_s - start_s) / 10


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"max_failures": 0}, "max_failures"),
        ({"max_failures": 5, "window": 4}, "window"),
        ({"open_s": 0}, "open_s"),
        ({"open_s": float("nan")}, "open_s"),
        ({"open_s": 10, "max_open_s": 9}, "max_open_s"),
        ({"slow_s": -1}, "slow_s"),
        ({"slow_s": float("inf")}, "slow_s"),
    ],
)
def test_ranges(changes: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=f"speculation.breaker.{key}"):
        BreakerConfig(**changes)  # type: ignore[arg-type]
    assert SpeculationConfig().breaker == BreakerConfig()
