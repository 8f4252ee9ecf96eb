"""Drafting by running a model: what a separate draft model and a NEXTN head share.

Owns the round: draft-extend brings the drafter's K/V up to the sequence, draft decode then runs on
its own tokens, sampled with the target's noise. Knows no engine and no scheduler; blocks for the
drafts are reserved before it is called. What tokens a pass is given, and what vouches for K/V, is
the subclass's.

Invariant: `num_draft_computed_tokens` vouches only for K/V of tokens that are in the sequence; one
sequence's failure costs no other its drafts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workers.batch_info import ForwardBatch, ForwardMode, SequenceSpan
from workers.models.device import is_device_lost
from workers.models.runner import ModelRunner, StepOutput
from workers.sampling.sampler import SampledRows, Sampler
from workers.sequence import Sequence
from workers.spec.drafter import DraftFailure, DraftStage, DraftTask, Proposal
from workers.spec.rows import draft_row


@dataclass(frozen=True, slots=True)
class ExtendItem:
    """One task's share of a draft-extend pass: tokens `[start, start + num_tokens)`."""

    number: int  # among the tasks
    task: DraftTask
    start: int
    num_tokens: int
    # Whether it reaches the end, so that drafts follow from it.
    drafts: bool

    @property
    def end(self) -> int:
        """Index one past the last token."""
        return self.start + self.num_tokens


class _Live(NamedTuple):
    """A sequence that goes on drafting."""

    row: int  # among the sequences of the present batch
    number: int  # among the tasks
    seq: Sequence


class Pass(NamedTuple):
    """A forward pass of the drafter, and who drafts from its logits."""

    batch: ForwardBatch
    logits: Tensor  # [len(live), V]
    hidden: Tensor  # [len(live), hidden], of the same rows
    live: list[_Live]


class ModelDrafter(ABC):
    """Drafts with a `ModelRunner` and the ordinary sampler, with the target's noise."""

    name: str
    needs_kv = True
    needs_hidden = False

    def __init__(self, runner: ModelRunner, num_ids: int, max_extend_tokens: int) -> None:
        self.max_sequence_len = runner.adapter.max_positions
        self._runner = runner
        self._num_ids = num_ids
        self._sampler = Sampler(runner.adapter.vocab_size, num_ids, runner.device)
        # Of one step: sequences that are further behind catch up over several.
        self._max_extend_tokens = max_extend_tokens

    def propose(self, tasks: Seq[DraftTask]) -> Proposal:
        """See `Drafter`."""
        proposal = Proposal([[] for _ in tasks])
        for task in tasks:
            self._follow(task)
        items = self._plan(tasks)
        if items:
            start_s = time.perf_counter()
            passes = self._extend(items, proposal)
            extended_s = time.perf_counter()
            for extended in passes:
                self._draft(extended, tasks, proposal)
            proposal.seconds[DraftStage.DRAFT_EXTEND] = extended_s - start_s
            proposal.seconds[DraftStage.DRAFT_DECODE] = time.perf_counter() - extended_s
        return proposal

    @abstractmethod
    def _follow(self, task: DraftTask) -> None:
        """Take note of what the step did to a sequence, before anything is planned."""

    @abstractmethod
    def _reach(self, task: DraftTask, *, drafts_now: bool) -> int:
        """Return the number of tokens whose K/V can be computed now; at most so many are."""

    @abstractmethod
    def _span(self, item: ExtendItem) -> SequenceSpan:
        """Return the tokens to run for an item."""

    @abstractmethod
    def _forward_extend(self, batch: ForwardBatch, items: Seq[ExtendItem]) -> StepOutput:
        """Run draft-extend."""

    @abstractmethod
    def _forward_decode(
        self, batch: ForwardBatch, hidden: Tensor, sequences: Seq[Sequence]
    ) -> StepOutput:
        """Run draft decode.

        Args:
            batch: One token for each sequence.
            hidden: Of the rows that it follows.  # [S, hidden]
            sequences: Whose tokens they are.
        """

    def _plan(self, tasks: Seq[DraftTask]) -> list[ExtendItem]:
        """Choose the tokens whose draft K/V is computed now.

        Whoever lacks least goes first, so that one that has to catch up stops nobody's drafts.
        """
        wanted: list[tuple[int, int, bool]] = []
        for number, task in enumerate(tasks):
            seq = task.seq
            drafts_now = task.num_drafts > 0 and seq.num_uncomputed == 1
            end = self._reach(task, drafts_now=drafts_now)
            fits = end + task.num_drafts <= self.max_sequence_len
            if end > seq.num_draft_computed_tokens and fits:
                wanted.append((end - seq.num_draft_computed_tokens, number, drafts_now))
        items: list[ExtendItem] = []
        budget = self._max_extend_tokens
        for num_missing, number, drafts_now in sorted(wanted):
            seq = tasks[number].seq
            num_tokens = min(num_missing, budget)
            if num_tokens == 0:
                break
            budget -= num_tokens
            start = seq.num_draft_computed_tokens
            drafts = drafts_now and num_tokens == num_missing
            items.append(ExtendItem(number, tasks[number], start, num_tokens, drafts))
        return items

    def _extend(self, items: Seq[ExtendItem], proposal: Proposal) -> list[Pass]:
        """Run draft-extend; when it fails, run its halves, down to the task to blame."""
        try:
            return [self._run_extend(items)]
        except Exception as error:  # a named boundary: one task's failure is not the others'
            if is_device_lost(error):
                raise
            if len(items) == 1:
                reason = type(error).__name__
                failure = DraftFailure(DraftStage.DRAFT_EXTEND, reason, items[0].number)
                proposal.failures.append(failure)
                return []
            half = len(items) // 2
            return self._extend(items[:half], proposal) + self._extend(items[half:], proposal)

    def _run_extend(self, items: Seq[ExtendItem]) -> Pass:
        spans = [self._span(item) for item in items]
        batch = self._runner.build(ForwardMode.DRAFT_EXTEND, spans)
        out = self._forward_extend(batch, items)
        live = []
        for row, item in enumerate(items):
            item.task.seq.num_draft_computed_tokens = item.end
            if item.drafts:
                live.append(_Live(row, item.number, item.task.seq))
        return Pass(batch, out.logits, out.hidden[batch.logit_rows], live)

    def _draft(self, present: Pass, tasks: Seq[DraftTask], proposal: Proposal) -> None:
        """Sample and decode in turn; drafts sampled before a failure are kept."""
        try:
            while present.live:
                sampled = self._sample(present, proposal)
                keep = _collect(sampled, present.live, tasks, proposal)
                if not keep:
                    return
                present = self._decode(present, sampled.token_ids, keep)
                for item in present.live:
                    item.seq.draft_kv_ids.append(proposal.draft_ids[item.number][-1])
        except Exception as error:  # a named boundary: drafting fails, the requests go on
            if is_device_lost(error):
                raise
            proposal.failures.append(DraftFailure(DraftStage.DRAFT_DECODE, type(error).__name__))

    def _decode(self, present: Pass, token_ids: Tensor, keep: Seq[int]) -> Pass:
        """Run one draft-decode step for the kept places of `live`."""
        kept = [present.live[place] for place in keep]
        batch = present.batch.next_decode(token_ids[keep], [item.row for item in kept])
        out = self._forward_decode(batch, present.hidden[keep], [item.seq for item in kept])
        live = [item._replace(row=row) for row, item in enumerate(kept)]
        return Pass(batch, out.logits, out.hidden, live)

    def _sample(self, present: Pass, proposal: Proposal) -> SampledRows:
        """Sample each sequence's next draft with the target's own noise."""
        rows = [
            draft_row(item.seq, tuple(proposal.draft_ids[item.number]), self._num_ids)
            for item in present.live
        ]
        with torch.inference_mode():
            return self._sampler.sample(present.logits, rows)


def _collect(
    sampled: SampledRows, live: Seq[_Live], tasks: Seq[DraftTask], proposal: Proposal
) -> list[int]:
    """Add each live sequence's draft; return the places in `live` that want another."""
    keep: list[int] = []
    rows = zip(live, sampled.token_ids.tolist(), sampled.is_finite.tolist(), strict=True)
    for place, (item, token_id, is_finite) in enumerate(rows):
        if not is_finite:
            failure = DraftFailure(
                DraftStage.DRAFT_DECODE, "non_finite", item.number, is_distrusted=True
            )
            proposal.failures.append(failure)
            continue
        drafts = proposal.draft_ids[item.number]
        drafts.append(token_id)
        if len(drafts) < tasks[item.number].num_drafts:
            keep.append(place)
    return keep
