"""The bytes behind a token, which its text alone does not show.

Owns how vocabularies write bytes: GPT-2's alphabet, byte tokens, and SentencePiece's mark for a
blank. Knows no text stream: a token that holds half a character has bytes, and no text yet.
Invariant: the bytes of a text's tokens put together are the text's bytes, but for blanks that a
decoder strips at its beginning.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from tokenizers import Tokenizer

# SentencePiece's sign for a blank.
_BLANK = "▁"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Bytes that GPT-2's alphabet writes as the character of the same number.
_PRINTABLE = (range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), 256))


class TokenBytes:
    """The bytes of one vocabulary's tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        # Written as they are, whatever the decoder does with others.
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._is_byte_level = "ByteLevel" in _decoder_types(backend)

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id beyond the vocabulary."""
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level(token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match.group(1))
        return token.replace(_BLANK, " ").encode()


def _byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: a visible character for each byte."""
    alphabet = {chr(byte): byte for numbers in _PRINTABLE for byte in numbers}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoder_types(backend: Tokenizer) -> set[str]:
    decoder: Any = backend.decoder
    if decoder is None:
        return set()
    found, rest = set(), [json.loads(decoder.__getstate__())]
    while rest:  # sequences may hold sequences
        step = rest.pop()
        found.add(step["type"])
        rest += step.get("decoders", [])
    return found
