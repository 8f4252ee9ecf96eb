"""From one request's token deltas to its text.

Owns where the text ends: stop strings, stop tokens, and the usage that belongs to it. Knows no
HTTP and no workers, nor which tokens stop: a worker that finishes with STOP has met one, and it
is the last it sends (stop strings are found here). Invariant: text, finish reason and
`completion_tokens` end at the same token, also when a stop string is complete in the middle of a
delta; the rest of that delta is dropped and the request is closed, which aborts it in the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from serving.detokenizer import Decoder, Detokenizer
from serving.stops import StopScanner
from workers.contracts import FinishReason, GenerationRequest, TokenDelta


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for the workers, and what only the text plane knows of it."""

    generation: GenerationRequest
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TextUsage:
    """Tokens so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token delta added; the text may be empty while characters are held back."""

    text: str
    usage: TextUsage
    finish_reason: FinishReason | None = None


class _TextState:
    """Detokenizer, stop strings and counts of one request."""

    def __init__(self, request: TextRequest, decoder: Decoder) -> None:
        self._min_tokens = request.generation.sampling.min_tokens
        self._stops = StopScanner(request.stops)
        self._has_stops = bool(request.stops)
        self._detokenizer = Detokenizer(decoder)
        self._num_prompt = len(request.generation.prompt_ids)
        self._num_emitted = 0
        self._num_cached: int | None = None

    def push(self, delta: TokenDelta) -> TextDelta:
        """Add a delta; the result has a finish reason where the text ends."""
        if self._num_cached is None:  # a replay's own count would count the prompt again
            self._num_cached = delta.num_cached_tokens
        text = self._push_tokens(delta)
        if self._stops.is_hit:
            return self._result(text, FinishReason.STOP)
        if delta.finish_reason is not None:
            text += self._stops.flush()
        return self._result(text, delta.finish_reason)

    def _push_tokens(self, delta: TokenDelta) -> str:
        ids = delta.token_ids
        # Not every model's end-of-sequence token is a special one, which decoding would drop.
        visible = ids[:-1] if delta.finish_reason is FinishReason.STOP else ids
        if not self._has_stops:
            self._num_emitted += len(ids)
            return self._detokenizer.push(visible)
        text = ""
        for token_id in visible:  # one by one: usage ends at the token that completes the stop
            self._num_emitted += 1
            piece = self._detokenizer.push((token_id,))
            # Text within `min_tokens` cannot end the request, so no stop is looked for in it.
            text += self._stops.push(piece) if self._num_emitted > self._min_tokens else piece
            if self._stops.is_hit:
                return text
        self._num_emitted += len(ids) - len(visible)
        return text

    def _result(self, text: str, finish_reason: FinishReason | None) -> TextDelta:
        usage = TextUsage(self._num_prompt, self._num_emitted, self._num_cached or 0)
        return TextDelta(text, usage, finish_reason)


async def stream_text(
    request: TextRequest, decoder: Decoder, deltas: AsyncGenerator[TokenDelta, None]
) -> AsyncGenerator[TextDelta, None]:
    """Yield one text delta per token delta, the last one with the finish reason."""
    state = _TextState(request, decoder)
    async with aclosing(deltas):
        async for delta in deltas:
            result = state.push(delta)
            yield result
            if result.finish_reason is not None:
                return
