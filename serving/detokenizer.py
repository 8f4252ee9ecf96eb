"""Turns a request's token ids into text, piece by piece.

Owns which part of the text is final. Knows no stop strings, no HTTP and no tokenizer beyond the
`Decoder` it is given. Invariants: text once returned is never taken back; a character whose
bytes are split over tokens appears when its last byte does, never as U+FFFD; the pieces joined
equal the decoding of all ids, without an unfinished character at the very end (all that is ever
held back, so there is nothing to flush); and each id is decoded with a few earlier ones only,
whatever the model emits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character lacks at least its last byte of four. Byte-level decoders show the bytes that are
# there as one U+FFFD; decoders of byte tokens show each as one, and so all bytes just before.
MAX_UNFINISHED = 3
# The unfinished U+FFFD stand for at most nine bytes, each a token at worst, and a window that
# begins inside a character shows up to three bytes of it as U+FFFD before it is in step.
MAX_PENDING = 12


class Decoder(Protocol):
    """Whatever turns ids into text, special tokens left out."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def has_text(self, token_id: int) -> bool:
        """Return whether `decode` looks at the token, rather than leave it out."""
        ...


class Detokenizer:
    """The text of one growing list of ids.

    Decoding everything at each step would be quadratic, decoding each token alone would lose
    what decoders do at borders. So a window is decoded: `ids[start:]`, where `start` lies one
    clean border before the newest clean border. A border is clean when the text up to it does
    not end in U+FFFD, that is, no character is cut there. Where no border is clean for long, the
    window begins at any: what it shows wrong at its beginning was returned already.

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
        # One by one, though the ids may come in larger steps: so no clean border is missed, and
        # the steps change nothing.
        return "".join(self._push(i) for i in ids if self._decoder.has_text(i))

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        num_pending = len(self._window) - self._num_context
        num_held = len(text) - len(text.rstrip(REPLACEMENT))
        if num_pending > MAX_UNFINISHED:  # then most of it is no text, and stays U+FFFD
            num_held = min(num_held, MAX_UNFINISHED)
        num_final = len(text) - num_held
        piece = text[self._num_returned : num_final]
        self._num_returned = max(self._num_returned, num_final)
        if not num_held:
            self._move_window()
        elif num_pending > MAX_PENDING:
            self._cut_window(num_held)
        return piece

    def _move_window(self) -> None:
        rest = self._window[self._num_context :]
        text = self._decoder.decode(rest)
        # A decoder that strips the first blank would strip one in the middle of the text if the
        # context were nothing but blank; then the context waits for more.
        if text:
            self._window = rest
            self._num_context = len(rest)
            self._num_returned = len(text)

    def _cut_window(self, num_held: int) -> None:
        self._window = self._window[-MAX_PENDING:]
        self._num_context = 0
        self._num_returned = len(self._decoder.decode(self._window)) - num_held
