"""Turns a request's token ids into text, piece by piece.

Owns which part of the text is final. Knows no stop strings, no HTTP and no tokenizer beyond the
`Decoder` it is given. Invariants: text once returned is never taken back; a character whose
bytes are split over tokens appears when its last byte does, never as U+FFFD; and the pieces joined
equal the decoding of all ids, without an unfinished character at the very end (all that is ever
held back, so there is nothing to flush).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """Whatever turns ids into text, special tokens left out."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        ...


class Detokenizer:
    """The text of one growing list of ids.

    Decoding everything at each step would be quadratic, decoding each token alone would lose
    what decoders do at borders. So a window is decoded: `ids[start:]`, where `start` lies one
    clean border before the newest clean border. A border is clean when the text up to it does
    not end in U+FFFD, that is, no character is cut there.

        ids:   [ forgotten | context   | new ids ... ]
                           ^ 0         ^ _num_context    (indices into `_window`)
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._num_context = 0
        # Characters of the window's text that were returned already.
        self._num_returned = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that became final."""
        if not ids:
            return ""
        self._window.extend(ids)
        text = self._decoder.decode(self._window)
        final = text.rstrip(REPLACEMENT)
        piece = final[self._num_returned :]
        self._num_returned = max(self._num_returned, len(final))
        if len(final) == len(text):
            self._move_window()
        return piece

    def _move_window(self) -> None:
        rest = self._window[self._num_context :]
        text = self._decoder.decode(rest)
        # A context of skipped tokens only would decode to nothing, and a decoder that strips the
        # first blank would then strip one in the middle of the text.
        if text:
            self._window = rest
            self._num_returned = len(text)
        self._num_context = len(self._window)
