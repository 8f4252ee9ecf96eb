"""The target's part of a step: run it, sample every position, accept drafts.

Owns the way from what was scheduled to what each sequence gets, and the narrowing of a failure to
the request that causes it. Knows no queue, no drafter and no delivery. Invariant: an outcome holds
tokens or an error for every scheduled sequence, and one sequence's error is never another's;
drafts are given up before a request is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from workers.batch_info import ForwardMode, SequenceSpan
from workers.models.device import is_device_lost
from workers.models.linear_step import LinearStep
from workers.models.runner import ModelRunner
from workers.sampling.sampler import Sampler, SamplingRow
from workers.scheduler import ScheduledSequence
from workers.spec.verifier import accept


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one scheduled sequence got out of the step."""

    item: ScheduledSequence
    # Accepted drafts and the bonus token; empty for an inner prompt chunk or an error.
    token_ids: Seq[int] = ()
    # Why the request cannot go on.
    error: str | None = None
    # Why its drafts were given up: the step failed with them and not without.
    draft_failure: str | None = None
    # The target's output for the tokens that stand, if asked for.  # [num_kept, hidden]
    hidden: Tensor | None = None

    @property
    def num_kept(self) -> int:
        """Tokens of the step that are the sequence's: known ones and accepted drafts."""
        num_known = self.item.num_new_tokens - self.item.num_draft_tokens
        return num_known + max(len(self.token_ids) - 1, 0)


class Target:
    """The target model and the sampler over its logits."""

    def __init__(self, runner: ModelRunner, num_ids: int, keep_hidden: bool = False) -> None:
        self._runner = runner
        self._keep_hidden = keep_hidden
        self._sampler = Sampler(runner.adapter.vocab_size, num_ids, runner.device)

    def run(self, items: Seq[ScheduledSequence]) -> list[Outcome]:
        """Run a step; when it fails, run its halves, down to the one request to blame.

        Running a part again is safe: K/V of the step's slots is simply written again, and
        recurrent state is written only here, after everything else went well.

        Raises:
            Exception: The device is lost; nothing can be said of any request.
        """
        try:
            outcomes, linear = self._run(items)
        except Exception as error:  # the named boundary of target failures
            if is_device_lost(error):
                raise
            if len(items) > 1:
                half = len(items) // 2
                return self.run(items[:half]) + self.run(items[half:])
            return [self._run_without_drafts(items[0], type(error).__name__)]
        # Outside the boundary: half a commit could not be run again.
        if linear is not None:
            linear.commit(
                [outcome.num_kept for outcome in outcomes], [item.seq.state_slot for item in items]
            )
        return outcomes

    def _run_without_drafts(self, item: ScheduledSequence, reason: str) -> Outcome:
        """Blame a failure on the drafts if the sequence has some, else on the request."""
        if item.num_draft_tokens == 0:
            return Outcome(item, error=f"generation failed: {reason}")
        item.seq.drop_drafts()
        (outcome,) = self.run([ScheduledSequence(item.seq, num_new_tokens=1)])
        return replace(outcome, draft_failure=reason)

    def _run(self, items: Seq[ScheduledSequence]) -> tuple[list[Outcome], LinearStep | None]:
        spans = [_span(item) for item in items]
        rows = [row for item in items if item.samples for row in _rows(item)]
        media = [
            item.seq.request.media if span.start < item.seq.prompt_len else ()
            for item, span in zip(items, spans, strict=True)
        ]
        batch = self._runner.build(_mode(items), spans)
        out = self._runner.forward(batch, media)
        outcomes = self._outcomes(items, out.logits, rows)
        if self._keep_hidden:
            starts = accumulate((len(span.token_ids) for span in spans[:-1]), initial=0)
            outcomes = [
                replace(outcome, hidden=out.hidden[start : start + outcome.num_kept])
                for outcome, start in zip(outcomes, starts, strict=True)
            ]
        return outcomes, out.linear

    def _outcomes(
        self, items: Seq[ScheduledSequence], logits: Tensor, rows: Seq[SamplingRow]
    ) -> list[Outcome]:
        """Sample every logit row and accept drafts."""
        if not rows:
            return [Outcome(item) for item in items]
        with torch.inference_mode():
            sampled = self._sampler.sample(logits, rows)
        token_ids = sampled.token_ids.tolist()
        is_finite = sampled.is_finite.tolist()
        outcomes = []
        first = 0
        for item in items:
            last = first + _num_logit_rows(item)
            accepted = accept(item.seq.draft_ids, token_ids[first:last])
            # What stands behind a rejected draft may be anything.
            if all(is_finite[first : first + len(accepted)]):
                outcomes.append(Outcome(item, accepted))
            else:
                outcomes.append(Outcome(item, error="generation failed: logits are not finite"))
            first = last
        return outcomes


def _span(item: ScheduledSequence) -> SequenceSpan:
    """The tokens of one scheduled sequence: known ones, then drafts."""
    seq = item.seq
    start = seq.num_computed_tokens
    end = start + item.num_new_tokens - item.num_draft_tokens
    return SequenceSpan(
        token_ids=seq.token_ids[start:end] + seq.draft_ids,
        start=start,
        block_table=seq.block_table,
        rope=seq.rope,
        num_logit_rows=_num_logit_rows(item),
        state_source=seq.state_source,
    )


def _num_logit_rows(item: ScheduledSequence) -> int:
    return 1 + item.num_draft_tokens if item.samples else 0


def _rows(item: ScheduledSequence) -> list[SamplingRow]:
    """What the target's logit rows of one sequence are for."""
    seq = item.seq
    return [
        SamplingRow(
            params=seq.request.sampling,
            position=seq.num_tokens + i,
            num_emitted=seq.num_emitted + i,
            stop_ids=seq.stop_ids,
        )
        for i in range(1 + item.num_draft_tokens)
    ]


def _mode(items: Seq[ScheduledSequence]) -> ForwardMode:
    """Name the step for logs: it sizes nothing."""
    if any(item.num_draft_tokens for item in items):
        return ForwardMode.TARGET_VERIFY
    if all(item.num_new_tokens == 1 for item in items):
        return ForwardMode.DECODE
    return ForwardMode.EXTEND
