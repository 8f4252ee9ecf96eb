"""Which format a model's calls have, told from its chat template.

Owns the formats there are. Knows no text of answers. Invariant: a model whose template shows no
known format is told to have none, so that its tools are refused and not misread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serving.tools.calls import ToolParser, ToolSpec
from serving.tools.hermes import HermesParser
from serving.tools.llama_json import LlamaJsonParser
from serving.tools.qwen_xml import QwenXmlParser

PARSERS: dict[str, Callable[[Sequence[ToolSpec]], ToolParser]] = {
    "hermes": HermesParser,
    "qwen_xml": QwenXmlParser,
    "llama_json": LlamaJsonParser,
}


def detect_format(template: str) -> str | None:
    """Return the format that a chat template teaches; None if there is none that is known."""
    if "tools" not in template:
        return None
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    if '"parameters":' in template or "<|python_tag|>" in template:
        return "llama_json"
    return None


def make_parser(tool_format: str, tools: Sequence[ToolSpec]) -> ToolParser:
    """Return a parser for one answer."""
    return PARSERS[tool_format](tools)
