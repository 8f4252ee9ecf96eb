"""Waits for the next item of a stream without giving the wait up, and fills long waits.

Owns the peek at a stream's next item, and the comments that keep an idle connection open. Knows
nothing of what the items are. Invariant: however a wait ends (an item, an error, a cancellation,
a close), no task is left running and the source is closed or can be closed.

A prefill of minutes sends nothing, and proxies and clients take a silent connection for a dead
one. Comments are part of server-sent events, and every client skips them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, TypeVar

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"


class Peekable(AsyncGenerator[T, None]):
    """An async generator whose next item can be waited for, for some time, before it is taken.

    Unlike a plain generator it can be closed during such a wait.
    """

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source
        # Gets the next item; outlives the waits for it.
        self._next: asyncio.Future[T] | None = None

    async def peek(self, timeout_s: float | None) -> bool:
        """Return whether the next item is there within the time; None waits for ever.

        The source goes on when the wait is cancelled; who gives it up closes it.

        Raises:
            Exception: What the source raised instead of an item; StopAsyncIteration at its end.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._source))
        waiting = self._next
        await asyncio.wait({waiting}, timeout=timeout_s)
        if not waiting.done():
            return False
        if (error := waiting.exception()) is not None:
            raise error
        return True

    async def asend(self, value: None) -> T:  # noqa: ARG002 - what iterates sends nothing
        """Return the next item."""
        if self._next is None:
            return await anext(self._source)
        taken, self._next = self._next, None
        return await taken

    async def athrow(self, *error: Any) -> T:
        """Raise an error in the source where it stands."""
        await self._give_up()
        return await self._source.athrow(*error)

    async def aclose(self) -> None:
        """Give up the wait for an item, and close the source."""
        try:
            await self._give_up()
        finally:
            await self._source.aclose()

    async def _give_up(self) -> None:
        if self._next is None:
            return
        waiting, self._next = self._next, None
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def with_keep_alive(
    source: AsyncGenerator[bytes, None], interval_s: float | None
) -> AsyncGenerator[bytes, None]:
    """Yield the source's events, and a comment whenever the interval passes without one.

    Args:
        source: Closed when this ends, however it ends.
        interval_s: None sends no comments.
    """
    async with aclosing(Peekable(source)) as events:
        with suppress(StopAsyncIteration):
            while True:
                while not await events.peek(interval_s):
                    yield KEEP_ALIVE
                yield await anext(events)
