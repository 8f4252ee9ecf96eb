"""The bodies around generation: from text to token ids and back, in vLLM's shapes.

Owns the fields of `/tokenize` and `/detokenize`. Knows no model and no tokenizer. Invariant: as in
`schema`, a body that validates holds only what takes effect; so a text and a chat, which know
different parameters, are different bodies.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, Tag

from serving.fields import Body, Text, TokenId
from serving.formats import Tools
from serving.messages import Messages
from serving.schema import MAX_PROMPT_IDS


class ToolBody(Body):
    """What these bodies share."""

    # There is one; whoever names another is told so.
    model: Text | None = None


class TokenizeTextBody(ToolBody):
    """A text, as /v1/completions takes it."""

    prompt: Text
    # The model's own, as a beginning of text.
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ToolBody):
    """Messages, as /v1/chat/completions takes them."""

    messages: Messages
    # Described to the model, as those of a chat are.
    tools: Tools | None = None
    # Whether the prompt ends where the answer would begin.
    add_generation_prompt: bool = True
    return_token_strs: bool = False


def _tag_tokenize(body: Any) -> str:
    return "(chat)" if isinstance(body, dict) and "messages" in body else "(text)"


TokenizeBody = Annotated[
    Annotated[TokenizeTextBody, Tag("(text)")] | Annotated[TokenizeChatBody, Tag("(chat)")],
    Discriminator(_tag_tokenize),
]


class DetokenizeBody(ToolBody):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_PROMPT_IDS)]


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    # Prompt plus answer at most; null while no worker says.
    max_model_len: int | None
    tokens: list[int]
    # As the vocabulary writes them.
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The answer of /detokenize."""

    prompt: str
