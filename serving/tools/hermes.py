"""Calls as Hermes, Qwen2.5 and Qwen3 write them: a JSON object between tags.

Owns where such an object ends. Knows no stream. Invariant: an end tag inside a JSON string does not
end a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.tools.calls import ToolCall, ToolSpec, as_call, loads
from serving.tools.tagged import END, TaggedParser


class HermesParser(TaggedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self._tools = tools

    def _find_end(self, text: str) -> int | None:
        end = text.find(END)
        while end >= 0:
            if not ends_in_string(text[:end]):
                return end
            end = text.find(END, end + 1)
        return None

    def _call(self, text: str) -> ToolCall | None:
        return as_call(loads(text), self._tools, "arguments")


def ends_in_string(text: str) -> bool:
    """Whether JSON text breaks off inside a string; a raw line break ends a string, too."""
    is_inside = is_escaped = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif is_inside and char == "\\":
            is_escaped = True
        elif char == '"' or (is_inside and char == "\n"):
            is_inside = not is_inside
    return is_inside
