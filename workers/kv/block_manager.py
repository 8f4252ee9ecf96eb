"""Who owns which KV block: allocation, reference counts and the prefix cache.

Owns block ids and the hash chain. Knows no tensors (`kv.pool` holds them) and no policy (the
scheduler decides whom to preempt). Every model of the worker indexes its own K/V by the same
block ids, so a cached block may hold the target's K/V only or the drafter's too (`draft_ready`).

Invariant, tested by `check_integrity`: every block is either free or referenced; a block is
written by one sequence only; only full blocks of finalised tokens are hashed, never drafts.

    block_table   [ cached, shared | own, full | own, partly filled | reserved for drafts ]
    tokens        0 ............... num_computed ............ num_tokens
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import islice

from workers.kv.state_slots import StateSlots
from workers.prefix import SHORT_BYTES, block_name
from workers.sequence import Sequence


class BlockManager:
    """Hands out block ids; shortage is a normal answer, never an exception."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        *,
        states: StateSlots | None = None,
        lookahead: int = 0,
    ) -> None:
        """Start with every block free.

        Args:
            num_blocks: Blocks of the pool.
            block_size: Tokens of a block.
            prefix_caching: Whether finished blocks are found again.
            states: Slots of recurrent state, for a model with linear attention.
            lookahead: Tokens after a block that its K/V depends on: 1 under a drafter that reads
                the token after the one it writes for.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = states
        self.lookahead = lookahead
        self._prefix_caching = prefix_caching
        self._ref_counts = [0] * num_blocks
        # Free blocks, next to be reused first; hashed ones keep their content until then.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}  # chain hash -> block
        self._hash_of: dict[int, bytes] = {}  # block -> chain hash
        self._draft_ready: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that nobody references; cached content counts as free."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a later sequence can find."""
        return len(self._hash_of)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its cached prefix and blocks for all its present tokens.

        Sets `block_table`, `num_computed_tokens` and `num_draft_computed_tokens`. Returns False,
        changing nothing, when the free blocks do not suffice.
        """
        cached = self._match(sequence)
        if self.states is not None:
            del cached[self.states.num_cached(sequence.block_hashes[: len(cached)]) :]
        num_new = self._blocks_for(sequence.num_tokens) - len(cached)
        num_revived = sum(self._ref_counts[block] == 0 for block in cached)
        if num_new > self.num_free - num_revived:
            return False
        for block in cached:
            self._free.pop(block, None)
            self._ref_counts[block] += 1
        sequence.block_table = [*cached, *(self._take() for _ in range(num_new))]
        sequence.num_published_blocks = len(cached)
        sequence.num_computed_tokens = len(cached) * self.block_size
        sequence.num_draft_computed_tokens = sequence.num_computed_tokens
        if self.states is not None:
            prefix = sequence.block_hashes[len(cached) - 1] if cached else None
            self.states.acquire(sequence, prefix)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; False, changing nothing, on shortage."""
        missing = self._blocks_for(num_tokens) - len(sequence.block_table)
        if missing > self.num_free:
            return False
        sequence.block_table.extend(self._take() for _ in range(missing))
        return True

    def shrink(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks beyond `num_tokens` tokens: reserved for drafts, never published."""
        for block in reversed(sequence.block_table[self._blocks_for(num_tokens) :]):
            self._release(block)
        del sequence.block_table[self._blocks_for(num_tokens) :]

    def withdraw(self, sequence: Sequence) -> bool:
        """Take the sequence's blocks out of the prefix cache: their content is not to be trusted.

        Returns whether nobody else holds any of them, so that they may be written again.
        """
        for block in sequence.block_table:
            self._forget(block)
        if self.states is not None:
            self.states.forget(sequence.block_hashes)
        return all(self._ref_counts[block] == 1 for block in sequence.block_table)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Offer the full blocks within the first `num_tokens` tokens to the prefix cache.

        Args:
            sequence: The owner of the blocks.
            num_tokens: Finalised tokens whose K/V every model of the worker that serves this
                sequence has computed.
        """
        if not self._prefix_caching:
            return
        for index in range(sequence.num_published_blocks, num_tokens // self.block_size):
            self._offer(
                sequence.block_table[index],
                self._block_hash(sequence, index),
                sequence.needs_draft_kv,
            )
            sequence.num_published_blocks = index + 1

    def free(self, sequence: Sequence) -> None:
        """Return the sequence's blocks; the last ones are reused first, prefixes live longest."""
        for block in reversed(sequence.block_table):
            self._release(block)
        sequence.block_table = []
        if self.states is not None:
            self.states.release(sequence)

    def checkpoint(self, sequence: Sequence) -> int | None:
        """Return the state slot to keep the sequence's present state in, for others to start from.

        None where it is not due, already kept, or its blocks cannot be found again either.
        """
        if self.states is None or not self.states.interval:
            return None
        num_tokens = sequence.num_computed_tokens
        num_blocks = num_tokens // self.block_size
        is_published = 0 < num_blocks <= sequence.num_published_blocks
        if num_tokens % self.states.interval or not is_published:
            return None
        return self.states.checkpoint(sequence.block_hashes[num_blocks - 1])

    def published(self, max_blocks: int) -> bytes:
        """Return the short names of the blocks that were offered last, one after the other."""
        latest = islice(reversed(self._block_of), max_blocks)
        return b"".join(name[:SHORT_BYTES] for name in latest)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the books balance for exactly these live sequences."""
        sequences = list(sequences)
        if self.states is not None:
            self.states.check_integrity(sequences)
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        for block in range(self.num_blocks):
            assert self._ref_counts[block] == held[block], f"block {block}: reference count"
            assert (block in self._free) == (held[block] == 0), f"block {block}: free and held"
        assert {block: key for key, block in self._block_of.items()} == self._hash_of
        assert self._draft_ready <= set(self._hash_of)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._ref_counts[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free[block] = None
            if block not in self._hash_of:  # nothing worth keeping in it
                self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self._draft_ready.discard(block)

    def _offer(self, block: int, key: bytes, draft_ready: bool) -> None:
        known = self._block_of.get(key)
        if known is not None:
            if known == block or known in self._draft_ready or not draft_ready:
                return
            self._forget(known)  # ours serves drafting sequences as well
        self._block_of[key] = block
        self._hash_of[block] = key
        if draft_ready:
            self._draft_ready.add(block)

    def _match(self, sequence: Sequence) -> list[int]:
        """Leading cached blocks that serve the sequence; one token is always left to compute."""
        blocks: list[int] = []
        # Log-probabilities of the prompt come from running it.
        if not self._prefix_caching or sequence.prompt_logprobs is not None:
            return blocks
        for index in range((sequence.num_tokens - 1) // self.block_size):
            block = self._block_of.get(self._block_hash(sequence, index))
            if block is None or (sequence.needs_draft_kv and block not in self._draft_ready):
                break
            blocks.append(block)
        return blocks

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Chain hash of a full block: all that its K/V depends on, tokens and pixels."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            end = start + self.block_size + self.lookahead
            previous = hashes[-1] if hashes else b""
            media = sequence.request.media
            hashes.append(block_name(previous, sequence.token_ids, media, start, end))
        return hashes[index]
