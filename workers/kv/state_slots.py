"""Who owns which slot of recurrent state: one a running sequence, and checkpoints for reuse.

Owns slot numbers and the table from a block's chain hash to the state after that block. Knows no
tensors (`kv.linear_state` holds them) and no blocks. A prefix can be reused in a model with
linear attention only where the state at its end was kept: every `interval` tokens.

Invariant, tested by `check_integrity`: a slot is free, a sequence's own, or a checkpoint; a
checkpoint that a sequence still has to start from is not given away; a sequence's `state_source`
holds the state after exactly `num_computed_tokens` tokens, or is -1 for none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from workers.sequence import Sequence


class StateSlots:
    """Hands out slots; a place among the running sequences is always one of them."""

    def __init__(self, num_running: int, num_checkpoints: int, interval: int) -> None:
        """Number the slots.

        Args:
            num_running: Sequences that run at once at most.
            num_checkpoints: States kept for reuse; 0 = none are.
            interval: Tokens between two of them, a multiple of the block size.
        """
        self.num_slots = num_running + num_checkpoints
        self.interval = interval if num_checkpoints else 0
        self._free = list(range(num_running))
        self._free_checkpoints = list(range(num_running, self.num_slots))
        # Chain hash -> checkpoint, least recently used first.
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        # Checkpoint -> sequences that start from it and have not run yet.
        self._readers: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free) + len(self._free_checkpoints)

    def num_cached(self, hashes: Seq[bytes]) -> int:
        """Return how many of these leading blocks can be reused: the last has a checkpoint."""
        for count in range(len(hashes), 0, -1):
            if hashes[count - 1] in self._slot_of:
                return count
        return 0

    def acquire(self, sequence: Sequence, prefix: bytes | None) -> None:
        """Give a sequence its own slot, and the checkpoint of `prefix` to start from."""
        sequence.state_slot = self._free.pop()
        sequence.state_source = -1
        if prefix is not None:
            self._slot_of.move_to_end(prefix)
            sequence.state_source = self._slot_of[prefix]
            self._readers[sequence.state_source] += 1

    def written(self, sequence: Sequence) -> None:
        """Note that the sequence's own slot holds its state now."""
        self._stop_reading(sequence)
        sequence.state_source = sequence.state_slot

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's slot back."""
        self._stop_reading(sequence)
        self._free.append(sequence.state_slot)
        sequence.state_slot = sequence.state_source = -1

    def checkpoint(self, prefix: bytes) -> int | None:
        """Return the slot to copy the state after `prefix` to; None = known, or no room."""
        if prefix in self._slot_of:
            self._slot_of.move_to_end(prefix)
            return None
        if not self._free_checkpoints:
            unread = (key for key, slot in self._slot_of.items() if not self._readers[slot])
            oldest = next(unread, None)
            if oldest is None:
                return None
            self.forget([oldest])
        self._slot_of[prefix] = self._free_checkpoints.pop()
        return self._slot_of[prefix]

    def forget(self, prefixes: Iterable[bytes]) -> None:
        """Drop checkpoints; one that is still to be read is free afterwards."""
        for prefix in prefixes:
            slot = self._slot_of.pop(prefix, None)
            if slot is not None and not self._readers[slot]:
                self._free_checkpoints.append(slot)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the books balance for exactly these running sequences."""
        live = list(sequences)
        owned = [sequence.state_slot for sequence in live]
        checkpoints = set(self._slot_of.values()) | {s for s, n in self._readers.items() if n}
        every = sorted([*owned, *self._free, *self._free_checkpoints, *checkpoints])
        assert every == list(range(self.num_slots)), "a state slot is lost or held twice"
        read = Counter(s.state_source for s in live if s.state_source not in {-1, s.state_slot})
        assert read == +self._readers, "readers of checkpoints"

    def _stop_reading(self, sequence: Sequence) -> None:
        source = sequence.state_source
        if source in {-1, sequence.state_slot}:
            return
        self._readers[source] -= 1
        if not self._readers[source] and source not in self._slot_of.values():
            self._free_checkpoints.append(source)
