"""Log-probabilities in the two shapes of the OpenAI API.

Owns how a token is written and a number that JSON has no word for. Knows no stream. Invariant:
`bytes` are the token's own, and put together those of the text; `token` shows them as far as they
are characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serving.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from serving.textstream import ScoredToken
from workers.contracts import TokenLogprob

# Stands for minus infinity, as in vLLM.
MIN_LOGPROB = -9999.0

TokenBytesOf = Callable[[int], bytes]


def chat_logprobs(scores: Sequence[ScoredToken], bytes_of: TokenBytesOf) -> ChatLogprobs:
    """Return a chat's shape."""
    entries = []
    for score in scores:
        # Only an echoed prompt has a token without one, and a chat echoes none.
        logprob = score.logprob or TokenLogprob(score.token_id, MIN_LOGPROB)
        own = bytes_of(score.token_id)
        top = [_top(*pair, bytes_of) for pair in logprob.top]
        entries.append(
            ChatLogprob(
                token=_show(own), logprob=_number(logprob.logprob), bytes=list(own),
                top_logprobs=top,
            )
        )  # fmt: skip
    return ChatLogprobs(content=entries, refusal=None)


def completion_logprobs(
    scores: Sequence[ScoredToken], bytes_of: TokenBytesOf
) -> CompletionLogprobs:
    """Return a completion's shape."""
    return CompletionLogprobs(
        text_offset=[score.offset for score in scores],
        token_logprobs=[
            None if score.logprob is None else _number(score.logprob.logprob) for score in scores
        ],
        tokens=[_show(bytes_of(score.token_id)) for score in scores],
        top_logprobs=[
            None if score.logprob is None else _top_dict(score.logprob, bytes_of)
            for score in scores
        ],
    )


def _top(token_id: int, logprob: float, bytes_of: TokenBytesOf) -> TopLogprob:
    own = bytes_of(token_id)
    return TopLogprob(token=_show(own), logprob=_number(logprob), bytes=list(own))


def _top_dict(logprob: TokenLogprob, bytes_of: TokenBytesOf) -> dict[str, float]:
    """Return the likeliest tokens and the one that came, by what they show."""
    shown: dict[str, float] = {}
    for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
        token = _show(bytes_of(token_id))
        # Halves of different characters look the same: the likelier one has the name.
        shown[token] = max(_number(value), shown.get(token, MIN_LOGPROB))
    return shown


def _show(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _number(logprob: float) -> float:
    # Not `max`: NaN is no JSON either.
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
