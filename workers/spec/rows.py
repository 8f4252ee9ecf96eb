"""What each row of logits is for, of target and drafter alike.

Owns the way from a sequence and the drafts after it to what the sampler is told. Knows no logits.
Invariant: a row depends on the sequence and the drafts before it, never on the drafts after it; so
a verified position is sampled as plain decoding would sample it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from workers.sampling.sampler import SamplingRow
from workers.sequence import Sequence


def verify_rows(seq: Sequence) -> list[SamplingRow]:
    """Return the rows of a sequence in the target's step: before each draft, after the last."""
    drafts = seq.draft_ids
    masks = None
    if seq.grammar is not None:
        masks = seq.grammar.masks(drafts)
        _mind_min_tokens(seq, masks, 0)
    return [
        _row(seq, drafts[:i], None if masks is None else masks[i], is_reported=True)
        for i in range(len(drafts) + 1)
    ]


def draft_row(seq: Sequence, draft_ids: Seq[int], num_ids: int) -> SamplingRow:
    """Return the row for a sequence's next draft.

    Args:
        seq: The sequence.
        draft_ids: Its drafts so far, all legal in its grammar.
        num_ids: Ids that the drafter has.
    """
    mask = None
    if seq.grammar is not None:
        masks = seq.grammar.masks(draft_ids)[-1:]
        _mind_min_tokens(seq, masks, len(draft_ids))
        # A drafter without the tokens that may come drafts what it likes, which is cut off.
        if masks[:, : num_ids // 32].any():
            mask = masks[0]
    return _row(seq, draft_ids, mask, is_reported=False)


def _mind_min_tokens(seq: Sequence, masks: np.ndarray, first: int) -> None:
    """Keep the output going up to `min_tokens`; the first mask is that after `first` drafts."""
    num_short = seq.request.sampling.min_tokens - seq.num_emitted - first
    if seq.grammar is not None and num_short > 0:
        seq.grammar.keep_going(masks[:num_short], seq.stop_ids)


def _row(
    seq: Sequence, draft_ids: Seq[int], mask: np.ndarray | None, *, is_reported: bool
) -> SamplingRow:
    params = seq.request.sampling
    return SamplingRow(
        params=params,
        position=seq.num_tokens + len(draft_ids),
        num_emitted=seq.num_emitted + len(draft_ids),
        stop_ids=seq.stop_ids,
        history=seq,
        draft_ids=draft_ids,
        mask=mask,
        num_logprobs=params.num_logprobs if is_reported else None,
    )
