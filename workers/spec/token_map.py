"""Ids that a draft model has no token for, as ids it has.

Owns one rule. Knows no model. Invariant: what comes out can be embedded by the draft model; a
list of ids that it has comes out as it is. Only what the draft model reads is mapped: the
sequence's tokens, and so the output, never are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Puts one id in the place of all that the draft model lacks.

    Those are the placeholders of images under a text-only draft, and other tokens that were added
    to the target alone. The positions stay occupied, so that every later token keeps its own.
    """

    # Ids below are the draft model's.
    num_ids: int
    # What it reads for others.
    filler_id: int

    def apply(self, token_ids: list[int]) -> list[int]:
        """Return ids of the draft model, one for each."""
        if not token_ids or max(token_ids) < self.num_ids:
            return token_ids
        return [i if i < self.num_ids else self.filler_id for i in token_ids]
