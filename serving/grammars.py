"""From what a client wants an answer to look like to a grammar, checked.

Owns the forms there are and what is refused of them; the grammars are llguidance's, as text, which
a worker compiles against its tokens. Knows no tokens and no HTTP. Invariant: a form that cannot be
promised whole is refused with the client's own parameter, never loosened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, grammar_from

from workers.errors import InvalidRequest

# Of a grammar as it is sent to a worker, which compiles it.
MAX_GRAMMAR = 2**17
# What printers of JSON put between its parts: a line break and its indentation, or one blank.
# Without a bound, a model that does not know how to go on writes blanks to the end of its budget:
# they are always legal.
WHITESPACE = r"(\x0D?\x0A[\x20\x09]{0,20}|\x20)?"
# Options of the library that a schema of ours carries; a client's may carry none.
OPTIONS_KEY = "x-guidance"
JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return _json_grammar({"type": "object"})


def json_schema(schema: dict[str, Any], param: str) -> str:
    """Return the grammar of the JSON that a schema accepts.

    Raises:
        InvalidRequest: It is no schema, or says something that cannot be enforced.
    """
    check_options(schema, param)
    return _checked(_json_grammar(schema), param)


def regex(pattern: str, param: str) -> str:
    """Return the grammar of what a regular expression matches as a whole.

    Raises:
        InvalidRequest: It is none, or looks around, which no grammar can.
    """
    return _checked(LLMatcher.grammar_from_regex(pattern), param)


def choice(texts: Sequence[str], param: str) -> str:
    """Return the grammar of one of some texts.

    Raises:
        InvalidRequest: They are too many or too long.
    """
    return _checked(grammar_from("choice", json.dumps(list(texts))), param)


def lark(text: str, param: str) -> str:
    """Return a grammar that is written in Lark's notation, or in GBNF.

    Raises:
        InvalidRequest: It is neither.
    """
    try:
        grammar = grammar_from("grammar", text)
    except ValueError as error:
        raise _refusal(str(error), param) from error
    return _checked(grammar, param)


def check_options(schema: dict[str, Any], param: str) -> None:
    """Refuse options of the library inside a client's schema: they loosen it."""
    if OPTIONS_KEY in schema:
        raise _refusal(f"{OPTIONS_KEY} is not accepted", param)


def problem_of(schema: dict[str, Any]) -> str | None:
    """Return why a schema cannot be enforced; None if it can."""
    return _problem(_json_grammar(schema))


def _json_grammar(schema: dict[str, Any]) -> str:
    grammar: str = LLMatcher.grammar_from_json_schema(schema, None, JSON_OPTIONS)
    return grammar


def _checked(grammar: str, param: str) -> str:
    problem = _problem(grammar)
    if problem is not None:
        raise _refusal(problem, param)
    return grammar


def _problem(grammar: str) -> str | None:
    if len(grammar) > MAX_GRAMMAR:
        return f"it has {len(grammar)} characters as a grammar; at most {MAX_GRAMMAR} are accepted"
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if is_wrong else None


def _refusal(reason: str, param: str) -> InvalidRequest:
    # The library's messages go on with the place in its own notation.
    line = reason.strip().partition("\n")[0]
    return InvalidRequest(f"{param}: cannot be enforced: {line}", param)
