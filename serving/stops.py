"""Finds stop strings in text that arrives in pieces.

Owns what may be sent on and what must wait. Knows no tokens. Invariants: no character of a stop
string is ever sent; what waits is the longest tail that could still become a stop string, no
more; and the result does not depend on how the text is cut into pieces: the stop string that is
complete first wins, the longest of those that are complete at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """The stop strings of one request."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_hit = False

    def push(self, piece: str) -> str:
        """Add text; return what is certain to be outside a stop string."""
        if self.is_hit or not self._stops:
            return "" if self.is_hit else piece
        text = self._held + piece
        cut = self._first_hit(text)
        if cut is not None:
            self.is_hit, self._held = True, ""
            return text[:cut]
        keep = self._partial_len(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that waited for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, text: str) -> int | None:
        """Return where the winning stop string begins."""
        hits = []
        for stop in self._stops:
            begin = text.find(stop)
            if begin >= 0:
                hits.append((begin + len(stop), begin))
        return min(hits)[1] if hits else None

    def _partial_len(self, text: str) -> int:
        """Return the length of the longest tail of `text` that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
