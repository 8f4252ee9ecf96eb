"""Calls between tags, with text around them.

Owns the search for tags in text that comes in pieces. Knows no format of what stands between them:
subclasses do. Invariants: of text outside calls, only what may be the beginning of a tag is held
back, with the blanks before it; blanks next to a call belong to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from serving.tools.calls import Parsed, ToolCall

START, END = "<tool_call>", "</tool_call>"


class TaggedParser(ABC):
    """Finds `<tool_call>...</tool_call>`."""

    def __init__(self) -> None:
        # Not yet decided: text that may begin a call, or a call up to here.
        self._held = ""
        self._is_inside = False
        # Whether what was last decided is a call, so that blanks after it are dropped.
        self._is_after_call = False

    @abstractmethod
    def _find_end(self, text: str) -> int | None:
        """Return where the end tag of a call begins in `text`, which follows its start tag."""

    @abstractmethod
    def _call(self, text: str) -> ToolCall | None:
        """Return the call that stands between tags; None if it is none."""

    def push(self, text: str) -> Parsed:
        """See `ToolParser`."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while self._advance(content, calls):
            pass
        return Parsed("".join(content), tuple(calls))

    def flush(self) -> Parsed:
        """See `ToolParser`."""
        rest, self._held = self._held, ""
        if not self._is_inside and self._is_after_call and not rest.strip():
            rest = ""
        return Parsed(rest)

    def _advance(self, content: list[str], calls: list[ToolCall]) -> bool:
        """Decide about the next stretch; return whether there may be another."""
        if self._is_inside:
            return self._end_call(content, calls)
        begin = self._held.find(START)
        if begin < 0:
            keep = _partial_len(self._held)
            self._say(self._held[: len(self._held) - keep], content)
            self._held = self._held[len(self._held) - keep :]
            return False
        # With the blanks before the tag, in case that it is no call.
        text_end = len(self._held[:begin].rstrip())
        self._say(self._held[:text_end], content)
        self._held = self._held[text_end:]
        self._is_inside = True
        return True

    def _end_call(self, content: list[str], calls: list[ToolCall]) -> bool:
        first = self._held.index(START) + len(START)
        length = self._find_end(self._held[first:])
        if length is None:
            return False
        last = first + length
        call = self._call(self._held[first:last])
        if call is None:
            self._is_inside = False
            self._say(self._held[: last + len(END)], content)
        else:
            calls.append(call)
            self._is_after_call = True
        self._held = self._held[last + len(END) :]
        self._is_inside = False
        return True

    def _say(self, text: str, content: list[str]) -> None:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            content.append(text)
            self._is_after_call = False


def _partial_len(text: str) -> int:
    """Return the length of the longest tail that may begin a tag, blanks before it included."""
    size = min(len(text), len(START) - 1)
    while size and not START.startswith(text[len(text) - size :]):
        size -= 1
    return len(text) - len(text[: len(text) - size].rstrip())
