"""What a chat's tools mean for its answer.

Owns which tools the model is shown, which it may call, and what holds it to that. Knows no
template and no format of calls. Invariant: a model whose template has no tools is given none in
silence: tools, and turns that speak of calls, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.errors import UnsupportedParameter
from serving.formats import NamedTool, Tool
from serving.messages import AssistantMessage, Message, ToolMessage
from serving.schema import ChatBody
from serving.tools.calls import ToolParser, ToolSpec
from serving.tools.formats import make_parser
from serving.tools.grammar import CallRules
from workers.errors import InvalidRequest

if TYPE_CHECKING:  # loads transformers, which only the ingress process needs
    from serving.tokenizer import ServingTokenizer


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request."""

    # All of them in OpenAI's shape, for the template.
    described: Sequence[dict[str, Any]]
    rules: CallRules

    def new_parser(self) -> ToolParser:
        """Return what finds the calls in one answer."""
        return make_parser(self.rules.tool_format, [tool for tool, _ in self.rules.tools])


def tool_use(body: ChatBody, tokenizer: ServingTokenizer) -> ToolUse | None:
    """Return what the body's tools mean; None where nothing can be called.

    Raises:
        UnsupportedParameter: The model knows no tools.
        InvalidRequest: The answer cannot be a call and what else is asked of it.
    """
    tool_format = tokenizer.tool_format
    if tool_format is None:
        _refuse_tools(body)
    if tool_format is None or not body.tools or body.tool_choice == "none":
        return None
    specs = [(_spec(tool), f"tools[{i}]") for i, tool in enumerate(body.tools)]
    only = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    rules = CallRules(
        tool_format=tool_format,
        tools=[(spec, place) for spec, place in specs if only in (None, spec.name)],
        is_forced=body.forces_call,
        # One that is named is called once, as by OpenAI's models.
        is_single=only is not None or body.parallel_tool_calls is False,
        tag_tokens=tokenizer.tag_tokens,
        free_tokens=tokenizer.free_tokens,
    )
    if rules.binds and body.has_form:  # the body itself has refused those that are forced
        param = "structured_outputs" if body.structured_outputs else "response_format"
        raise InvalidRequest(f"{param}: contradicts tools that are strict", param)
    return ToolUse([_described(tool) for tool in body.tools], rules)


def _refuse_tools(body: ChatBody) -> None:
    if body.tools:
        raise UnsupportedParameter("tools: this model's chat template takes none", "tools")
    place = _find_calls(body.messages)
    if place is not None:
        raise UnsupportedParameter(f"{place}: this model's chat template has no tools", place)


def _find_calls(messages: Sequence[Message]) -> str | None:
    for m, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            return f"messages[{m}]"
        if isinstance(message, AssistantMessage) and message.tool_calls:
            return f"messages[{m}].tool_calls"
    return None


def _spec(tool: Tool) -> ToolSpec:
    function = tool.function
    return ToolSpec(
        name=function.name,
        parameters=function.parameters or {},
        strict=bool(function.strict),
        description=function.description or "",
    )


def _described(tool: Tool) -> dict[str, Any]:
    # Whether its arguments are enforced is nothing that models were trained on.
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
