"""A checkpoint's tokens, and whether two checkpoints mean the same by an id.

Owns the token table as its tokenizer file has it, and the comparison of two. Knows no logits,
which may be wider, and no text: only ids cross between models. Invariant: of two vocabularies
without a difference, an id that both have is the same token in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of one checkpoint."""

    # token -> id, added ones included
    ids: Mapping[str, int]
    # Tokens put on top of the tokenizer's own: turns, placeholders, tools.
    added: frozenset[str] = frozenset()

    @property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values()) + 1

    def difference(self, draft: Vocabulary) -> str | None:
        """Return why a draft with that vocabulary cannot draft for this one; None if it can.

        Either may lack tokens that were added to the other: the draft then never proposes them,
        and is given another id where they stand in a prompt.
        """
        if self.ids == draft.ids:
            return None
        return (
            self._conflict(draft)
            or _missing(self, draft, "the draft")
            or _missing(draft, self, "the target")
        )

    def _conflict(self, draft: Vocabulary) -> str | None:
        """Name the first id that is two tokens, or the first token that is two ids."""
        theirs = {token_id: token for token, token_id in draft.ids.items()}
        for token, token_id in sorted(self.ids.items(), key=lambda item: item[1]):
            other = theirs.get(token_id, token)
            if other != token:
                return f"id {token_id} is {token!r} in the target and {other!r} in the draft"
            other_id = draft.ids.get(token, token_id)
            if other_id != token_id:
                return f"{token!r} is id {token_id} in the target and {other_id} in the draft"
        return None


def _missing(ours: Vocabulary, theirs: Vocabulary, whose: str) -> str | None:
    """Name the first token of `ours` that is not an added one and that `theirs` lacks."""
    missing = [
        (token_id, token)
        for token, token_id in ours.ids.items()
        if token not in theirs.ids and token not in ours.added
    ]
    if not missing:
        return None
    token_id, token = min(missing)
    return f"{whose} has no token {token!r}, which is id {token_id}"
