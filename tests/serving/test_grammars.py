"""Forms of answers: taken whole or refused, whatever a client sends."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from serving import grammars
from workers.errors import InvalidRequest

TOKENIZER = Tokenizer.from_file("deploy/demo/models/target/tokenizer.json")
VOCAB = LLTokenizer(TOKENIZER.to_str(), eos_token=TOKENIZER.token_to_id("<|im_end|>"))


def _takes(grammar: str, text: str) -> bool:
    """Whether the text is a whole answer in the grammar."""
    matcher = LLMatcher(VOCAB, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(ids) == len(ids) and (
        matcher.consume_tokens(ids) and matcher.is_accepting()
    )


def test_json_object() -> None:
    grammar = grammars.json_object()
    nested = {"a": [1, {"b": None}], "c": "中"}
    written = [json.dumps(nested, indent=i, ensure_ascii=False) for i in (None, 4)]
    for good in ("{}", '{"a": 1}', *written):
        assert _takes(grammar, good)
    for bad in ("[]", "1", '"{}"', "{", '{"a": 1} x', "{'a': 1}"):
        assert not _takes(grammar, bad)


def test_blanks_come_to_an_end() -> None:
    """A model that does not know how to go on wrote blanks to the end of its budget."""
    for blanks in ("", " ", "\n", "\r\n", "\n\t\t", "\n" + " " * 20):
        assert _takes(grammars.json_object(), '{"a":' + blanks + "1}")
    for blanks in ("  ", "\n\n", "\n" + " " * 21):
        assert not _takes(grammars.json_object(), '{"a":' + blanks + "1}")


def test_forms() -> None:
    assert _takes(grammars.json_schema({"type": "integer"}, "p"), "12")
    assert not _takes(grammars.json_schema({"type": "integer"}, "p"), "1.5")
    assert _takes(grammars.regex("(ab)+", "p"), "abab")
    assert not _takes(grammars.regex("(ab)+", "p"), "xab")
    assert _takes(grammars.choice(["yes", 'a "b"'], "p"), 'a "b"')
    assert not _takes(grammars.choice(["yes", "no"], "p"), "maybe")
    for notation in ('start: "a" ("b" | "c")*', 'root ::= "a" ("b" | "c")*\n'):
        assert _takes(grammars.lark(notation, "p"), "abcb")
        assert not _takes(grammars.lark(notation, "p"), "ba")


_NESTED: Any = {"type": "object"}
for _ in range(300):
    _NESTED = {"type": "object", "properties": {"a": _NESTED}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {}},
        {"type": "string", "format": "nonsense"},
        {"type": "string", "pattern": "(?=a)b"},
        {"$ref": "https://example.com/x.json"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "#/nowhere"},
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"properties": {"a": False}, "required": ["a"], "type": "object"},
        {"oneOf": [{"type": "string"}, {"enum": ["a"]}]},
        {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True},
        {"description": "x" * 200_000},
        {"properties": []},
        {"type": 5},
        {"required": "a"},
        _NESTED,
    ],
)
def test_schemas_that_cannot_be_promised_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^p: cannot be enforced: \S") as refusal:
        grammars.json_schema(schema, "p")
    assert refusal.value.param == "p"
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (grammars.regex, "["),
        (grammars.regex, "(?<!a)b"),
        (grammars.regex, "(?=a)b"),
        (grammars.regex, r"(a)\1"),
        (grammars.regex, "a" * 200_000),
        (grammars.lark, "hello"),
        (grammars.lark, ""),
        (grammars.lark, "root ::= missing"),
        (grammars.lark, "start: @other"),
        (grammars.lark, "start: ("),
        (grammars.lark, '{"grammars": []}'),
        (grammars.lark, "(" * 5000),
        (grammars.lark, "root ::= " + "(" * 5000),
    ],
)
def test_patterns_that_are_none_are_refused(make: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^p: cannot be enforced: \S"):
        make(text, "p")


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.regex("(a{1,1000}){1,1000}", "p"),
        grammars.regex("((((a*)*)*)*)*b", "p"),
        grammars.regex("(a|aa)+" * 200, "p"),
        grammars.choice([f"option {i}" for i in range(4000)], "p"),
        grammars.json_schema({"type": "string", "minLength": 10**6, "maxLength": 10**7}, "p"),
        grammars.json_schema({"type": "array", "minItems": 10**5}, "p"),
        grammars.json_schema(
            {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}, "p"
        ),
    ],
)
def test_hostile_forms_end_in_a_mask_or_an_error(grammar: str) -> None:
    """The parser's own bounds hold; a test that hangs here is stopped by its time limit."""
    matcher = LLMatcher(VOCAB, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()


def test_the_library_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, serving.grammars; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
