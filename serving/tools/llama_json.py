"""Calls as Llama 3 writes them: an answer that is nothing but JSON objects.

Owns where an object ends. Invariant: an answer that does not begin with an object is text from its
first character on; an object that is no call is text, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.tools.calls import Parsed, ToolCall, ToolSpec, as_call, loads

PYTHON_TAG = "<|python_tag|>"
# Between two calls.
_SEPARATORS = " \t\r\n;"


class LlamaJsonParser:
    """`{"name": ..., "parameters": {...}}; {...}`."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._tools = tools
        self._held = ""
        self._is_text = False
        # Then separators are no text.
        self._is_after_call = False

    def push(self, text: str) -> Parsed:
        """See `ToolParser`."""
        if self._is_text:
            return Parsed(text)
        self._held += text
        calls: list[ToolCall] = []
        while True:
            begin = self._begin()
            if self._is_text:
                return Parsed(self._take(), tuple(calls))
            end = None if begin is None else _object_end(self._held, begin)
            if end is None:
                return Parsed("", tuple(calls))
            call = as_call(loads(self._held[begin:end]), self._tools, "parameters")
            if call is None:
                self._is_text = True
                continue
            calls.append(call)
            self._is_after_call = True
            self._held = self._held[end:]

    def flush(self) -> Parsed:
        """See `ToolParser`."""
        return Parsed(self._take())

    def _take(self) -> str:
        """Return what was held back, as text."""
        rest, self._held = self._held, ""
        return rest.lstrip(_SEPARATORS) if self._is_after_call else rest

    def _begin(self) -> int | None:
        """Return where an object begins; None if that is not known, or there is none."""
        text = self._held.lstrip(_SEPARATORS)
        skipped = len(self._held) - len(text)
        if text.startswith(PYTHON_TAG):
            rest = text[len(PYTHON_TAG) :].lstrip()
            skipped, text = len(self._held) - len(rest), rest
        if text.startswith("{"):
            return skipped
        self._is_text = bool(text) and not PYTHON_TAG.startswith(text)
        return None


def _object_end(text: str, begin: int) -> int | None:
    """Return the index after the brace that closes the one at `begin`; None if it is not there."""
    depth = 0
    is_inside = is_escaped = False
    for place in range(begin, len(text)):
        char = text[place]
        if is_escaped:
            is_escaped = False
        elif is_inside:
            is_escaped = char == "\\"
            is_inside = char != '"'
        elif char == '"':
            is_inside = True
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return place + 1
    return None
