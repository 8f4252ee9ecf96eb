"""What was said before: token counts on the device, and the penalties they carry.

Owns one row of counts for each sequence whose request has penalties. Knows no scheduler and no
logits beyond those it is given. Invariant: a sequence's row holds exactly the tokens that are its
own; what a step did not accept was never counted, so nothing is taken back. Plain steps and
verification take the same way: first the tokens since the last time are counted, then each row of
logits sees the counts plus the drafts before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.contracts import SamplingParams
from workers.sampling.staging import staged

# Rows to begin with; they double.
_FIRST_ROWS = 4


class History(Protocol):
    """A sequence, as far as it is counted; it only ever grows at its end."""

    token_ids: list[int]

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        ...


@dataclass(frozen=True, slots=True)
class PenalisedRow:
    """One row of logits with penalties."""

    params: SamplingParams
    history: History
    # What is taken to follow the history.
    draft_ids: Seq[int]


@dataclass(slots=True)
class _Counted:
    """A sequence's row, and how many of its tokens it holds."""

    row: int
    num_tokens: int = 0


class TokenCounts:
    """How often each sequence has said each token, and which ones its prompt has."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._free: list[int] = []
        self._counted: weakref.WeakKeyDictionary[History, _Counted] = weakref.WeakKeyDictionary()

    def penalise(self, logits: Tensor, index: Seq[int], rows: Seq[PenalisedRow]) -> None:
        """Apply the rows' penalties to their logits, in place.

        Args:
            logits: A step's.  # [R, V] float32
            index: Where the rows stand in it.
            rows: The same rows.
        """
        self._count(rows)
        counts, is_known = self._rows(rows)
        params = [row.params for row in rows]
        repetition = self._column([p.repetition_penalty for p in params])
        where = staged(index, torch.int64, self._device)
        part = logits[where]
        repeated = torch.where(part > 0, part / repetition, part * repetition)
        part = torch.where(is_known, repeated, part)
        part -= self._column([p.frequency_penalty for p in params]) * counts
        part -= self._column([p.presence_penalty for p in params]) * (counts > 0)
        logits[where] = part

    def _rows(self, rows: Seq[PenalisedRow]) -> tuple[Tensor, Tensor]:
        """Return the counts at each row, and what stands before it.  # [n, V] int32, bool."""
        own = staged([self._counted[r.history].row for r in rows], torch.int64, self._device)
        counts = self._counts[own]
        drafts = [
            place * self._vocab_size + token_id
            for place, row in enumerate(rows)
            for token_id in row.draft_ids
            if token_id < self._vocab_size
        ]
        self._add_one(counts, drafts)
        return counts, self._in_prompt[own] | (counts > 0)

    def _count(self, rows: Seq[PenalisedRow]) -> None:
        """Count the tokens that the rows' sequences gained since the last time."""
        said: list[int] = []
        prompted: list[int] = []
        for history in {id(row.history): row.history for row in rows}.values():
            counted = self._counted.get(history) or self._begin(history)
            first = counted.row * self._vocab_size
            begin, end = counted.num_tokens, len(history.token_ids)
            for position in range(begin, end):
                token_id = history.token_ids[position]
                if token_id >= self._vocab_size:
                    continue  # a draft model may be narrower than the ids of its target
                (prompted if position < history.prompt_len else said).append(first + token_id)
            counted.num_tokens = end
        self._add_one(self._counts, said)
        if prompted:
            self._in_prompt.view(-1)[staged(prompted, torch.int64, self._device)] = True

    def _begin(self, history: History) -> _Counted:
        if not self._free:
            self._grow()
        counted = _Counted(self._free.pop())
        self._counts[counted.row] = 0
        self._in_prompt[counted.row] = False
        self._counted[history] = counted
        # However the sequence ends: its row is free when nobody holds it any more.
        weakref.finalize(history, self._free.append, counted.row).atexit = False
        return counted

    def _grow(self) -> None:
        num_rows = len(self._counts)
        more = max(num_rows, _FIRST_ROWS)
        shape = (more, self._vocab_size)
        self._counts = torch.cat([self._counts, self._counts.new_zeros(shape)])
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(shape)])
        self._free += range(num_rows, num_rows + more)

    def _add_one(self, counts: Tensor, places: list[int]) -> None:
        """Add 1 at each place of the flattened counts; a place may come again."""
        if places:
            index = staged(places, torch.int64, self._device)
            ones = torch.ones_like(index, dtype=torch.int32)
            counts.view(-1).index_put_((index,), ones, accumulate=True)

    def _column(self, values: list[float]) -> Tensor:
        return staged(values, torch.float32, self._device).unsqueeze(1)
