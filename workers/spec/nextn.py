"""Drafting with the NEXTN head that a checkpoint carries, over the target's own output.

Owns the target's output until the head has seen it, and the shift: the head's row p takes the
target's output at p and token p + 1. Knows no engine and no scheduler. After a step, draft-extend
runs the rows of the tokens that stand, whose last one already gives the first draft; draft decode
then runs on the head's own output.

Invariant: K/V vouched for was computed from the target's output. What draft decode wrote was not,
and is written again by the next draft-extend. Where output is missing, since drafting failed for
long, a sequence gets no drafts until it is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from workers.batch_info import ForwardBatch, SequenceSpan
from workers.contracts import ImageInput, MediaInput
from workers.models.runner import ModelRunner, StepOutput
from workers.sequence import Sequence
from workers.spec.drafter import DraftTask, Proposal
from workers.spec.model_drafter import ExtendItem, ModelDrafter


class _Output(NamedTuple):
    """The target's output for tokens `[end - len(rows), end)` of a sequence."""

    end: int
    rows: Tensor  # [n, hidden]

    @property
    def start(self) -> int:
        return self.end - len(self.rows)


class NextNDrafter(ModelDrafter):
    """Drafts with one layer that predicts the token after the next."""

    name = "nextn"
    needs_hidden = True

    def __init__(self, runner: ModelRunner, num_ids: int, max_extend_tokens: int) -> None:
        super().__init__(runner, num_ids, max_extend_tokens)
        # Only while a step is drafted for, but for sequences whose draft-extend has to wait.
        self._outputs: WeakKeyDictionary[Sequence, _Output] = WeakKeyDictionary()

    def propose(self, tasks: Seq[DraftTask]) -> Proposal:
        """See `Drafter`."""
        proposal = super().propose(tasks)
        for task in tasks:
            output = self._outputs[task.seq]
            if task.seq.num_draft_computed_tokens >= output.end:
                del self._outputs[task.seq]
            else:  # a copy: the rows are a view of the whole step's
                self._outputs[task.seq] = output._replace(rows=output.rows.clone())
        return proposal

    def _follow(self, task: DraftTask) -> None:
        seq, rows = task.seq, task.hidden
        if rows is None:
            raise ValueError("method nextn needs the target's output")
        seq.draft_kv_ids = []
        output = _Output(seq.num_computed_tokens, rows)
        waiting = self._outputs.get(seq)
        if waiting is not None and waiting.end == output.start:
            both = torch.cat([waiting.rows, rows])
            output = _Output(output.end, both[-self._max_extend_tokens :])
        self._outputs[seq] = output

    def _reach(self, task: DraftTask, *, drafts_now: bool) -> int:  # noqa: ARG002
        output = self._outputs[task.seq]
        is_complete = output.start <= task.seq.num_draft_computed_tokens
        return output.end if is_complete else 0

    def _span(self, item: ExtendItem) -> SequenceSpan:
        seq = item.task.seq
        return SequenceSpan(
            token_ids=seq.token_ids[item.start + 1 : item.end + 1],
            start=item.start,
            block_table=seq.block_table,
            rope=seq.rope,
            num_logit_rows=int(item.drafts),
        )

    def _forward_extend(self, batch: ForwardBatch, items: Seq[ExtendItem]) -> StepOutput:
        media = []
        previous = []
        for item in items:
            seq = item.task.seq
            reads_prompt = item.start + 1 < seq.prompt_len
            media.append([_shifted(m) for m in seq.request.media] if reads_prompt else [])
            output = self._outputs[seq]
            previous.append(output.rows[item.start - output.start : item.end - output.start])
        return self._runner.forward(batch, media, torch.cat(previous))

    def _forward_decode(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        sequences: Seq[Sequence],  # noqa: ARG002 - the head's own output is all it needs
    ) -> StepOutput:
        return self._runner.forward(batch, previous=hidden)


def _shifted(media: MediaInput) -> MediaInput:
    """Move an image or video to the rows that read its placeholders: one earlier."""
    if isinstance(media, ImageInput):
        return replace(media, start=media.start - 1)
    return replace(media, starts=tuple(start - 1 for start in media.starts))
