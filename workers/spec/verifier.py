"""Acceptance: which drafts stand, given what the target sampled at every position.

Owns one comparison. Knows no probabilities: the target samples each position with the ordinary
sampler and keyed noise, so the accepted tokens are what plain decoding would have sampled, and
the output distribution is the target's whatever the drafter does.

Invariant: with drafts d[0..k) and samples s[0..k], s[i] is the target's token after d[0..i). It is
the sequence's next token exactly while d[0..i) == s[0..i).
"""

from __future__ import annotations

from collections.abc import Sequence


def num_accepted(draft_ids: Sequence[int], sampled_ids: Sequence[int]) -> int:
    """Return the length of the leading run of drafts that equal the samples."""
    count = 0
    for draft_id, sampled_id in zip(draft_ids, sampled_ids, strict=False):
        if draft_id != sampled_id:
            break
        count += 1
    return count


def accept(draft_ids: Sequence[int], sampled_ids: Sequence[int]) -> Sequence[int]:
    """Return the accepted drafts and the bonus token: between 1 and k + 1 ids.

    Args:
        draft_ids: What was drafted.  # [k]
        sampled_ids: The target's sample after the last token and after each draft.  # [k + 1]
    """
    return sampled_ids[: num_accepted(draft_ids, sampled_ids) + 1]
