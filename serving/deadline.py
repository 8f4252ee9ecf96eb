"""How long a request may take.

Owns the end of a request's time and what is raised then. Knows no workers: whoever is waited for is
closed, which aborts it. Invariant: time runs on one clock from the request's arrival, so that
fetching, queueing, replays and all choices share it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from serving.errors import DeadlineExceeded
from serving.keepalive import Peekable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment at which a request is given up."""

    # Given to it; infinite = it never is.
    seconds: float
    # When the request came, and when it is given up, on the clock of `time.perf_counter`.
    began_s: float
    at_s: float
    # Called once per wait that it ended.
    on_exceeded: Callable[[], None]

    @classmethod
    def after(cls, seconds: float, on_exceeded: Callable[[], None]) -> Deadline:
        """Return the one that many seconds from now."""
        now_s = time.perf_counter()
        return cls(seconds, now_s, now_s + seconds, on_exceeded)

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self._left_s() == 0

    async def wait_for(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which is cancelled when the time is over.

        Raises:
            DeadlineExceeded: It is.
        """
        limit = asyncio.timeout(None if math.isinf(self.seconds) else self._left_s())
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise  # the work's own
            raise self._exceeded() from None

    def bound(self, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Return the source's items while there is time; closes it however this ends.

        What is returned raises DeadlineExceeded when the next item did not come in time.
        """
        return source if math.isinf(self.seconds) else self._bound(source)

    async def _bound(self, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        async with aclosing(Peekable(source)) as items:
            while True:
                try:
                    if not await items.peek(self._left_s()):
                        raise self._exceeded()
                except StopAsyncIteration:
                    return
                yield await anext(items)

    def _left_s(self) -> float:
        return max(self.at_s - time.perf_counter(), 0.0)

    def _exceeded(self) -> DeadlineExceeded:
        self.on_exceeded()
        return DeadlineExceeded(f"not finished in {self.seconds:g} s")
