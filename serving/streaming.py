"""From the deltas of choices to OpenAI answers, whole or as server-sent events.

Owns the order of chunks and what ends a stream. Knows no tokens and no workers. Invariant: a
stream is a role chunk for each choice (chat), chunks with `finish_reason: null`, one finish chunk
for each choice behind its last, one usage chunk if asked for, `[DONE]`; or it breaks off with one
error event and no `[DONE]`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.answers import AnswerFormat, encode_event
from serving.choices import ChoiceDelta
from serving.errors import is_expected, to_http
from serving.textstream import TextDelta, join

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


async def collect(
    answer: AnswerFormat, deltas: AsyncGenerator[ChoiceDelta, None]
) -> dict[str, Any]:
    """Return the whole answer."""
    said: list[list[TextDelta]] = [[] for _ in answer.choices]
    async with aclosing(deltas):
        async for index, delta in deltas:
            said[index].append(delta)
    return answer.whole([join(parts) for parts in said])


async def events(
    answer: AnswerFormat, deltas: AsyncGenerator[ChoiceDelta, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the stream's events, once its headers can be sent."""
    last: dict[int, TextDelta] = {}
    is_first = answer.kind == "completion"
    async with aclosing(deltas):
        if answer.kind == "chat":
            for index in range(len(answer.choices)):
                yield answer.role_chunk(index)
        try:
            async for index, delta in deltas:
                last[index] = delta
                if answer.is_shown(delta):
                    yield answer.chunk(index, delta, is_first=is_first)
                    is_first = False
                if delta.finish_reason is not None:
                    yield answer.finish_chunk(index, delta, is_first=is_first)
                    is_first = False
        # Boundary: the status is sent, so whatever went wrong can only be told as an event.
        except Exception as error:
            if not is_expected(error):
                logger.exception("stream %s failed", answer.id)
            yield encode_event(to_http(error).body())
            return
    if answer.include_usage:
        yield answer.usage_chunk([last[index] for index in range(len(answer.choices))])
    yield DONE


class EventStream(StreamingResponse):
    """A streaming response that closes its source however it ends.

    Starlette cancels the iteration when the client goes, but leaves a generator that waits at a
    `yield` to the garbage collector; the request would hold its blocks until then.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: AsyncGenerator[bytes, None], deltas: AsyncGenerator[ChoiceDelta, None]
    ) -> None:
        super().__init__(source, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._source = source
        # Closed as well: a source that never started does not reach its own closing of them.
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        async with aclosing(self._deltas), aclosing(self._source):
            await super().__call__(scope, receive, send)
