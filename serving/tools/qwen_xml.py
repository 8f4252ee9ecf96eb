"""Calls as Qwen3-Coder and Qwen3.5 write them: one element for each argument.

Owns the way from text between elements to typed arguments. Knows no stream. Invariant: an argument
that its schema calls a string is the text as it stands; others are JSON where they can be read as
such.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from serving.tools.calls import ToolCall, ToolSpec, dumps, loads
from serving.tools.tagged import END, TaggedParser

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class QwenXmlParser(TaggedParser):
    """`<tool_call><function=...><parameter=...>...`."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self._tools = tools

    def _find_end(self, text: str) -> int | None:
        end = text.find(END)
        while end >= 0:
            before = text[:end]
            # Inside an argument the tag is text.
            if before.count("<parameter=") <= before.count("</parameter>"):
                return end
            end = text.find(END, end + 1)
        return None

    def _call(self, text: str) -> ToolCall | None:
        match = _FUNCTION.fullmatch(text)
        if match is None:
            return None
        tool = next((tool for tool in self._tools if tool.name == match[1].strip()), None)
        if tool is None:
            return None
        arguments: dict[str, Any] = {}
        end = 0
        for parameter in _PARAMETER.finditer(match[2]):
            if match[2][end : parameter.start()].strip():
                return None
            key = parameter[1].strip()
            arguments[key] = _typed(parameter[2], tool.parameters.get("properties", {}).get(key))
            end = parameter.end()
        return None if match[2][end:].strip() else ToolCall(tool.name, dumps(arguments))


def is_text(schema: Any) -> bool:
    """Whether a property's values are written as they stand."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind is None and isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    return kind == "string"


def _typed(text: str, schema: Any) -> Any:
    if is_text(schema):
        return text
    value = loads(text)
    return text if value is None and text.strip() != "null" else value
