"""Scheduling policy, on counts alone: a fake model that always samples one token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.control_plane import make_scheduler, make_sequence
from workers.contracts import FinishReason
from workers.errors import QueueFull, RequestTooLong
from workers.scheduler import Batch, Scheduler


def _commit_all(scheduler: Scheduler, batch: Batch, num_accepted: int = 0) -> None:
    for item in batch.scheduled:
        accepted = min(num_accepted, item.num_draft_tokens)
        scheduler.commit(item, [5] * (accepted + 1) if item.samples else [])


def test_d5_decode_rows_are_in_every_step_while_a_long_prompt_is_prefilled() -> None:
    """D5: prompts always won, and running streams got a step every 24 s."""
    scheduler = make_scheduler(max_step_tokens=32, max_chunk_tokens=24, max_running=4)
    scheduler.add(make_sequence(8, name="a"))
    _commit_all(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(200, name="long"))
    for _ in range(8):
        batch = scheduler.schedule()
        names = [item.seq.request_id for item in batch.scheduled]
        assert names[0] == "a"
        assert sum(item.num_new_tokens for item in batch.scheduled) <= 32
        _commit_all(scheduler, batch)


def test_prompts_progress_while_drafts_would_fill_the_step() -> None:
    scheduler = make_scheduler(max_step_tokens=16, max_running=4)
    for name in "abc":
        scheduler.add(make_sequence(4, name=name))
    _commit_all(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(40, name="prompt"))
    for seq in scheduler.running:
        seq.draft_ids = [5] * scheduler.plan_drafts(seq, 8)
    batch = scheduler.schedule()
    share = {item.seq.request_id: item.num_new_tokens for item in batch.scheduled}
    assert share["prompt"] > 0
    assert all(share[name] >= 1 for name in "abc")


@pytest.mark.parametrize("num_accepted", range(4))
def test_commit_moves_computed_by_accepted_plus_one(num_accepted: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(10))
    _commit_all(scheduler, scheduler.schedule())
    (seq,) = scheduler.running
    assert (seq.num_tokens, seq.num_computed_tokens) == (11, 10)
    seq.draft_ids = [5] * scheduler.plan_drafts(seq, 3)
    _commit_all(scheduler, scheduler.schedule(), num_accepted)
    assert seq.num_tokens == 12 + num_accepted
    assert seq.num_computed_tokens == 11 + num_accepted
    assert seq.draft_ids == []


def test_b21_drafts_are_cut_to_the_room_left() -> None:
    """B21: generation reaching the last k positions of the context crashed the engine."""
    scheduler = make_scheduler()
    scheduler.add(make_sequence(10, max_tokens=3))
    _commit_all(scheduler, scheduler.schedule())
    (seq,) = scheduler.running
    assert scheduler.plan_drafts(seq, 5) == 1  # two tokens left: one draft and the bonus
    seq.draft_ids = [5]
    _commit_all(scheduler, scheduler.schedule(), num_accepted=1)
    assert seq.finish_reason is FinishReason.LENGTH
    assert seq.num_emitted == 3


def test_d1_what_can_never_fit_is_refused_at_once() -> None:
    """D1: a prompt larger than the pool waited for ever, and everyone behind it."""
    scheduler = make_scheduler(num_blocks=4)  # 64 tokens
    assert scheduler.max_sequence_len == 64
    with pytest.raises(RequestTooLong):
        scheduler.sequence_limit(64, None)
    with pytest.raises(RequestTooLong) as caught:
        scheduler.sequence_limit(60, 5)
    assert caught.value.param == "max_tokens"
    assert scheduler.sequence_limit(60, 4) == 64
    assert scheduler.sequence_limit(10, None) == 64


def test_a_full_queue_refuses() -> None:
    scheduler = make_scheduler(max_waiting=2, max_running=1)
    scheduler.add(make_sequence(4, name="running"))
    _commit_all(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(4, name="a"))
    scheduler.add(make_sequence(4, name="b"))
    with pytest.raises(QueueFull):
        scheduler.add(make_sequence(4, name="c"))


def test_shortage_preempts_the_youngest_and_the_oldest_goes_on() -> None:
    scheduler = make_scheduler(num_blocks=4, prefix_caching=False)
    for name in "ab":
        scheduler.add(make_sequence(31, name=name, max_tokens=30))
    for _ in range(3):  # the third step needs a third block each, and there is none
        _commit_all(scheduler, scheduler.schedule())
    assert scheduler.num_preemptions == 1
    assert [seq.request_id for seq in scheduler.running] == ["a"]
    (waiting,) = scheduler.waiting
    assert waiting.request_id == "b"
    assert (waiting.num_tokens, waiting.num_computed_tokens) == (33, 0)
    assert waiting.draft_ids == []


def test_drafts_go_before_anyone_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=4, prefix_caching=False)
    for name in "ab":
        scheduler.add(make_sequence(30, name=name, max_tokens=30))
    _commit_all(scheduler, scheduler.schedule())
    for seq in scheduler.running:
        assert scheduler.plan_drafts(seq, 5) == 1  # one slot left in the own blocks
        seq.draft_ids = [5]
    _commit_all(scheduler, scheduler.schedule(), 1)
    assert scheduler.num_preemptions == 0


def test_a_burst_on_an_idle_worker_may_fill_the_running_places() -> None:
    scheduler = make_scheduler(max_waiting=2, max_running=4)
    for number in range(6):
        scheduler.add(make_sequence(4, name=str(number)))
    with pytest.raises(QueueFull):
        scheduler.add(make_sequence(4, name="late"))


def test_reserved_draft_blocks_are_taken_back_before_anyone_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    for name, length in (("a", 32), ("b", 20)):
        scheduler.add(make_sequence(length, name=name, max_tokens=30))
    _commit_all(scheduler, scheduler.schedule())
    a, b = scheduler.running
    assert scheduler.plan_drafts(b, 12) == 12  # takes the last free block
    b.draft_ids, b.draft_kv_ids = [5] * 12, [5] * 11
    batch = scheduler.schedule()  # a needs a third block
    assert [item.num_new_tokens for item in batch.scheduled] == [1, 1]
    assert (len(a.block_table), len(b.block_table)) == (3, 2)
    assert (b.draft_ids, b.draft_kv_ids) == ([], [])
    assert scheduler.num_preemptions == 0
    scheduler._blocks.check_integrity(scheduler.running)


def test_d2_a_head_without_progress_is_failed() -> None:
    """D2: endless passes without a token, health ok, everyone behind waiting."""
    scheduler = make_scheduler(num_blocks=4, max_stalled_passes=3)
    # Blocks lost to a bug elsewhere: nothing can be admitted any more.
    leak = make_sequence(64, name="leak")
    assert scheduler._blocks.admit(leak)
    scheduler.add(make_sequence(4, name="head"))
    for _ in range(3):
        assert scheduler.schedule().scheduled == ()
        assert scheduler.take_stalled() is None
    scheduler.schedule()
    stalled = scheduler.take_stalled()
    assert stalled is not None
    assert stalled.request_id == "head"
    assert not scheduler.has_work


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    num_blocks=st.integers(6, 20),
    chunk=st.integers(1, 64),
    num_drafts=st.integers(0, 6),
    accepted=st.lists(st.integers(0, 6), min_size=1, max_size=8),
)
def test_d7_d9_every_request_ends_and_no_block_is_lost(
    lengths: list[int], num_blocks: int, chunk: int, num_drafts: int, accepted: list[int]
) -> None:
    """D7, D9: one request filling the pool under speculation, leaks on odd paths."""
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_step_tokens=64, max_chunk_tokens=chunk, max_running=8
    )
    sequences = [
        make_sequence([number] * length, name=str(number), max_tokens=20)
        for number, length in enumerate(lengths)
    ]
    for seq in sequences:
        seq.max_len = scheduler.sequence_limit(seq.prompt_len, 20)
        scheduler.add(seq)
    for step in range(2000):
        if not scheduler.has_work:
            break
        batch = scheduler.schedule()
        assert batch.scheduled, "a pass without progress"
        assert sum(item.num_new_tokens for item in batch.scheduled) <= 64
        _commit_all(scheduler, batch, accepted[step % len(accepted)])
        for seq in scheduler.running:
            if seq.num_uncomputed == 1:
                seq.draft_ids = [5] * scheduler.plan_drafts(seq, num_drafts)
            scheduler.publish(seq)
        scheduler._blocks.check_integrity(scheduler.running)
    assert [seq.num_emitted for seq in sequences] == [20] * len(sequences)
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in sequences)
    assert scheduler._blocks.num_free == num_blocks
