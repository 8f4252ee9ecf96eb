"""Block accounting: allocation, sharing, the prefix cache, and that the books always balance."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.workers.control_plane import make_sequence
from workers.contracts import ImageInput
from workers.kv.block_manager import BlockManager
from workers.sequence import Sequence


def _admit(blocks: BlockManager, seq: Sequence) -> Sequence:
    assert blocks.admit(seq)
    return seq


def _compute_all(blocks: BlockManager, seq: Sequence, *, draft: bool = False) -> None:
    seq.num_computed_tokens = seq.num_tokens - 1
    if draft:
        seq.num_draft_computed_tokens = seq.num_tokens
    blocks.publish(seq, seq.num_computed_tokens)


def test_a_shared_prefix_is_found_and_one_token_left_to_compute() -> None:
    blocks = BlockManager(16, 16)
    first = _admit(blocks, make_sequence(49))
    _compute_all(blocks, first)
    second = _admit(blocks, make_sequence(48, name="s"))
    assert second.num_computed_tokens == 32  # not 48: the last token must be run
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    blocks.check_integrity([first, second])


def test_freed_content_is_found_again_until_its_block_is_reused() -> None:
    blocks = BlockManager(4, 16)
    first = _admit(blocks, make_sequence(33))
    _compute_all(blocks, first)
    blocks.free(first)
    assert blocks.num_free == 4
    again = _admit(blocks, make_sequence(33))
    assert again.num_computed_tokens == 32
    blocks.free(again)
    other = _admit(blocks, make_sequence([7] * 64))
    blocks.free(other)
    assert _admit(blocks, make_sequence(33)).num_computed_tokens == 0


def test_shortage_is_an_answer_that_changes_nothing() -> None:
    blocks = BlockManager(3, 16)
    seq = _admit(blocks, make_sequence(20))
    assert not blocks.grow(seq, 65)
    assert not blocks.admit(make_sequence(40, name="s"))
    assert len(seq.block_table) == 2
    blocks.check_integrity([seq])
    assert blocks.grow(seq, 48)


def test_a_cached_block_that_would_be_revived_is_not_counted_as_free_twice() -> None:
    """Admission once took its own cached blocks for free ones and ran out in mid-allocation."""
    blocks = BlockManager(3, 16)
    first = _admit(blocks, make_sequence(33))
    _compute_all(blocks, first)
    blocks.free(first)
    assert not blocks.admit(make_sequence(64))
    blocks.check_integrity([])


def _image(content: bytes, start: int) -> ImageInput:
    return ImageInput(np.zeros((16, 4), np.float32), (1, 4, 4), content, start, 4)


def test_a14_another_picture_is_another_prefix() -> None:
    """A14: keyed on token ids or a short hash, a question was answered about the wrong picture."""
    blocks = BlockManager(32, 16)
    for content, cached in ((b"A", 0), (b"B", 0), (b"A", 32)):
        seq = _admit(blocks, make_sequence(40, images=(_image(content, 5),)))
        assert seq.num_computed_tokens == cached
        _compute_all(blocks, seq)
        blocks.free(seq)


def test_a_sequence_with_a_drafter_takes_only_blocks_that_hold_draft_kv() -> None:
    """Elsewhere a hit on a block without draft K/V fed uninitialised memory to the draft."""
    blocks = BlockManager(32, 16)
    plain = _admit(blocks, make_sequence(40))
    _compute_all(blocks, plain)
    drafting = _admit(blocks, make_sequence(40, name="d", needs_draft_kv=True))
    assert drafting.num_computed_tokens == 0
    _compute_all(blocks, drafting, draft=True)
    second = _admit(blocks, make_sequence(40, name="e", needs_draft_kv=True))
    assert second.num_computed_tokens == second.num_draft_computed_tokens == 32
    third = _admit(blocks, make_sequence(40, name="p"))
    assert third.num_computed_tokens == 32
    blocks.check_integrity([plain, drafting, second, third])


class BlockMachine(RuleBasedStateMachine):
    """Random admissions, steps with rollbacks, publications, preemptions and frees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, 16)
        self.live: list[Sequence] = []
        self.count = 0

    @rule(num_tokens=st.integers(1, 70), family=st.integers(0, 2), draft=st.booleans())
    def admit(self, num_tokens: int, family: int, draft: bool) -> None:
        self.count += 1
        ids = [family + 7 * i for i in range(num_tokens)]
        seq = make_sequence(ids, name=str(self.count), needs_draft_kv=draft)
        if self.blocks.admit(seq):
            assert seq.num_computed_tokens < seq.num_tokens
            self.live.append(seq)
        else:
            assert not seq.block_table

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_drafts=st.integers(0, 5))
    def step(self, data: st.DataObject, num_drafts: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        if not self.blocks.grow(seq, seq.num_tokens + num_drafts):
            return
        accepted = data.draw(st.integers(0, num_drafts))
        seq.token_ids += [3] * (accepted + 1)
        seq.num_computed_tokens = seq.num_tokens - 1
        if seq.needs_draft_kv:
            seq.num_draft_computed_tokens = seq.num_computed_tokens
        self.blocks.publish(seq, seq.num_computed_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.blocks.free(seq)

    @invariant()
    def books_balance(self) -> None:
        self.blocks.check_integrity(self.live)

    @invariant()
    def no_block_is_written_twice(self) -> None:
        writable: list[int] = []
        for seq in self.live:
            writable += seq.block_table[seq.num_published_blocks :]
        assert len(writable) == len(set(writable))


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
