"""From text deltas to OpenAI answers, whole or as server-sent events.

Owns the order of chunks and what ends a stream. Knows no tokens and no workers. Invariant: a
stream is role chunk (chat), text chunks with `finish_reason: null`, one finish chunk, one usage
chunk if asked for, `[DONE]`; or it breaks off with one error event and no `[DONE]`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.errors import is_expected, to_http
from serving.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionChoice,
    Envelope,
    Usage,
)
from serving.textstream import TextDelta

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one request wants to be answered."""

    kind: Literal["chat", "completion"]
    id: str
    created: int
    model: str
    include_usage: bool = False

    def whole(self, text: str, last: TextDelta) -> dict[str, Any]:
        """Return the answer in one piece."""
        finish = str(last.finish_reason)
        choices: list[ChatChoice] | list[CompletionChoice]
        if self.kind == "chat":
            message = ChatMessage(role="assistant", content=text, refusal=None)
            choices = [ChatChoice(index=0, message=message, logprobs=None, finish_reason=finish)]
        else:
            choices = [CompletionChoice(index=0, text=text, logprobs=None, finish_reason=finish)]
        name: Any = "chat.completion" if self.kind == "chat" else "text_completion"
        return Envelope(
            id=self.id, object=name, created=self.created, model=self.model,
            choices=choices, usage=Usage.of(last.usage),
        ).dump()  # fmt: skip

    def role_chunk(self) -> bytes:
        """Return the first chunk of a chat stream."""
        delta = ChatDelta(role="assistant", content="")
        return self._chunk(
            [ChatChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=None)]
        )

    def text_chunk(self, text: str, finish: str | None = None) -> bytes:
        """Return a chunk with text, or the finish chunk."""
        if self.kind == "completion":
            return self._chunk(
                [CompletionChoice(index=0, text=text, logprobs=None, finish_reason=finish)]
            )
        delta = ChatDelta(content=text) if text else ChatDelta()
        return self._chunk(
            [ChatChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=finish)]
        )

    def usage_chunk(self, last: TextDelta) -> bytes:
        """Return the chunk that has the usage and no choices."""
        return self._chunk([], Usage.of(last.usage))

    def _chunk(
        self, choices: list[ChatChunkChoice] | list[CompletionChoice], usage: Usage | None = None
    ) -> bytes:
        name: Any = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        fields: dict[str, Any] = {"usage": usage} if self.include_usage else {}
        return encode_event(
            Envelope(
                id=self.id, object=name, created=self.created, model=self.model,
                choices=choices, **fields,
            ).dump()
        )  # fmt: skip


def encode_event(value: dict[str, Any]) -> bytes:
    """Encode one event.

    As ASCII: some clients cut lines at U+2028 or U+0085 too, which JSON may hold unescaped.
    """
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


async def collect(answer: AnswerFormat, deltas: AsyncGenerator[TextDelta, None]) -> dict[str, Any]:
    """Return the whole answer."""
    texts: list[str] = []
    async with aclosing(deltas):
        async for delta in deltas:
            texts.append(delta.text)
            last = delta
    return answer.whole("".join(texts), last)


async def events(
    answer: AnswerFormat, first: TextDelta, rest: AsyncGenerator[TextDelta, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the stream's events; `first` was awaited before the headers were sent."""
    async with aclosing(rest):
        if answer.kind == "chat":
            yield answer.role_chunk()
        last = first
        if first.text:
            yield answer.text_chunk(first.text)
        try:
            async for delta in rest:
                last = delta
                if delta.text:
                    yield answer.text_chunk(delta.text)
        # Boundary: the status is sent, so whatever went wrong can only be told as an event.
        except Exception as error:
            if not is_expected(error):
                logger.exception("stream %s failed", answer.id)
            yield encode_event(to_http(error).body())
            return
    yield answer.text_chunk("", str(last.finish_reason))
    if answer.include_usage:
        yield answer.usage_chunk(last)
    yield DONE


class EventStream(StreamingResponse):
    """A streaming response that closes its source however it ends.

    Starlette cancels the iteration when the client goes, but leaves a generator that waits at a
    `yield` to the garbage collector; the request would hold its blocks until then.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: AsyncGenerator[bytes, None], deltas: AsyncGenerator[TextDelta, None]
    ) -> None:
        super().__init__(source, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._source = source
        # Closed as well: a source that never started does not reach its own closing of them.
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        async with aclosing(self._deltas), aclosing(self._source):
            await super().__call__(scope, receive, send)
