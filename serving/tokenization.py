"""Shows clients what the model will read: text to token ids and back.

Owns `/tokenize` and `/detokenize` behind their bodies. Knows no HTTP and no workers. Invariant:
messages pass the very pipeline of a chat, images included, so their count is the
`usage.prompt_tokens` of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from serving.prompts import PromptBuilder
from serving.schema import ChatBody
from serving.schema_tools import DetokenizeBody, TokenizeChatBody, TokenizeTextBody


class Tokenization:
    """Encodes and decodes with one model's tokenizer, in threads."""

    def __init__(self, prompts: PromptBuilder) -> None:
        self._prompts = prompts

    async def encode(self, body: TokenizeTextBody | TokenizeChatBody) -> Sequence[int]:
        """Return the ids of a text or a chat."""
        if isinstance(body, TokenizeTextBody):
            tokenizer = self._prompts.tokenizer
            # Neither adds anything but the special tokens.
            encode = (
                tokenizer.encode_prompt if body.add_special_tokens else tokenizer.encode_control
            )
            return await asyncio.to_thread(encode, body.prompt)
        chat = ChatBody(model=body.model or "", messages=body.messages, tools=body.tools)
        request = await self._prompts.chat(
            chat, request_id="", add_generation_prompt=body.add_generation_prompt
        )
        return request.generation.prompt_ids

    async def strings(self, ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary writes each token."""
        return await asyncio.to_thread(self._prompts.tokenizer.token_strings, ids)

    async def decode(self, body: DetokenizeBody) -> str:
        """Return the text of ids.

        Raises:
            InvalidRequest: One is no token.
        """
        return await asyncio.to_thread(self._decode, body.tokens)

    def _decode(self, ids: Sequence[int]) -> str:
        self._prompts.check_ids(ids, "tokens")
        return self._prompts.tokenizer.decode_all(ids)
