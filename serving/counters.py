"""What became of streams, as plain numbers.

Owns the counters of one ingress process and the news that they changed. Knows no metrics library
and no Ray: whoever shows them is told through a function. Invariant: they only grow; what a worker
counted is not among them, since its own numbers die with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StreamCounters:
    """What happened to streams since the process started. Data, not metrics."""

    # Times a stream broke before its terminal delta.
    interrupted: int = 0
    # Replays that delivered something.
    resumed: int = 0
    # Requests that were given up.
    lost: int = 0
    # Tokens that were sent along with replays.
    replayed_tokens: int = 0
    # Requests that ran out of time.
    timed_out: int = 0


class Reporter:
    """Passes an ingress's counters on when they changed, a second at most after that."""

    def __init__(
        self,
        counters: StreamCounters,
        push: Callable[[dict[str, int]], Awaitable[None]],
        interval_s: float = 1.0,
    ) -> None:
        """Prepare; nothing is sent before something changes.

        Args:
            counters: What is passed on.
            push: Takes the totals; what it raises is logged, and tried again with the next change.
            interval_s: Between two pushes.
        """
        self._counters = counters
        self._push = push
        self._interval_s = interval_s
        self._sent = asdict(counters)
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Take note that there is something to pass on (on the event loop)."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while (totals := asdict(self._counters)) != self._sent:
            try:
                await self._push(totals)
            except Exception as error:  # noqa: BLE001 - numbers are no reason to fail anything
                logger.warning("the counters were not passed on: %r", error)
                return
            self._sent = totals
            await asyncio.sleep(self._interval_s)
