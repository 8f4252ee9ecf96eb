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
from workers.errors import BatchInfoError
from workers.models.runner import ModelRunner
from workers.sampling.sampler import SampledRows, Sampler, SamplingRow
from workers.sequence import Sequence
from workers.spec.drafter import DraftFailure, DraftTask, Proposal


class _Live(NamedTuple):
    """A sequence that goes on drafting."""

    row: int  # among the sequences of the current batch
    number: int  # among the tasks
    seq: Sequence


class DraftModelDrafter:
    """Drafts with a `ModelRunner` and the ordinary sampler, with the target's noise."""

    name = "draft_model"
    needs_kv = True

    def __init__(self, runner: ModelRunner, num_ids: int, max_extend_tokens: int) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.adapter.vocab_size, num_ids, runner.device)
        # Of one sequence in one step; a sequence further behind catches up over several.
        self._max_extend_tokens = max_extend_tokens

    def propose(self, tasks: Seq[DraftTask]) -> Proposal:
        """See `Drafter`."""
        proposal = Proposal([[] for _ in tasks])
        spans = {n: span for n, task in enumerate(tasks) if (span := self._extend_span(task))}
        if not spans:
            return proposal
        batch, logits = self._extend(list(spans.values()), [tasks[n] for n in spans])
        live = [
            _Live(row, number, tasks[number].seq)
            for row, (number, span) in enumerate(spans.items())
            if span.num_logit_rows
        ]
        depth = 0
        while live:
            sampled = self._sample(logits, live, depth)
            keep = self._collect(sampled, live, tasks, proposal)
            if not keep:
                break
            batch, logits = self._decode(
                batch, sampled.token_ids[keep], [live[place].row for place in keep]
            )
            live = [live[place]._replace(row=row) for row, place in enumerate(keep)]
            for item in live:
                item.seq.draft_kv_ids.append(proposal.draft_ids[item.number][-1])
            depth += 1
        return proposal

    def _collect(
        self, sampled: SampledRows, live: Seq[_Live], tasks: Seq[DraftTask], proposal: Proposal
    ) -> list[int]:
        """Add each live sequence's draft; return the places in `live` that want another."""
        keep: list[int] = []
        rows = zip(live, sampled.token_ids.tolist(), sampled.is_finite.tolist(), strict=True)
        for place, (item, token_id, is_finite) in enumerate(rows):
            if not is_finite:
                proposal.failures.append("draft_decode:non_finite")
                _distrust(item.seq, self._runner.limits.block_size)
                continue
            drafts = proposal.draft_ids[item.number]
            drafts.append(token_id)
            if len(drafts) < tasks[item.number].num_drafts:
                keep.append(place)
        return keep

    def _extend_span(self, task: DraftTask) -> SequenceSpan | None:
        """The tokens whose draft K/V is missing; the last token included where drafts follow."""
        seq = task.seq
        self._credit_accepted(seq)
        start = seq.num_draft_computed_tokens
        # The last token has a block of its own only where drafts were planned after it.
        wants_drafts = task.num_drafts > 0 and seq.num_uncomputed == 1
        end = seq.num_tokens if wants_drafts else seq.num_computed_tokens
        end = min(end, start + self._max_extend_tokens)
        # Past its own context the draft model says nothing; the request goes on without.
        if start >= end or end + task.num_drafts > self._runner.adapter.max_positions:
            return None
        return SequenceSpan(
            token_ids=seq.token_ids[start:end],
            start=start,
            block_table=seq.block_table,
            rope=seq.rope,
            num_logit_rows=int(wants_drafts and end == seq.num_tokens),
        )

    def _credit_accepted(self, seq: Sequence) -> None:
        """Vouch for drafted K/V as far as the drafts became the sequence's tokens."""
        for token_id in seq.draft_kv_ids:
            # The last token always runs again: its logits are the first draft's.
            if seq.num_draft_computed_tokens >= seq.num_tokens - 1:
                break
            if seq.token_ids[seq.num_draft_computed_tokens] != token_id:
                break
            seq.num_draft_computed_tokens += 1
        seq.draft_kv_ids = []

    def _extend(
        self, spans: Seq[SequenceSpan], tasks: Seq[DraftTask]
    ) -> tuple[ForwardBatch, Tensor]:
        """Run draft-extend; return its batch and the logits of sequences that draft."""
        images = [
            task.seq.request.images if span.start < task.seq.prompt_len else ()
            for span, task in zip(spans, tasks, strict=True)
        ]
        try:
            batch = self._runner.build(ForwardMode.DRAFT_EXTEND, spans)
            logits = self._runner.forward(batch, images)
        except (BatchInfoError, RuntimeError, ValueError, IndexError) as error:
            raise DraftFailure("draft_extend", type(error).__name__) from error
        for span, task in zip(spans, tasks, strict=True):
            task.seq.num_draft_computed_tokens = span.end
        return batch, logits

    def _decode(
        self, batch: ForwardBatch, input_ids: Tensor, rows: Seq[int]
    ) -> tuple[ForwardBatch, Tensor]:
        """Run one draft-decode step for some of the batch's sequences."""
        try:
            batch = batch.next_decode(input_ids, rows)
            return batch, self._runner.forward(batch)
        except (BatchInfoError, RuntimeError, ValueError, IndexError) as error:
            raise DraftFailure("draft_decode", type(error).__name__) from error

    def _sample(self, logits: Tensor, live: Seq[_Live], depth: int) -> SampledRows:
        """Sample draft number `depth` of each sequence with the target's own noise."""
        rows = [
            SamplingRow(
                params=item.seq.request.sampling,
                position=item.seq.num_tokens + depth,
                num_emitted=item.seq.num_emitted + depth,
                stop_ids=item.seq.stop_ids,
            )
            for item in live
        ]
        with torch.inference_mode():
            return self._sampler.sample(logits, rows)


def _distrust(seq: Sequence, block_size: int) -> None:
    """After non-finite logits, vouch for no draft K/V that the sequence may still rewrite.

    Blocks already offered to the prefix cache may be read by others and are left alone.
    """
    own = seq.num_published_blocks * block_size
    seq.num_draft_computed_tokens = min(seq.num_draft_computed_tokens, own)
    seq.draft_kv_ids = []
