"""Drafting with a second, smaller model over the same token ids.

Owns the draft model's runner and its share of the step: draft-extend brings its K/V up to the
sequence's last token, draft decode then runs on its own tokens. Knows no engine and no scheduler;
blocks for the drafts are reserved before it is called. Positions and layout are the draft model's:
a text-only draft under an mrope target counts linearly.

Invariant: `num_draft_computed_tokens` vouches only for K/V of tokens that are in the sequence. K/V
written for drafts counts after the fact, where the ids turn out to be the sequence's own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from workers.batch_info import ForwardBatch, ForwardMode, SequenceSpan
from workers.models.device import is_device_lost
from workers.models.runner import ModelRunner
from workers.sampling.sampler import SampledRows, Sampler, SamplingRow
from workers.sequence import Sequence
from workers.spec.drafter import DraftFailure, DraftStage, DraftTask, Proposal

# A sequence that made drafting fail this often on its own is left alone.
_MAX_FAILURES = 3


class _Live(NamedTuple):
    """A sequence that goes on drafting."""

    row: int  # among the sequences of the present batch
    number: int  # among the tasks
    seq: Sequence


class _Pass(NamedTuple):
    """A forward pass of the draft model, and who drafts from its logits."""

    batch: ForwardBatch
    logits: Tensor  # [len(live), V]
    live: list[_Live]


class DraftModelDrafter:
    """Drafts with a `ModelRunner` and the ordinary sampler, with the target's noise."""

    name = "draft_model"
    needs_kv = True

    def __init__(self, runner: ModelRunner, num_ids: int, max_extend_tokens: int) -> None:
        self.max_sequence_len = runner.adapter.max_positions
        self._runner = runner
        self._sampler = Sampler(runner.adapter.vocab_size, num_ids, runner.device)
        # Of one step: sequences that are further behind catch up over several.
        self._max_extend_tokens = max_extend_tokens

    def propose(self, tasks: Seq[DraftTask]) -> Proposal:
        """See `Drafter`."""
        proposal = Proposal([[] for _ in tasks])
        for task in tasks:
            _credit_accepted(task.seq)
        spans = self._plan(tasks)
        if spans:
            for extended in self._extend(list(spans.items()), tasks, proposal):
                self._draft(extended, tasks, proposal)
        return proposal

    def _plan(self, tasks: Seq[DraftTask]) -> dict[int, SequenceSpan]:
        """Choose the tokens whose draft K/V is computed now: task number -> span.

        Whoever lacks least goes first, so that one that has to catch up stops nobody's drafts.
        """
        wanted: list[tuple[int, int, bool]] = []
        for number, task in enumerate(tasks):
            seq = task.seq
            # The last token has a block of its own only where drafts were planned after it.
            drafts_now = task.num_drafts > 0 and seq.num_uncomputed == 1
            end = seq.num_tokens if drafts_now else seq.num_computed_tokens
            fits = end + task.num_drafts <= self.max_sequence_len
            if end > seq.num_draft_computed_tokens and fits:
                wanted.append((end - seq.num_draft_computed_tokens, number, drafts_now))
        spans: dict[int, SequenceSpan] = {}
        budget = self._max_extend_tokens
        for num_missing, number, drafts_now in sorted(wanted):
            seq = tasks[number].seq
            num_tokens = min(num_missing, budget)
            if num_tokens == 0 or seq.num_draft_failures >= _MAX_FAILURES:
                continue
            budget -= num_tokens
            start = seq.num_draft_computed_tokens
            spans[number] = SequenceSpan(
                token_ids=seq.token_ids[start : start + num_tokens],
                start=start,
                block_table=seq.block_table,
                rope=seq.rope,
                num_logit_rows=int(drafts_now and num_tokens == num_missing),
            )
        return spans

    def _extend(
        self, items: list[tuple[int, SequenceSpan]], tasks: Seq[DraftTask], proposal: Proposal
    ) -> list[_Pass]:
        """Run draft-extend; when it fails, run its halves, down to the task to blame."""
        try:
            return [self._run_extend(items, tasks)]
        except Exception as error:  # a named boundary: one task's failure is not the others'
            if is_device_lost(error):
                raise
            if len(items) == 1:
                tasks[items[0][0]].seq.num_draft_failures += 1
                proposal.failures.append(
                    DraftFailure(DraftStage.DRAFT_EXTEND, type(error).__name__)
                )
                return []
            half = len(items) // 2
            first = self._extend(items[:half], tasks, proposal)
            return first + self._extend(items[half:], tasks, proposal)

    def _run_extend(self, items: list[tuple[int, SequenceSpan]], tasks: Seq[DraftTask]) -> _Pass:
        sequences = [tasks[number].seq for number, _ in items]
        media = [
            seq.request.media if span.start < seq.prompt_len else ()
            for seq, (_, span) in zip(sequences, items, strict=True)
        ]
        batch = self._runner.build(ForwardMode.DRAFT_EXTEND, [span for _, span in items])
        logits = self._runner.forward(batch, media).logits
        live = []
        for row, (seq, (number, span)) in enumerate(zip(sequences, items, strict=True)):
            seq.num_draft_computed_tokens = span.end
            if span.num_logit_rows:
                live.append(_Live(row, number, seq))
        return _Pass(batch, logits, live)

    def _draft(self, present: _Pass, tasks: Seq[DraftTask], proposal: Proposal) -> None:
        """Sample and decode in turn; drafts sampled before a failure are kept."""
        depth = 0
        try:
            while present.live:
                sampled = self._sample(present, depth)
                keep = _collect(sampled, present.live, tasks, proposal)
                if not keep:
                    return
                present = self._decode(present, sampled.token_ids[keep], keep)
                for item in present.live:
                    item.seq.draft_kv_ids.append(proposal.draft_ids[item.number][-1])
                depth += 1
        except Exception as error:  # a named boundary: drafting fails, the requests go on
            if is_device_lost(error):
                raise
            proposal.failures.append(DraftFailure(DraftStage.DRAFT_DECODE, type(error).__name__))

    def _decode(self, present: _Pass, input_ids: Tensor, keep: Seq[int]) -> _Pass:
        """Run one draft-decode step for the kept places of `live`."""
        kept = [present.live[place] for place in keep]
        batch = present.batch.next_decode(input_ids, [item.row for item in kept])
        logits = self._runner.forward(batch).logits
        return _Pass(batch, logits, [item._replace(row=row) for row, item in enumerate(kept)])

    def _sample(self, present: _Pass, depth: int) -> SampledRows:
        """Sample draft number `depth` of each sequence with the target's own noise."""
        rows = [
            SamplingRow(
                params=item.seq.request.sampling,
                position=item.seq.num_tokens + depth,
                num_emitted=item.seq.num_emitted + depth,
                stop_ids=item.seq.stop_ids,
            )
            for item in present.live
        ]
        with torch.inference_mode():
            return self._sampler.sample(present.logits, rows)


def _credit_accepted(seq: Sequence) -> None:
    """Vouch for drafted K/V as far as the drafts became the sequence's tokens."""
    for token_id in seq.draft_kv_ids:
        # The last token always runs again: its logits are the first draft's.
        if seq.num_draft_computed_tokens >= seq.num_tokens - 1:
            break
        if seq.token_ids[seq.num_draft_computed_tokens] != token_id:
            break
        seq.num_draft_computed_tokens += 1
    seq.draft_kv_ids = []


def _collect(
    sampled: SampledRows, live: Seq[_Live], tasks: Seq[DraftTask], proposal: Proposal
) -> list[int]:
    """Add each live sequence's draft; return the places in `live` that want another."""
    keep: list[int] = []
    rows = zip(live, sampled.token_ids.tolist(), sampled.is_finite.tolist(), strict=True)
    for place, (item, token_id, is_finite) in enumerate(rows):
        if not is_finite:
            item.seq.num_draft_failures += 1
            proposal.failures.append(
                DraftFailure(DraftStage.DRAFT_DECODE, "non_finite", distrusted=item.number)
            )
            continue
        drafts = proposal.draft_ids[item.number]
        drafts.append(token_id)
        if len(drafts) < tasks[item.number].num_drafts:
            keep.append(place)
    return keep
