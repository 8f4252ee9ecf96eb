"""The shapes of what the OpenAI API answers.

Owns field names and order. Knows nothing of how the values come about. Invariant: a field that
was set is sent, null or not, and a field that was not set is left out; so `finish_reason: null`
is in every chunk, and `usage` only where the client asked for it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from serving.textstream import TextUsage


class PromptDetails(BaseModel):
    """How the prompt tokens came about."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, usage: TextUsage) -> Usage:
        """Return the counts in OpenAI's shape."""
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=usage.cached_tokens),
        )


class ChatMessage(BaseModel):
    """The answer of a chat completion."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: str


class ChatDelta(BaseModel):
    """What one chunk adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: str | None


class CompletionChoice(BaseModel):
    """One text, or one chunk's part of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Envelope(BaseModel):
    """What every response and every chunk carries."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | None = None

    def dump(self) -> dict[str, Any]:
        """Return the JSON value with the fields that were set."""
        return self.model_dump(exclude_unset=True)


class Model(BaseModel):
    """One model that can be named in a request."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specserve"


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
