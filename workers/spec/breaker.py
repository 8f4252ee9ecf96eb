"""Stops drafting for a while when it keeps failing.

Owns one decision: whether the next step may draft. Knows no drafter and no sequence; it is told
how steps went. Invariant: a drafter that fails for good costs a bounded number of tries, ever more
seldom, and one that recovers is used again without anybody's help.

A circuit breaker (Nygard 2007, "Release It!"): closed while all is well, open after too many failed
steps of the last ones, and half open once the wait is over, when the next steps are a trial.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from workers.config import BreakerConfig


class BreakerState(StrEnum):
    """Whether steps draft."""

    CLOSED = "closed"
    OPEN = "open"
    # They do, on trial.
    HALF_OPEN = "half_open"


class Breaker:
    """Counts failed steps, and waits."""

    def __init__(self, config: BreakerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._recent: deque[bool] = deque(maxlen=config.window)
        self._is_closed = True
        # While it is not closed: how long the present wait is, and when it is over.
        self._wait_s = config.open_s
        self._until_s = -math.inf
        # Times it opened, failed trials included, and the waits of all of them.
        self.num_opened = 0
        self._waits_s = 0.0

    @property
    def state(self) -> BreakerState:
        """What it is as of now."""
        if self._is_closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until_s else BreakerState.HALF_OPEN

    @property
    def open_s(self) -> float:
        """Seconds for which it was open, so far."""
        return self._waits_s - max(self._until_s - self._clock(), 0.0)

    def failed(self) -> None:
        """Take note of a step whose drafting failed."""
        state = self.state
        self._recent.append(True)
        if state is BreakerState.HALF_OPEN:
            self._wait_s = min(2 * self._wait_s, self._config.max_open_s)
            self._open()
        elif state is BreakerState.CLOSED and sum(self._recent) >= self._config.max_failures:
            self._open()

    def succeeded(self) -> None:
        """Take note of a step whose drafts were drafted and verified as they should."""
        state = self.state
        self._recent.append(False)
        if state is BreakerState.HALF_OPEN:
            self._is_closed = True
            self._wait_s = self._config.open_s
            self._recent.clear()

    def _open(self) -> None:
        self._is_closed = False
        self._until_s = self._clock() + self._wait_s
        self.num_opened += 1
        self._waits_s += self._wait_s
