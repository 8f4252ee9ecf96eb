"""Messages as chat templates know them.

Owns the translation of roles, parts and calls. Knows no template and no pixels. Invariant: what a
client said is passed on whole; a call's arguments are an object, as templates expect, since
written as a text they would be quoted once more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from serving.fields import Text
from serving.messages import (
    AssistantMessage,
    Call,
    ImagePart,
    Message,
    Part,
    TextPart,
    ToolMessage,
)
from workers.errors import InvalidRequest


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return what the template gets."""
    return [_template_message(message, f"messages[{m}]") for m, message in enumerate(messages)]


def _template_message(message: Message, place: str) -> dict[str, Any]:
    # Templates know the older name of the role only.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _template_content(message.content)}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        turn["tool_calls"] = [
            _template_call(call, f"{place}.tool_calls[{c}].function.arguments")
            for c, call in enumerate(message.tool_calls)
        ]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            turn["name"] = message.name
    return turn


def _template_content(content: Text | Sequence[Part] | None) -> str | list[dict[str, Any]]:
    if content is None:  # beside calls
        return ""
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        # Text models' templates concatenate the content, so it must be a string.
        return "".join(texts)
    return [_template_part(part) for part in content]


def _template_part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}


def _template_call(call: Call, param: str) -> dict[str, Any]:
    try:
        # Clients write a call without arguments as an empty text.
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param}: not a JSON object", param)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
