"""Drafting with a second, smaller model over the same token ids.

Owns what is particular to a model of its own: it reads the sequence's tokens, up to the last one,
and the images with its own vision tower. Knows no engine and no scheduler. Positions and layout
are the draft model's: a text-only draft under an mrope target counts linearly.

Invariant: K/V written for drafts counts after the fact, where the ids turn out to be the
sequence's own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from workers.batch_info import ForwardBatch, SequenceSpan
from workers.models.runner import ModelRunner, StepOutput
from workers.sequence import Sequence
from workers.spec.drafter import DraftTask
from workers.spec.model_drafter import ExtendItem, ModelDrafter
from workers.spec.token_map import TokenMap


class DraftModelDrafter(ModelDrafter):
    """Drafts with a whole model."""

    name = "draft_model"

    def __init__(
        self, runner: ModelRunner, num_ids: int, max_extend_tokens: int, token_map: TokenMap
    ) -> None:
        super().__init__(runner, num_ids, max_extend_tokens)
        self._token_map = token_map

    def _follow(self, task: DraftTask) -> None:
        _credit_accepted(task.seq)

    def _reach(self, task: DraftTask, *, drafts_now: bool) -> int:
        # The last token has a block of its own only where drafts were planned after it.
        return task.seq.num_tokens if drafts_now else task.seq.num_computed_tokens

    def _span(self, item: ExtendItem) -> SequenceSpan:
        seq = item.task.seq
        return SequenceSpan(
            token_ids=self._token_map.apply(seq.token_ids[item.start : item.end]),
            start=item.start,
            block_table=seq.block_table,
            rope=seq.rope,
            num_logit_rows=int(item.drafts),
        )

    def _forward_extend(self, batch: ForwardBatch, items: Seq[ExtendItem]) -> StepOutput:
        media = [
            item.task.seq.request.media if item.start < item.task.seq.prompt_len else ()
            for item in items
        ]
        return self._runner.forward(batch, media)

    def _forward_decode(
        self,
        batch: ForwardBatch,
        hidden: Tensor,  # noqa: ARG002 - a whole model starts from the token
        sequences: Seq[Sequence],  # noqa: ARG002
    ) -> StepOutput:
        return self._runner.forward(batch)


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
