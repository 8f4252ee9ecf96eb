"""Grammars that hold a model to calling tools as it was told.

Owns how each format is written as a grammar. Knows no tokens, but for the names of those that are
added and look like tags. Invariant: what such a grammar accepts, the format's parser finds, and
its arguments fit the tool's schema; a strict tool's schema that cannot be enforced is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from serving.grammars import JSON_OPTIONS, MAX_GRAMMAR, OPTIONS_KEY, check_options, problem_of
from serving.tools.calls import ToolSpec
from serving.tools.qwen_xml import is_text
from serving.tools.tagged import END, START
from workers.errors import InvalidRequest

# What a schema may say of a text whose element has no quotes to end it.
_TEXT_KEYS = {"type", "enum", "description", "title", "default", "examples"}


@dataclass(frozen=True, slots=True)
class CallRules:
    """How the calls of one answer may look."""

    # The format's name.
    tool_format: str
    # Those that may be called, each with where it stands in the body.
    tools: Sequence[tuple[ToolSpec, str]]
    # Whether there must be a call; else text, and calls that fit.
    is_forced: bool
    # Whether there may be only one.
    is_single: bool
    # Tags that are tokens of their own: to the grammar, these are no text.
    tag_tokens: Collection[str] = ()
    # Other tokens of that kind that an answer may hold, such as the brackets of its thoughts.
    free_tokens: Sequence[str] = ()

    @property
    def binds(self) -> bool:
        """Whether anything is enforced."""
        return self.is_forced or any(tool.strict for tool, _ in self.tools)

    def grammar(self) -> str:
        """Return them as a grammar.

        Raises:
            InvalidRequest: A strict tool's schema cannot be enforced, or all are too large.
        """
        bodies = [f"body_{i}" for i in range(len(self.tools))]
        lines = ["%llguidance {}", *self._start(), f"body: {' | '.join(bodies)}"]
        for i, (tool, place) in enumerate(self.tools):
            lines += self._body(f"body_{i}", tool, f"{place}.function.parameters")
        grammar = "\n".join([*lines, ""])
        if len(grammar) > MAX_GRAMMAR:
            raise InvalidRequest(
                f"tools: {len(grammar)} characters as a grammar; at most {MAX_GRAMMAR} are"
                " accepted",
                "tools",
            )
        return grammar

    def _start(self) -> list[str]:
        if self.tool_format == "llama_json":  # a call is the whole answer
            if self.is_forced:
                return ["start: body"]
            return ["start: body | FIRST text |", "FIRST: /[^{]/", *self._text()]
        if self.is_forced:
            more = "" if self.is_single else ' ("\\n" call)*'
            return [f"start: call{more}", f"call: {self._tag(START)} body"]
        if START in self.tag_tokens:
            return [f"start: (text {START} body)* text", *self._text()]
        # Lazy: the text before a call ends at the first tag.
        before = f"before[lazy]: TEXT {_quoted(START)}"
        return ["start: (text before body)* text", before, *self._text()]

    def _text(self) -> list[str]:
        kinds = ["TEXT", *(token for token in self.free_tokens if token not in (START, END))]
        return [f"text: ({' | '.join(kinds)})*", r"TEXT: /(.|\n)*/"]

    def _body(self, name: str, tool: ToolSpec, param: str) -> list[str]:
        """Return the rules of one tool's call, behind the start tag."""
        schema = _enforceable(tool, param)
        if self.tool_format == "qwen_xml":
            return self._elements(name, tool, schema, param)
        key = "arguments" if self.tool_format == "hermes" else "parameters"
        head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        if self.tool_format == "llama_json":
            return [f"{name}: {_quoted(head)} {name}_arguments {_quoted('}')}",
                    f"{name}_arguments: {_json(schema)}"]  # fmt: skip
        tail = f"{_quoted('}' + chr(10))} {self._tag(END)}"
        return [
            f"{name}: {_quoted(chr(10) + head)} {name}_arguments {tail}",
            f"{name}_arguments: {_json(schema)}",
        ]

    def _elements(self, name: str, tool: ToolSpec, schema: Any, param: str) -> list[str]:
        rules, parts = [], []
        for j, (key, value) in enumerate(schema.get("properties", {}).items()):
            part = f"{name}_{j}"
            rules += _element(part, key, value, tool.strict, f"{param}.properties.{key}")
            parts.append(part if key in schema.get("required", ()) else f"{part}?")
        head, tail = _quoted(f"\n<function={tool.name}>\n"), _quoted("</function>\n")
        return [f"{name}: {head} {' '.join(parts)} {tail} {self._tag(END)}", *rules]

    def _tag(self, tag: str) -> str:
        return tag if tag in self.tag_tokens else _quoted(tag)


def _enforceable(tool: ToolSpec, param: str) -> dict[str, Any]:
    """Return the schema that the arguments are held to."""
    schema = tool.parameters or {"type": "object"}
    check_options(schema, param)
    problem = problem_of(schema)
    if problem is None:
        return schema
    if tool.strict:
        reason = problem.partition("\n")[0]
        raise InvalidRequest(f"{param}: cannot be enforced: {reason}", param)
    return {"type": "object"}


def _element(name: str, key: str, schema: Any, is_strict: bool, param: str) -> list[str]:
    """Return the rules of one argument's element."""
    head, tail = _quoted(f"<parameter={key}>\n"), "\n</parameter>\n"
    if not is_text(schema):
        value = _json(schema if isinstance(schema, dict) else {})
        return [f"{name}: {head} {name}_value {_quoted(tail)}", f"{name}_value: {value}"]
    if "enum" in schema:
        texts = " | ".join(_quoted(text) for text in schema["enum"])
        return [f"{name}: {head} ({texts}) {_quoted(tail)}"]
    if is_strict and not schema.keys() <= _TEXT_KEYS:
        bad = ", ".join(sorted(schema.keys() - _TEXT_KEYS))
        raise InvalidRequest(f"{param}: cannot be enforced in this model's calls: {bad}", param)
    # Lazy: the text ends at the first end of an element.
    return [f"{name}: {head} {name}_value", f"{name}_value[lazy]: /(.|\\n)*/ {_quoted(tail)}"]


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(schema | {OPTIONS_KEY: JSON_OPTIONS})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
