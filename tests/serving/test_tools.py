"""Calls of tools: found however the text comes in pieces, and enforced where that was asked."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer

from serving.tools.calls import Parsed, ToolCall, ToolSpec
from serving.tools.formats import detect_format, make_parser
from serving.tools.grammar import CallRules
from workers.errors import InvalidRequest

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (ToolSpec("weather", SCHEMA), ToolSpec("now"))
FORMATS = ("hermes", "qwen_xml", "llama_json")


def _whole(tool_format: str, text: str, tools: tuple[ToolSpec, ...] = TOOLS) -> Parsed:
    return _pieces(tool_format, [text], tools)


def _pieces(tool_format: str, pieces: list[str], tools: tuple[ToolSpec, ...] = TOOLS) -> Parsed:
    parser = make_parser(tool_format, tools)
    parts = [*map(parser.push, pieces), parser.flush()]
    return Parsed(
        "".join(part.content for part in parts), tuple(c for part in parts for c in part.calls)
    )


def _hermes(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _xml(name: str, arguments: dict[str, Any]) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    elements = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>"


def _llama(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


WRITERS = {"hermes": _hermes, "qwen_xml": _xml, "llama_json": _llama}
ARGUMENTS: dict[str, Any] = {"city": "Zürich 中文 😀", "days": 3, "tags": [True]}


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_call(tool_format: str) -> None:
    parsed = _whole(tool_format, WRITERS[tool_format]("weather", ARGUMENTS))
    (call,) = parsed.calls
    assert (parsed.content, call.name, json.loads(call.arguments)) == ("", "weather", ARGUMENTS)
    assert "中文" in call.arguments


@pytest.mark.parametrize("tool_format", ["hermes", "qwen_xml"])
def test_text_around_calls(tool_format: str) -> None:
    first, second = (WRITERS[tool_format]("weather", {"city": c, "days": 1}) for c in "ab")
    parsed = _whole(tool_format, f"Let me see.\n\n{first}\n{second}\n\nDone < that")
    assert parsed.content == "Let me see.Done < that"
    assert [json.loads(call.arguments)["city"] for call in parsed.calls] == ["a", "b"]


def test_several_llama_calls() -> None:
    text = f"<|python_tag|>{_llama('weather', ARGUMENTS)}; {_llama('now', {})}"
    assert [call.name for call in _whole("llama_json", text).calls] == ["weather", "now"]


@pytest.mark.parametrize(
    ("tool_format", "value"),
    [
        ("hermes", 'a "quoted" </tool_call> and <tool_call>{"name": 1} \\ end'),
        ("qwen_xml", "a </tool_call> and <tool_call> {} end"),
        ("llama_json", 'a "} ; {" \\" }} end'),
    ],
)
def test_b31_tags_inside_an_argument_are_text(tool_format: str, value: str) -> None:
    text = WRITERS[tool_format]("weather", {"city": value, "days": 2}) + " "
    for size in (1, 3, 1000):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        (call,) = _pieces(tool_format, pieces).calls
        assert json.loads(call.arguments)["city"] == value


@pytest.mark.parametrize("tool_format", FORMATS)
def test_c6_what_is_cut_off_is_no_call(tool_format: str) -> None:
    """C6: a call cut by max_tokens was reported with broken JSON; here it stays text."""
    text = WRITERS[tool_format]("weather", ARGUMENTS)
    for end in range(1, len(text) - 1):
        assert _whole(tool_format, text[:end]) == Parsed(text[:end])


@pytest.mark.parametrize(
    "text",
    [
        _hermes("unknown", {}),
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "broken}\n</tool_call>',
        "<tool_call>[]</tool_call>",
    ],
)
def test_what_is_no_call_stays_text_and_hides_nothing(text: str) -> None:
    good = _hermes("now", {})
    assert _whole("hermes", f"a {text} b {good}") == Parsed(f"a {text} b", (ToolCall("now", "{}"),))


def test_xml_values_have_their_schemas_types() -> None:
    values = {"city": "12", "days": "12", "unit": "C", "tags": "[true]", "other": "x y"}
    (call,) = _whole("qwen_xml", _xml("weather", values)).calls
    assert json.loads(call.arguments) == {
        "city": "12", "days": 12, "unit": "C", "tags": [True], "other": "x y",
    }  # fmt: skip


_fragments = st.one_of(
    st.text("<>/tool_cal{}\"\\ \n,:;中😀é", max_size=12),
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=a>",
         "</parameter>", "<|python_tag|>", '"', "\\", "{", "}", "\n"]
    ),
    st.builds(
        lambda f, name, args: WRITERS[f](name, args),
        st.sampled_from(FORMATS),
        st.sampled_from(["weather", "now", "unknown"]),
        st.dictionaries(st.sampled_from(["city", "days", "x"]), st.text(max_size=8), max_size=3),
    ),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    tool_format=st.sampled_from(FORMATS),
    fragments=st.lists(_fragments, max_size=7),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_b31_every_chunking_gives_the_same(
    tool_format: str, fragments: list[str], cuts: list[int]
) -> None:
    """B31: parsers assumed one token a delta, and lost names, arguments or the last tokens."""
    text = "".join(fragments)
    expected = _whole(tool_format, text)
    assert _pieces(tool_format, list(text)) == expected
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    assert _pieces(tool_format, pieces) == expected
    if not expected.calls:
        assert expected.content == text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>", "hermes"),
        ("{% if tools %}<tool_call>\n<function=x>", "qwen_xml"),
        ('{% if tools %}{"name": function name, "parameters": dict}', "llama_json"),
        ("{% if tools %}something else", None),
    ],
)
def test_formats_are_told_from_templates(template: str, expected: str | None) -> None:
    assert detect_format(template) == expected


PATH = "deploy/demo/models/target/tokenizer.json"


def _tokenizer(special: bool | None = None) -> Tokenizer:
    """Return the demo's; with tags of calls among its tokens, special ones or not."""
    tokenizer = Tokenizer.from_file(PATH)
    if special is not None:
        tags = [AddedToken(t, special=special) for t in ("<tool_call>", "</tool_call>")]
        tokenizer.add_tokens(tags) if not special else tokenizer.add_special_tokens(tags)
    return tokenizer


def _walk(grammar: str, tokenizer: Tokenizer, rng: random.Random, hint: str = "") -> str | None:
    """Return random text of a grammar; None if it does not come to an end.

    Args:
        grammar: What the text must match.
        tokenizer: Whose tokens are drawn.
        rng: Draws.
        hint: Text to begin with.
    """
    eos = tokenizer.token_to_id("<|im_end|>")
    vocab = LLTokenizer(tokenizer.to_str(), eos_token=eos)
    matcher = LLMatcher(vocab, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(hint, add_special_tokens=False).ids
    assert matcher.consume_tokens(ids), hint
    mask = allocate_token_bitmask(1, vocab.vocab_size)
    for _ in range(600):
        fill_next_token_bitmask(matcher, mask, 0)
        assert not matcher.is_error(), matcher.get_error()
        allowed = [i for i in range(vocab.vocab_size) if mask[0, i // 32] >> i % 32 & 1]
        # Short texts: an end, and what ends strings and lists, is drawn more often.
        likely = [i for i in allowed if i == eos or (tokenizer.id_to_token(i) or "x")[0] in '"]}<']
        token = rng.choice(likely if likely and rng.random() < 0.4 else allowed)
        if token == eos:
            return tokenizer.decode(ids, skip_special_tokens=False)
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def _short_tools(tool_format: str) -> tuple[ToolSpec, ...]:
    """Return tools whose calls a random walk brings to an end: an element's free text does not."""
    if tool_format != "qwen_xml":
        return TOOLS
    properties = SCHEMA["properties"] | {"city": {"enum": ["Oslo", "Zürich"]}}
    return (ToolSpec("weather", SCHEMA | {"properties": properties}), ToolSpec("now"))


def test_the_text_of_an_element_is_free() -> None:
    """It ends at its own end, whatever it holds before that."""
    rules = CallRules("qwen_xml", [(TOOLS[0], "tools[0]")], is_forced=True, is_single=True)
    for city in ("Oslo", "a\n</tool_call>\n<parameter=days>", "中文 😀\n\n", ""):
        text = _xml("weather", {"city": city, "days": 4})
        tokenizer = _tokenizer()
        vocab = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<|im_end|>"))
        matcher = LLMatcher(vocab, rules.grammar(), log_level=0)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert matcher.consume_tokens(ids), text
        assert matcher.is_accepting()
        if "<parameter" not in city:  # the parser counts these
            (call,) = _check(text, "qwen_xml", TOOLS).calls
            assert json.loads(call.arguments)["city"] == city


def _check(text: str, tool_format: str, tools: tuple[ToolSpec, ...]) -> Parsed:
    parsed = _whole(tool_format, text, tools)
    schemas = {tool.name: tool.parameters for tool in tools}
    for call in parsed.calls:
        if schemas[call.name]:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return parsed


@pytest.mark.parametrize("special", [None, False, True], ids=["text", "token", "special token"])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_forced_calls_are_found_and_fit_their_schema(
    tool_format: str, special: bool | None
) -> None:
    tokenizer, rng = _tokenizer(special), random.Random(7)
    tags = ("<tool_call>", "</tool_call>") if special is not None else ()
    tools = _short_tools(tool_format)
    placed = [(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    rules = CallRules(tool_format, placed, is_forced=True, is_single=False, tag_tokens=tags)
    found = set()
    for _ in range(25):
        text = _walk(rules.grammar(), tokenizer, rng)
        if text is None:
            continue
        parsed = _check(text, tool_format, tools)
        assert parsed.calls, text
        assert parsed.content == ""
        found.add(len(parsed.calls))
    assert found
    one = CallRules(tool_format, placed[:1], is_forced=True, is_single=True, tag_tokens=tags)
    text = next(t for _ in range(20) if (t := _walk(one.grammar(), tokenizer, rng)))
    assert [call.name for call in _check(text, tool_format, tools).calls] == ["weather"]


@pytest.mark.parametrize("special", [None, False], ids=["text", "token"])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_b18_a_strict_tool_binds_from_the_exact_token(
    tool_format: str, special: bool | None
) -> None:
    """B18: text is free; what follows the beginning of a call is held to the schema."""
    tokenizer, rng = _tokenizer(special), random.Random(5)
    weather, now = _short_tools(tool_format)
    tools = (replace(weather, strict=True), now)
    placed = [(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    tags = ("<tool_call>", "</tool_call>") if special is not None else ()
    rules = CallRules(tool_format, placed, is_forced=False, is_single=False, tag_tokens=tags)
    assert rules.binds
    tag = "{" if tool_format == "llama_json" else "<tool_call>"
    hints = ["", "Let me see: 1 < 2", tag, *([] if tag == "{" else [f"One moment.\n{tag}"])]
    num_calls = 0
    for hint in hints * 6:
        text = _walk(rules.grammar(), tokenizer, rng, hint)
        if text is None:
            continue
        parsed = _check(text, tool_format, tools)
        num_calls += len(parsed.calls)
        if hint.endswith(tag):
            assert parsed.calls, text
    assert num_calls > 3


def test_what_cannot_be_promised_is_refused_for_strict_tools_only() -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    sized = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    for tool_format, schema, param in (
        ("hermes", unique, "tools[0].function.parameters"),
        ("qwen_xml", sized, "tools[0].function.parameters.properties.a"),
        ("hermes", {"type": "object", "x-guidance": {}}, "tools[0].function.parameters"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            CallRules(
                tool_format, [(ToolSpec("f", schema, strict=True), "tools[0]")], True, True
            ).grammar()
        assert refusal.value.param == param
    for schema in (unique, sized):
        lenient = CallRules("qwen_xml", [(ToolSpec("f", schema), "tools[0]")], True, True)
        assert lenient.grammar()
    assert not CallRules("hermes", [(ToolSpec("f", sized), "tools[0]")], False, True).binds
