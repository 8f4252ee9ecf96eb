"""What a step of the target costs, by the number of tokens in it.

Owns running means of measured steps. Knows no sequences and no clock: it is told. Invariant: an
estimate lies between measured ones; nothing is said beyond what was ever measured, below included,
since a step of fewer tokens may cost as much (a device that waits for memory) or less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

# How much the latest step counts, once there are as many as its inverse.
RATE = 0.1
# Numbers of tokens up to here are kept apart; above, those within a quarter are taken together.
EXACT = 16


class StepCosts:
    """Seconds of a step without prompts, by its number of tokens."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._counts: Counter[int] = Counter()

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step."""
        size = _size(num_tokens)
        self._counts[size] += 1
        known = self._means.get(size, 0.0)
        self._means[size] = known + max(RATE, 1 / self._counts[size]) * (seconds - known)

    def estimate(self, num_tokens: int) -> float | None:
        """Return what a step of so many tokens takes; None where that is not known."""
        size = _size(num_tokens)
        if size in self._means:
            return self._means[size]
        sizes = sorted(self._means)
        place = bisect_left(sizes, size)
        if place in (0, len(sizes)):
            return None
        low, high = sizes[place - 1], sizes[place]
        share = (size - low) / (high - low)
        return self._means[low] + share * (self._means[high] - self._means[low])


def _size(num_tokens: int) -> int:
    """Round to a size that is told apart: three significant bits above `EXACT`."""
    if num_tokens <= EXACT:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 3)
    return -(-num_tokens // unit) * unit
