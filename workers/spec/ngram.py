"""Drafting by lookup: what followed the last tokens where they stood before.

Owns an index of each sequence's n-grams, prompt and output alike (Saxena 2023, "Prompt Lookup
Decoding"). Knows no model, no tensors and no K/V; sampling parameters do not matter to it, since a
draft at any temperature is accepted where it equals the target's own sample.

Invariant: drafts are a pure function of the sequence's tokens and the two sizes, whatever batches
it was in, whenever it was preempted and wherever it ran before: of the longest suffix of at most
`ngram_max` and at least `ngram_min` tokens that stood earlier in the sequence, the tokens after
its most recent earlier place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from workers.sequence import Sequence
from workers.spec.drafter import DraftTask, Proposal


class NgramIndex:
    """The last place of every n-gram of one sequence; grows with its tokens.

    Every token costs one entry for each size, about 100 bytes: little beside its K/V. Entries are
    keyed by a hash of the n-gram, and what is found is compared with the tokens themselves.
    """

    __slots__ = ("_ends", "_num_indexed", "_sizes")

    def __init__(self, ngram_max: int, ngram_min: int) -> None:
        self._sizes = range(ngram_max, ngram_min - 1, -1)
        # hash of an n-gram of any size -> index one past its last place
        self._ends: dict[int, int] = {}
        # N-grams that end within this many tokens are in the index.
        self._num_indexed = 0

    def extend(self, token_ids: Seq[int], num_tokens: int) -> None:
        """Add the n-grams that end within the first `num_tokens` tokens; those known stay."""
        ends, sizes = self._ends, self._sizes
        for end in range(self._num_indexed + 1, num_tokens + 1):
            for size in sizes:
                if size <= end:
                    ends[hash(tuple(token_ids[end - size : end]))] = end
        self._num_indexed = max(self._num_indexed, num_tokens)

    def drafts(self, token_ids: Seq[int], num_drafts: int) -> list[int]:
        """Return what followed the longest suffix that stood earlier; nothing when none did.

        Where the earlier place runs into the suffix itself, the tokens repeat with the distance
        between the two as their period, and so do the drafts.
        """
        num_tokens = len(token_ids)
        # The suffixes themselves stay out of the index, or they would be found at the end.
        self.extend(token_ids, num_tokens - 1)
        for size in self._sizes:
            if size >= num_tokens:
                continue
            suffix = token_ids[num_tokens - size :]
            end = self._ends.get(hash(tuple(suffix)))
            if end is not None and token_ids[end - size : end] == suffix:
                period = num_tokens - end
                return [token_ids[end + i % period] for i in range(num_drafts)]
        return []


class NgramDrafter:
    """Drafts from each sequence's own tokens; nothing is loaded and nothing is computed."""

    name = "ngram"
    needs_kv = False
    needs_hidden = False
    needs_hidden = False
    max_sequence_len = sys.maxsize

    def __init__(self, ngram_max: int, ngram_min: int) -> None:
        self._ngram_max = ngram_max
        self._ngram_min = ngram_min
        # Goes with the sequence, however that ends; a preempted one keeps its tokens and this.
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def propose(self, tasks: Seq[DraftTask]) -> Proposal:
        """See `Drafter`."""
        return Proposal([self._drafts(task) for task in tasks])

    def _drafts(self, task: DraftTask) -> list[int]:
        seq = task.seq
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = NgramIndex(self._ngram_max, self._ngram_min)
        if task.num_drafts == 0:
            # A long prompt is indexed along with its chunks, not all before the first draft.
            index.extend(seq.token_ids, min(seq.num_computed_tokens, seq.num_tokens - 1))
            return []
        return index.drafts(seq.token_ids, task.num_drafts)
