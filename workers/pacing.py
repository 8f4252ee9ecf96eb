"""How much of prompts a step may hold while other sequences decode.

Owns an estimate of what a step costs, from those that were run. Knows no sequences and no clock:
it is told how long steps took. Invariant: a prompt always gets on, by `MIN_TOKENS` at least; what a
step is expected to take stays within the budget whenever that leaves room for more.

A step takes some time for the rows that decode, and more for each token of prompts in it; both
change slowly. Two running means are enough, and follow a machine that gets slower or faster.
"""

from __future__ import annotations

# A step's overhead is paid for each chunk: smaller ones would cost more than they spare.
MIN_TOKENS = 32
# How much the latest step counts: one that took longer than thought more than one that did not,
# since a token costs more the further on in its prompt it is.
UP, DOWN = 0.7, 0.1


class Pacer:
    """Says how many prompt tokens fit into a step's time."""

    def __init__(self, max_step_s: float | None) -> None:
        """Start without an estimate, and so without a limit.

        Args:
            max_step_s: What a step should take at most; None = whatever it takes.
        """
        self._max_step_s = max_step_s
        # Seconds of a step without prompts, and for each token of prompts in one.
        self._base_s: float | None = None
        self._token_s: float | None = None

    def observe(self, seconds: float, num_prompt_tokens: int, *, has_decodes: bool = True) -> None:
        """Learn from a step.

        Args:
            seconds: What it took, drafting included.
            num_prompt_tokens: Tokens of prompts in it.
            has_decodes: Whether others decoded in it. One without is better than no experience.
        """
        if not has_decodes and self._token_s is not None:
            return
        if num_prompt_tokens == 0:
            self._base_s = _mean(self._base_s, seconds)
        else:
            extra_s = max(seconds - (self._base_s or 0.0), 0.0)
            self._token_s = _mean(self._token_s, extra_s / num_prompt_tokens)

    @property
    def num_tokens(self) -> int | None:
        """Prompt tokens for the next step that has decoding rows; None = no limit."""
        if self._max_step_s is None or self._token_s is None or self._token_s <= 0:
            return None
        left_s = self._max_step_s - (self._base_s or 0.0)
        # A step so cheap that the limit means nothing; it would not fit an integer either.
        tokens = min(left_s / self._token_s, 1e9)
        return max(int(tokens), MIN_TOKENS)


def _mean(known: float | None, value: float) -> float:
    if known is None:
        return value
    return known + (UP if value > known else DOWN) * (value - known)
