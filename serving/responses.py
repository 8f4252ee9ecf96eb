"""The shapes of what the OpenAI API answers.

Owns field names and order. Knows nothing of how the values come about. Invariant: a field that
was set is sent, null or not, and a field that was not set is left out; so `finish_reason: null`
is in every chunk, and `usage` only where the client asked for it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class PromptDetails(BaseModel):
    """How the prompt tokens came about."""

    cached_tokens: int


class SpeculationUsage(BaseModel):
    """What drafts did; beside OpenAI's API, where asked for."""

    draft_tokens: int
    accepted_tokens: int
    steps: int
    # Steps before which drafting failed.
    fallbacks: int
    # Of the answer so far; in chunks alone.
    tokens: int | None = None


class Usage(BaseModel):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    speculation: SpeculationUsage | None = None


class TopLogprob(BaseModel):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of a chat's answer, or of one chunk."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """The tokens of a text, or of one chunk, in columns."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionCall(BaseModel):
    """Which function to call, and with what."""

    name: str
    # JSON.
    arguments: str


class ToolCallItem(BaseModel):
    """A call; a stream numbers them, and sends each whole."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """The answer of a chat completion."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallItem] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    """What one chunk adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallItem] | None = None


class ChatChunkChoice(BaseModel):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    """One text, or one chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None


class Envelope(BaseModel):
    """What every response and every chunk carries."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | None = None
    # Beside OpenAI's API, where asked for: of several prompts, a list of their lists.
    prompt_token_ids: list[int] | list[list[int]] | None = None
    # Of the choice in this chunk, so far.
    speculation: SpeculationUsage | None = None

    def dump(self) -> dict[str, Any]:
        """Return the JSON value with the fields that were set."""
        return self.model_dump(exclude_unset=True)


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every refusal and failure."""

    error: ErrorDetail
