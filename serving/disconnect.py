"""Ends work whose client has gone.

Owns the race between an answer in the making and the client's disconnect. Knows nothing of what
the work is. Invariant: when `while_connected` returns or raises, the work is finished or was
cancelled and has cleaned up; nothing runs on for nobody.

Starlette watches the connection only while it sends a streaming response. An answer in one piece,
and a stream that waits for its first token, would run to their end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """Nobody is left to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, unless the client goes first.

    Raises:
        ClientDisconnectedError: The client went; `work` was cancelled.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
