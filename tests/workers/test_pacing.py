"""Long prompts, short prompts and running streams share the steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.control_plane import make_scheduler, make_sequence
from workers.pacing import MIN_TOKENS, Pacer
from workers.scheduler import Batch, Scheduler

BASE_S, TOKEN_S = 0.010, 0.0005


def _cost(num_prompt_tokens: int, slowness: float = 1.0) -> float:
    return slowness * (BASE_S + TOKEN_S * num_prompt_tokens)


def _run(pacer: Pacer, steps: int, slowness: float = 1.0) -> list[float]:
    """Run steps of a prompt that takes all it gets, with one without prompts in between."""
    taken = []
    for _ in range(steps):
        num_tokens = pacer.num_tokens
        num_tokens = 512 if num_tokens is None else min(num_tokens, 512)
        taken.append(_cost(num_tokens, slowness))
        pacer.observe(taken[-1], num_tokens)
        pacer.observe(_cost(0, slowness), 0)
    return taken


def test_d5_steps_keep_to_their_time_after_the_first() -> None:
    """D5: a long prompt raised everybody's time between tokens."""
    pacer = Pacer(0.1)
    taken = _run(pacer, 50)
    assert taken[0] == _cost(512)  # nothing was known
    # What the decoding rows cost is known a little too late for the second.
    assert max(taken[2:]) <= 0.1 * 1.01
    assert min(taken[10:]) > 0.09, "the budget is not used"
    slower = _run(pacer, 50, slowness=3)
    assert max(slower[25:]) <= 0.1 * 1.01


def test_the_first_long_prompt_is_paced_by_what_came_before() -> None:
    """Without experience the first one took a step for as long as it liked."""
    pacer = Pacer(0.1)
    pacer.observe(_cost(100), 100, has_decodes=False)
    first = pacer.num_tokens
    assert first is not None
    assert first < 200
    pacer.observe(_cost(0), 0)
    pacer.observe(_cost(4000), 4000, has_decodes=False)  # such a step says nothing any more
    assert pacer.num_tokens == int((0.1 - BASE_S) / (_cost(100) / 100))


def test_it_never_stops_a_prompt() -> None:
    pacer = Pacer(0.001)
    _run(pacer, 5)
    assert pacer.num_tokens == MIN_TOKENS


@pytest.mark.parametrize("seconds", [None, 0.1])
def test_without_a_budget_or_experience_there_is_no_limit(seconds: float | None) -> None:
    pacer = Pacer(seconds)
    assert pacer.num_tokens is None
    pacer.observe(0.01, 0)
    assert pacer.num_tokens is None
    if seconds is None:
        _run(pacer, 5)
        assert pacer.num_tokens is None


@given(
    st.floats(0.001, 1),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 4096)), max_size=60),
)
def test_any_steps_leave_it_usable(max_step_s: float, steps: list[tuple[float, int]]) -> None:
    pacer = Pacer(max_step_s)
    for seconds, num_tokens in steps:
        pacer.observe(seconds, num_tokens)
        assert pacer.num_tokens is None or pacer.num_tokens >= MIN_TOKENS


def _commit_all(scheduler: Scheduler, batch: Batch) -> None:
    for item in batch.scheduled:
        scheduler.commit(item, [5] if item.samples else [])


def _steps_until_first(scheduler: Scheduler, name: str, limit: int | None = None) -> int:
    for number in range(1, 1000):
        batch = scheduler.schedule(limit)
        _commit_all(scheduler, batch)
        if any(i.seq.request_id == name and i.seq.num_emitted for i in batch.scheduled):
            return number
    raise AssertionError("it never got a token")


def test_d5_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """D5: behind a prompt of 64k tokens everybody waited for the whole of it."""
    options = {"max_step_tokens": 128, "max_chunk_tokens": 128, "max_running": 8}
    scheduler = make_scheduler(num_blocks=200, max_model_len=4096, **options)
    scheduler.add(make_sequence(2000, name="long"))
    _commit_all(scheduler, scheduler.schedule())
    scheduler.add(make_sequence([7] * 1000, name="second"))
    scheduler.add(make_sequence([8] * 20, name="short"))
    assert _steps_until_first(scheduler, "short") == 1
    assert scheduler.waiting[0].request_id == "second"


def test_a_long_prompt_does_not_wait_for_all_short_ones() -> None:
    options = {"max_step_tokens": 128, "max_chunk_tokens": 128, "max_running": 16}
    scheduler = make_scheduler(num_blocks=400, max_model_len=4096, **options)
    scheduler.add(make_sequence(600, name="long", max_tokens=2))
    num_steps = 0
    while scheduler.has_work and num_steps < 100:
        for i in range(6):  # more than the step holds, always
            scheduler.add(make_sequence([i, num_steps] * 14, name=f"{num_steps}-{i}", max_tokens=1))
        batch = scheduler.schedule()
        _commit_all(scheduler, batch)
        num_steps += 1
        if any(i.seq.request_id == "long" and i.samples for i in batch.scheduled):
            break
    assert num_steps <= 600 // (128 // 4) + 2


def test_the_first_prompts_prefix_is_reused_by_those_that_wait() -> None:
    """Copies of a long prompt ran beside it instead of waiting to find it in the cache."""
    options = {"max_step_tokens": 128, "max_chunk_tokens": 128, "max_running": 8}
    scheduler = make_scheduler(num_blocks=400, max_model_len=4096, **options)
    for number in range(4):
        scheduler.add(make_sequence(1000, name=str(number), max_tokens=1))
    num_tokens = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        num_tokens += sum(item.num_new_tokens for item in batch.scheduled)
        _commit_all(scheduler, batch)
        for item in batch.scheduled:
            if not item.seq.is_finished:
                scheduler.publish(item.seq)
    assert num_tokens < 1.5 * 1000


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 12), st.integers(0, 6)), max_size=25),
    st.sampled_from([None, 32, 64]),
    st.integers(0, 2**32),
)
def test_everybody_gets_on(
    arrivals: list[tuple[int, int, int]], limit: int | None, seed: int
) -> None:
    """Whatever comes: decoding rows are in every step, and every prompt has its tokens in time."""
    options = {"max_step_tokens": 96, "max_chunk_tokens": 64, "max_running": 8}
    scheduler = make_scheduler(num_blocks=400, max_model_len=2048, **options)
    rng = random.Random(seed)
    total = sum(length + num for length, num, _ in arrivals)
    waiting = [
        (pause, make_sequence([rng.randrange(50) for _ in range(length)], name=str(i),
                              max_tokens=num))
        for i, (length, num, pause) in enumerate(arrivals)
    ]  # fmt: skip
    num_steps = 0
    while waiting or scheduler.has_work:
        while waiting and waiting[0][0] <= num_steps % 7:
            scheduler.add(waiting.pop(0)[1])
        decoding = [seq for seq in scheduler.running if seq.num_uncomputed == 1]
        oldest = next((s for s in scheduler.running if s.num_uncomputed > 1), None)
        batch = scheduler.schedule(limit)
        in_step = {item.seq for item in batch.scheduled}
        assert set(decoding) <= in_step
        assert oldest is None or oldest in in_step
        num_new = sum(item.num_new_tokens for item in batch.scheduled)
        assert num_new <= 96
        if decoding and limit is not None:
            assert batch.num_prompt_tokens <= limit
        _commit_all(scheduler, batch)
        num_steps += 1
        assert num_steps < 50 + 3 * total, "somebody waits for ever"
