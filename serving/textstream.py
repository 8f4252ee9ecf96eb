"""From one choice's token deltas to its text, its calls of tools, and what belongs to them.

Owns where the answer ends: stop strings, stop tokens, a call that must stay alone, and the usage
that belongs to it. Knows no HTTP, no workers and no format of calls, nor which tokens stop: a
worker that finishes with STOP has met one, and it is the last it sends (stop strings and calls are
found here). Invariant: text, ids, log-probabilities, finish reason and `completion_tokens` end at
the same token, also when a stop string is complete in the middle of a delta; the rest of that
delta is dropped and the request is closed, which aborts it in the engine. How the tokens come in
deltas changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from serving.detokenizer import Decoder, Detokenizer
from serving.stops import StopScanner
from serving.tools.calls import ToolCall, ToolParser
from workers.contracts import FinishReason, GenerationRequest, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, where the text begins with it."""

    text: str
    # Characters of it before each of the prompt's tokens; None = not asked for.
    offsets: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for the workers, and what only the text plane knows of it."""

    generation: GenerationRequest
    stops: tuple[str, ...] = ()
    echo: Echo | None = None
    # Whether the prompt is all that is asked about: the token after it is not shown.
    is_score: bool = False
    # Makes what finds calls of tools in the text; None = text is text.
    new_parser: Callable[[], ToolParser] | None = None
    # Whether the answer ends with its first call.
    is_single_call: bool = False


@dataclass(frozen=True, slots=True)
class TextUsage:
    """Tokens so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """What drafts did so far."""

    draft_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    fallbacks: int = 0


class ScoredToken(NamedTuple):
    """A token of the answer or of an echoed prompt, with its log-probability."""

    token_id: int
    # Characters of the choice's text before it.
    offset: int
    # None for a prompt's first token, which nothing precedes.
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token delta added; the text may be empty while characters are held back."""

    text: str
    usage: TextUsage
    finish_reason: FinishReason | None = None
    # Those that count, the one that stopped included.
    token_ids: tuple[int, ...] = ()
    # One a token, if log-probabilities were asked for; before them the echoed prompt's.
    scores: tuple[ScoredToken, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    # Calls so far.
    num_calls: int = 0
    speculation: SpeculationTotals = SpeculationTotals()


class _TextState:
    """Detokenizer, stop strings, calls and counts of one request."""

    def __init__(self, request: TextRequest, decoder: Decoder) -> None:
        self._request = request
        self._min_tokens = request.generation.sampling.min_tokens
        self._stops = StopScanner(request.stops)
        self._detokenizer = Detokenizer(decoder)
        self._parser = None if request.new_parser is None else request.new_parser()
        self._num_emitted = 0
        self._num_calls = 0
        self._num_chars = 0
        self._num_cached: int | None = None
        # Of the delta at hand.
        self._pieces: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, delta: TokenDelta) -> TextDelta:
        """Add a delta; the result has a finish reason where the answer ends."""
        self._pieces, self._calls, scores = [], [], []
        if self._num_cached is None:  # a replay's own count would count the prompt again
            self._num_cached = delta.num_cached_tokens
            scores += self._echo(delta)
        if self._request.is_score:
            return self._result(delta, 0, scores, FinishReason.LENGTH)
        count = 0
        for i, token_id in enumerate(delta.token_ids):
            count += 1
            if delta.logprobs is not None:
                scores.append(ScoredToken(token_id, self._num_chars, delta.logprobs[i]))
            self._push_token(token_id, is_visible=self._is_visible(delta, i))
            if self._is_over:
                break
        reason = FinishReason.STOP if self._is_over else delta.finish_reason
        if reason is not None:
            self._flush()
        return self._result(delta, count, scores, reason)

    @property
    def _is_over(self) -> bool:
        has_call = self._request.is_single_call and self._num_calls > 0
        return self._stops.is_hit or has_call

    def _echo(self, delta: TokenDelta) -> list[ScoredToken]:
        echo = self._request.echo
        if echo is None:
            return []
        self._pieces.append(echo.text)
        self._num_chars = len(echo.text)
        if echo.offsets is None or delta.prompt_logprobs is None:
            return []
        ids = self._request.generation.prompt_ids
        return [
            ScoredToken(*token)
            for token in zip(ids, echo.offsets, delta.prompt_logprobs, strict=True)
        ]

    @staticmethod
    def _is_visible(delta: TokenDelta, i: int) -> bool:
        # Not every model's end-of-sequence token is a special one, which decoding would drop.
        is_stop = delta.finish_reason is FinishReason.STOP and i == len(delta.token_ids) - 1
        return not is_stop

    def _push_token(self, token_id: int, *, is_visible: bool) -> None:
        """Add a token; one by one, as the answer may end at each."""
        self._num_emitted += 1
        if not is_visible:
            return
        piece = self._detokenizer.push((token_id,))
        self._num_chars += len(piece)
        # Text within `min_tokens` cannot end the request, so no stop is looked for in it.
        is_free = self._num_emitted <= self._min_tokens
        self._write(piece if is_free else self._stops.push(piece))

    def _write(self, text: str) -> None:
        if self._parser is None:
            self._pieces.append(text)
        elif text:
            parsed = self._parser.push(text)
            self._add(parsed.content, parsed.calls)

    def _flush(self) -> None:
        """Let go of what waited for more."""
        self._write(self._stops.flush())
        # Behind a call that ends the answer, there is none.
        if self._parser is not None and not (self._request.is_single_call and self._num_calls):
            parsed = self._parser.flush()
            self._add(parsed.content, parsed.calls)

    def _add(self, content: str, calls: Sequence[ToolCall]) -> None:
        if self._request.is_single_call:
            calls = calls[: 1 - self._num_calls]
        self._pieces.append(content)
        self._calls.extend(calls)
        self._num_calls += len(calls)

    def _result(
        self,
        delta: TokenDelta,
        num_tokens: int,
        scores: Sequence[ScoredToken],
        finish_reason: FinishReason | None,
    ) -> TextDelta:
        num_prompt = len(self._request.generation.prompt_ids)
        return TextDelta(
            text="".join(self._pieces),
            usage=TextUsage(num_prompt, self._num_emitted, self._num_cached or 0),
            finish_reason=finish_reason,
            token_ids=delta.token_ids[:num_tokens],
            scores=tuple(scores),
            calls=tuple(self._calls),
            num_calls=self._num_calls,
            speculation=SpeculationTotals(
                delta.num_draft_tokens,
                delta.num_accepted_tokens,
                delta.num_steps,
                delta.num_fallbacks,
            ),
        )


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


def join(deltas: Sequence[TextDelta]) -> TextDelta:
    """Return all that a choice's deltas say as one."""
    last = deltas[-1]
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        usage=last.usage,
        finish_reason=last.finish_reason,
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        scores=tuple(score for delta in deltas for score in delta.scores),
        calls=tuple(call for delta in deltas for call in delta.calls),
        num_calls=last.num_calls,
        speculation=last.speculation,
    )


def token_offsets(ids: Sequence[int], decoder: Decoder, num_chars: int) -> tuple[int, ...]:
    """Return how many characters of a text of `num_chars` stand before each of its tokens."""
    detokenizer = Detokenizer(decoder)
    offsets, end = [], 0
    for token_id in ids:
        # A text may be longer decoded than it was: tokenizers add and change characters.
        offsets.append(min(end, num_chars))
        end += len(detokenizer.push((token_id,)))
    return tuple(offsets)
