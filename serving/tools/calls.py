"""What a tool, a call and a parser of calls are.

Owns the values and the seam. Knows no format. Invariant: a call is reported once it is whole, so
what a parser says does not depend on how the text came in pieces; what turns out to be no call
comes out as the text it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call."""

    name: str
    # JSON schema of its arguments; empty = any object.
    parameters: dict[str, Any] = field(default_factory=dict)
    # Whether its arguments are held to the schema.
    strict: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call."""

    name: str
    # JSON text of an object.
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What some text turned out to be."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolParser(Protocol):
    """Finds the calls in one answer."""

    def push(self, text: str) -> Parsed:
        """Add text; return what is certain."""
        ...

    def flush(self) -> Parsed:
        """Return the rest, at the end of the text, whatever ended it."""
        ...


def as_call(value: Any, tools: Sequence[ToolSpec], arguments_key: str) -> ToolCall | None:
    """Return the call that a JSON value is; None if it is none of these tools."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get(arguments_key, {})
    if isinstance(arguments, str):  # quoted once more, as some models do
        arguments = loads(arguments)
    if not isinstance(arguments, dict) or all(tool.name != name for tool in tools):
        return None
    return ToolCall(str(name), dumps(arguments))


def loads(text: str) -> Any:
    """Return a JSON value; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def dumps(value: Any) -> str:
    """Return the JSON text of a value."""
    return json.dumps(value, ensure_ascii=False)
