"""A draft model with linear attention: its recurrent state follows the sequence, drafts or not.

Owns the draft's slots of state: one for each sequence, and a second one beside it that its drafts
run on. Knows no target and no acceptance. Draft-extend runs the sequence's own tokens and commits;
draft decode goes on from there in the second slot, which the next round starts over, so that
rejected drafts never have to be taken back.

Invariant: a sequence's slot holds the state after exactly `num_draft_computed_tokens` tokens. Where
it does not, since the slot went to another sequence or the tokens were preempted, the draft starts
from the first token again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import Tensor

from workers.batch_info import ForwardBatch, SequenceSpan
from workers.models.runner import ModelRunner, StepOutput
from workers.sequence import Sequence
from workers.spec.draft_model import DraftModelDrafter
from workers.spec.drafter import DraftTask
from workers.spec.model_drafter import ExtendItem
from workers.spec.token_map import TokenMap


@dataclass(slots=True)
class _Place:
    """A sequence's slot."""

    slot: int
    # The state in it is that after so many tokens.
    num_tokens: int
    last_used: int


class DraftSlots:
    """Slots for as many sequences as run at once; the least recently used one is given away."""

    def __init__(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences
        self._places: WeakKeyDictionary[Sequence, _Place] = WeakKeyDictionary()
        self._clock = 0

    @property
    def num_slots(self) -> int:
        """Slots in all: the sequences' own, then one for the drafts of each."""
        return 2 * self._num_sequences

    def place(self, sequence: Sequence) -> _Place:
        """Return the sequence's slot, given to it now if it has none."""
        self._clock += 1
        place = self._places.get(sequence)
        if place is None:
            used = {known.slot for known in self._places.values()}
            slot = next((s for s in range(self._num_sequences) if s not in used), None)
            if slot is None:
                oldest = min(self._places, key=lambda s: self._places[s].last_used)
                slot = self._places.pop(oldest).slot
            place = self._places[sequence] = _Place(slot, 0, self._clock)
        place.last_used = self._clock
        return place

    def draft_slot(self, sequence: Sequence) -> int:
        """Return the slot that the sequence's drafts run on."""
        return self._num_sequences + self._places[sequence].slot


class HybridDraftModelDrafter(DraftModelDrafter):
    """Drafts with a whole model that keeps recurrent state."""

    def __init__(
        self,
        runner: ModelRunner,
        num_ids: int,
        max_extend_tokens: int,
        token_map: TokenMap,
        slots: DraftSlots,
    ) -> None:
        super().__init__(runner, num_ids, max_extend_tokens, token_map)
        self._slots = slots

    def _follow(self, task: DraftTask) -> None:
        seq = task.seq
        # Accepted or not, drafts ran on the other slot: the sequence's own has not seen them.
        seq.draft_kv_ids = []
        if self._slots.place(seq).num_tokens != seq.num_draft_computed_tokens:
            seq.num_draft_computed_tokens = 0

    def _span(self, item: ExtendItem) -> SequenceSpan:
        source = self._slots.place(item.task.seq).slot if item.start else -1
        return replace(super()._span(item), state_source=source)

    def _forward_extend(self, batch: ForwardBatch, items: Seq[ExtendItem]) -> StepOutput:
        out = super()._forward_extend(batch, items)
        places = [self._slots.place(item.task.seq) for item in items]
        if out.linear is not None:
            out.linear.commit([item.num_tokens for item in items], [p.slot for p in places])
        for place, item in zip(places, items, strict=True):
            place.num_tokens = item.end
        return out

    def _forward_decode(
        self, batch: ForwardBatch, hidden: Tensor, sequences: Seq[Sequence]
    ) -> StepOutput:
        own = [self._slots.place(seq).slot for seq in sequences]
        drafts = [self._slots.draft_slot(seq) for seq in sequences]
        # The first draft goes on from the sequence's own state.
        is_first = not sequences[0].draft_kv_ids
        batch = replace(batch, state_sources=tuple(own if is_first else drafts))
        out = super()._forward_decode(batch, hidden, sequences)
        if out.linear is not None:
            out.linear.commit([1] * len(sequences), drafts)
        return out
