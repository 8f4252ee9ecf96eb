"""The target's part of a step: run it, sample every position, accept drafts.

Owns the way from what was scheduled to what each sequence gets, and the narrowing of a failure to
the request that causes it. Knows no queue, no drafter and no delivery. Invariant: an outcome holds
tokens or an error for every scheduled sequence, and one sequence's error is never another's;
drafts are given up before a request is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from workers.batch_info import ForwardMode, SequenceSpan
from workers.contracts import TokenLogprob
from workers.models.device import is_device_lost
from workers.models.linear_step import LinearStep
from workers.models.runner import ModelRunner
from workers.sampling.logprobs import on_host, prompt_logprobs
from workers.sampling.sampler import SampledRows, Sampler, SamplingRow
from workers.scheduler import ScheduledSequence
from workers.spec.rows import verify_rows
from workers.spec.verifier import accept

# Prompt tokens whose logits are held at once.
_LOGPROB_ROWS = 256


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
    # One a token, if asked.
    logprobs: tuple[TokenLogprob, ...] | None = None
    # Of the prompt tokens after each of the chunk's, if asked.
    prompt_logprobs: Seq[TokenLogprob] = ()

    @property
    def num_kept(self) -> int:
        """Tokens of the step that are the sequence's: known ones and accepted drafts."""
        num_known = self.item.num_new_tokens - self.item.num_draft_tokens
        return num_known + max(len(self.token_ids) - 1, 0)


class Target:
    """The target model and the sampler over its logits."""

    def __init__(self, runner: ModelRunner, num_ids: int, keep_hidden: bool = False) -> None:
        self._runner = runner
        self._num_ids = num_ids
        self._keep_hidden = keep_hidden
        self._sampler = Sampler(runner.adapter.vocab_size, num_ids, runner.device)

    def run(
        self, items: Seq[ScheduledSequence], on_bisect: Callable[[], None] = lambda: None
    ) -> list[Outcome]:
        """Run a step; when it fails, run its halves, down to the one request to blame.

        Running a part again is safe: K/V of the step's slots is simply written again, and
        recurrent state is written only here, after everything else went well.

        Args:
            items: What is scheduled.
            on_bisect: Called each time that a part is cut in halves.

        Raises:
            Exception: The device is lost; nothing can be said of any request.
        """
        try:
            outcomes, linear = self._run(items)
        except Exception as error:  # the named boundary of target failures
            if is_device_lost(error):
                raise
            if len(items) > 1:
                on_bisect()
                half = len(items) // 2
                return self.run(items[:half], on_bisect) + self.run(items[half:], on_bisect)
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
        media = [
            item.seq.request.media if span.start < item.seq.prompt_len else ()
            for item, span in zip(items, spans, strict=True)
        ]
        batch = self._runner.build(_mode(items), spans)
        out = self._runner.forward(batch, media)
        # While the device runs: a grammar's masks are the host's work.
        rows = [row for item in items if item.samples for row in verify_rows(item.seq)]
        outcomes = self._outcomes(items, out.logits, rows)
        starts = accumulate((len(span.token_ids) for span in spans[:-1]), initial=0)
        return [
            self._with_hidden(outcome, out.hidden[start:])
            for outcome, start in zip(outcomes, starts, strict=True)
        ], out.linear

    def _with_hidden(self, outcome: Outcome, hidden: Tensor) -> Outcome:
        """Add what comes from the output of the sequence's tokens.  # [>= its tokens, hidden]."""
        if self._keep_hidden:
            outcome = replace(outcome, hidden=hidden[: outcome.num_kept])
        if outcome.item.seq.prompt_logprobs is not None and outcome.error is None:
            outcome = replace(outcome, prompt_logprobs=self._prompt_logprobs(outcome.item, hidden))
        return outcome

    @torch.inference_mode()
    def _prompt_logprobs(self, item: ScheduledSequence, hidden: Tensor) -> list[TokenLogprob]:
        """Return how likely each prompt token was that follows one of the chunk's."""
        seq = item.seq
        first = seq.num_computed_tokens + 1
        next_ids = seq.token_ids[first : min(first + item.num_new_tokens, seq.prompt_len)]
        num_top = seq.request.sampling.num_prompt_logprobs or 0
        logprobs: list[TokenLogprob] = []
        for start in range(0, len(next_ids), _LOGPROB_ROWS):
            ids = next_ids[start : start + _LOGPROB_ROWS]
            logits = self._runner.adapter.logits(hidden[start : start + len(ids)])
            logprobs += prompt_logprobs(logits, ids, num_top, self._num_ids)
        return logprobs

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
        logprobs = _logprobs(sampled, token_ids, rows)
        outcomes = []
        first = 0
        for item in items:
            last = first + _num_logit_rows(item)
            accepted = accept(item.seq.draft_ids, token_ids[first:last])
            # What stands behind a rejected draft may be anything.
            if all(is_finite[first : first + len(accepted)]):
                reported = tuple(logprobs[first + i] for i in range(len(accepted)) if logprobs)
                has_them = item.seq.request.sampling.num_logprobs is not None
                outcomes.append(Outcome(item, accepted, logprobs=reported if has_them else None))
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


def _logprobs(
    sampled: SampledRows, token_ids: Seq[int], rows: Seq[SamplingRow]
) -> dict[int, TokenLogprob]:
    """Return row -> what to report of it, for the rows that want it."""
    if sampled.logprobs is None:
        return {}
    wanted = {i: row.num_logprobs for i, row in enumerate(rows) if row.num_logprobs is not None}
    ids = [token_ids[i] for i in wanted]
    return dict(zip(wanted, on_host(sampled.logprobs, ids, list(wanted.values())), strict=True))


def _mode(items: Seq[ScheduledSequence]) -> ForwardMode:
    """Name the step for logs: it sizes nothing."""
    if any(item.num_draft_tokens for item in items):
        return ForwardMode.TARGET_VERIFY
    if all(item.num_new_tokens == 1 for item in items):
        return ForwardMode.DECODE
    return ForwardMode.EXTEND
