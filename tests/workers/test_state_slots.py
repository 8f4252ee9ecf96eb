"""Slots of recurrent state: who owns them, and which prefixes can be reused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import SchedulerConfig
from workers.contracts import GenerationRequest, SamplingParams
from workers.kv.block_manager import BlockManager
from workers.kv.state_slots import StateSlots
from workers.scheduler import ScheduledSequence, Scheduler
from workers.sequence import Sequence

BLOCK, INTERVAL = 16, 32


def _sequence(name: str, ids: list[int], max_tokens: int = 8) -> Sequence:
    params = SamplingParams(seed=0, max_tokens=max_tokens)
    request = GenerationRequest(name, tuple(ids), params)
    return Sequence(request, frozenset(), len(ids) + max_tokens, may_draft=True)


def _parts(
    checkpoints: int = 4, running: int = 4, blocks: int = 64
) -> tuple[Scheduler, StateSlots]:
    slots = StateSlots(running, checkpoints, INTERVAL)
    manager = BlockManager(blocks, BLOCK, states=slots)
    config = SchedulerConfig(max_chunk_tokens=48, max_running=running, max_step_tokens=256)
    return Scheduler(config, manager, 1024), slots


def _step(scheduler: Scheduler, token: int = 1) -> list[ScheduledSequence]:
    """Run one step as the engine does, without a model."""
    blocks = scheduler._blocks
    batch = scheduler.schedule()
    assert blocks.states is not None
    for item in batch.scheduled:
        blocks.states.written(item.seq)
        scheduler.commit(item, [token] if item.samples else [])
        if not item.seq.is_finished:
            scheduler.publish(item.seq)
            blocks.checkpoint(item.seq)
            item.seq.draft_ids = [2] * scheduler.plan_drafts(item.seq, 5)
    blocks.check_integrity(scheduler.running)
    return list(batch.scheduled)


def test_chunks_end_where_states_are_kept() -> None:
    scheduler, _ = _parts()
    scheduler.add(_sequence("a", list(range(100))))
    ends = []
    while scheduler.has_work:
        steps = [item for item in _step(scheduler) if item.num_draft_tokens == 0]
        ends += [item.num_new_tokens for item in steps if item.num_new_tokens > 1]
    assert ends == [32, 32, 32, 4]


def test_no_step_runs_past_the_place_of_a_checkpoint() -> None:
    """A step of a token and drafts that crossed it would leave no state exactly there."""
    scheduler, _ = _parts()
    scheduler.add(_sequence("a", list(range(28)), max_tokens=60))
    while scheduler.has_work:
        starts = {s: s.num_computed_tokens for s in scheduler.running}
        for item in _step(scheduler):
            start = starts.get(item.seq, 0)
            end = start + item.num_new_tokens
            assert start // INTERVAL == (end - 1) // INTERVAL


def test_d12_a_prefix_is_reused_up_to_its_last_checkpoint() -> None:
    scheduler, _ = _parts()
    ids = list(range(60))
    scheduler.add(_sequence("a", ids))
    while scheduler.has_work:
        _step(scheduler)
    again = _sequence("b", ids)
    scheduler.add(again)
    _step(scheduler)
    # 3 blocks are cached; a state was kept after 2 of them.
    assert again.num_cached_tokens == 32
    other = _sequence("c", [*ids[:40], *range(500, 560)])
    scheduler.add(other)
    _step(scheduler)
    assert other.num_cached_tokens == 32


def test_a_checkpoint_to_start_from_is_not_given_away() -> None:
    slots = StateSlots(2, 1, INTERVAL)
    reader, writer = _sequence("r", [1]), _sequence("w", [1])
    kept = slots.checkpoint(b"prefix")
    slots.acquire(reader, b"prefix")
    slots.acquire(writer, None)
    assert reader.state_source == kept != reader.state_slot
    assert slots.checkpoint(b"other") is None, "the only checkpoint is still to be read"
    slots.written(reader)
    assert slots.checkpoint(b"other") == kept
    slots.check_integrity([reader, writer])


def test_a_forgotten_checkpoint_is_free_once_it_was_read() -> None:
    slots = StateSlots(1, 1, INTERVAL)
    reader = _sequence("r", [1])
    slots.checkpoint(b"prefix")
    slots.acquire(reader, b"prefix")
    slots.forget([b"prefix"])
    slots.check_integrity([reader])
    assert slots.num_cached([b"prefix"]) == 0
    assert slots.checkpoint(b"other") is None
    slots.release(reader)
    slots.check_integrity([])
    assert slots.checkpoint(b"other") is not None


def test_the_least_recently_used_checkpoint_goes_first() -> None:
    slots = StateSlots(1, 2, INTERVAL)
    slots.checkpoint(b"a")
    slots.checkpoint(b"b")
    assert slots.checkpoint(b"a") is None  # known, and used again
    slots.checkpoint(b"c")
    assert [slots.num_cached([key]) for key in (b"a", b"b", b"c")] == [1, 0, 1]


def test_blocks_not_to_be_trusted_take_their_states_along() -> None:
    scheduler, slots = _parts()
    scheduler.add(_sequence("a", list(range(70)), max_tokens=20))
    _step(scheduler)
    (seq,) = scheduler.running
    assert slots.num_cached(seq.block_hashes) == 2
    scheduler._blocks.withdraw(seq)
    assert slots.num_cached(seq.block_hashes) == 0
    scheduler._blocks.check_integrity(scheduler.running)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a17_a_block_is_found_again_only_before_the_token_it_was_written_with(
    lookahead: int,
) -> None:
    """A17: a NEXTN head's K/V at p depends on token p + 1, which a block's own tokens leave out."""
    blocks = BlockManager(16, BLOCK, lookahead=lookahead)
    first = _sequence("a", [*range(16), 100, 101])
    assert blocks.admit(first)
    blocks.publish(first, 16)
    same, other = _sequence("b", [*range(16), 100, 7]), _sequence("c", [*range(16), 55, 101])
    assert blocks.admit(same)
    assert blocks.admit(other)
    assert same.num_computed_tokens == 16
    assert other.num_computed_tokens == (0 if lookahead else 16)


@given(st.randoms(use_true_random=False), st.integers(0, 3), st.integers(6, 24))
@settings(max_examples=40, deadline=None)
def test_books_balance_whatever_comes(
    rng: random.Random, num_checkpoints: int, num_blocks: int
) -> None:
    """Admissions, hits, preemptions, aborts and evictions in any order lose no slot."""
    scheduler, slots = _parts(num_checkpoints, running=3, blocks=num_blocks)
    live: list[Sequence] = []
    for number in range(30):
        if rng.random() < 0.4:
            length = rng.randrange(1, min(90, num_blocks * BLOCK - 12))
            seq = _sequence(str(number), [7] * length, max_tokens=rng.randrange(1, 10))
            scheduler.add(seq)
            live.append(seq)
        if live and rng.random() < 0.15:
            scheduler.remove(live.pop(rng.randrange(len(live))))
        _step(scheduler)
        live = [seq for seq in live if not seq.is_finished]
    for seq in live:
        scheduler.remove(seq)
    slots.check_integrity([])
    assert scheduler._blocks.num_free == num_blocks
