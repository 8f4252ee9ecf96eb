"""Tools: what the model is shown, what of its answer is a call, and what is refused (C6, B31)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serving.answers import CHAT, ask, chat_body, comparable, joined, post, stream
from tests.serving.doubles import FaithfulWorkers, encode, make_app, make_tool_tokenizer
from workers.contracts import GenerationRequest

PARAMETERS = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "中"]}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "erase", "description": "Clean up."}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
SAID = (
    'Now:\n<tool_call>\n{"name": "paint", "arguments": {"color": "中"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "erase", "arguments": {}}\n</tool_call>'
)
FIRST, SECOND = ("paint", {"color": "中"}), ("erase", {})


def saying(text: str = SAID, size: int = 3, *, ends: bool = True) -> FaithfulWorkers:
    return FaithfulWorkers([], ids=encode(text + "<|im_end|>" * ends), size=size)


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls") or []
    assert all(call.keys() == {"id", "type", "function"} for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [call["function"] for call in calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls", []):
            assert call.pop("id").startswith("call_")
    return answer


async def request_of(body: dict[str, Any]) -> tuple[GenerationRequest, str]:
    """Return what the workers get, and its prompt as text."""
    workers = saying("fine")
    await ask(workers, body)
    (request,) = workers.requests
    return request, make_tool_tokenizer().decode_all(request.prompt_ids)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_b31_calls(size: int) -> None:
    """B31: several tokens a step lost names and arguments."""
    body = chat_body(tools=[TOOL, OTHER], n=2, logprobs=True, return_token_ids=True)
    workers = saying(size=size)
    answer = await ask(workers, body)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Now:"
        assert calls_of(choice) == [FIRST, SECOND]
        # What was a call counts like what was text.
        assert choice["token_ids"] == list(workers.ids)
        assert len(choice["logprobs"]["content"]) == len(workers.ids)
    ids = {call["id"] for c in answer["choices"] for call in c["message"]["tool_calls"]}
    assert len(ids) == 4
    streamed = joined(await stream(saying(size=size), body))
    assert without_ids(streamed) == without_ids(comparable(answer))


async def test_nothing_beside_calls_is_null() -> None:
    (choice,) = (await ask(saying(SAID.removeprefix("Now:\n")), chat_body(tools=[TOOL, OTHER])))[
        "choices"
    ]
    assert choice["message"]["content"] is None
    (choice,) = (await ask(saying(""), chat_body(tools=[TOOL])))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("num_calls", [0, 1])
async def test_c6_a_call_that_is_cut_off_is_text(size: int, num_calls: int) -> None:
    """C6: it was reported as a call with broken JSON."""
    whole = SAID[: SAID.index("<tool_call>\n", 20)] if num_calls else ""
    rest = '<tool_call>\n{"name": "paint", "argum'
    body = chat_body(tools=[TOOL], max_tokens=len(encode(whole + rest)))
    answer = await ask(saying(whole + rest + "ents", size), body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(calls_of(choice)) == num_calls
    assert choice["message"]["content"].endswith(rest)
    streamed = joined(await stream(saying(whole + rest + "ents", size), body))
    assert without_ids(streamed) == without_ids(comparable(answer))


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_one_call_at_most(size: int) -> None:
    """The answer ends with it, for the engine and in the usage too."""
    tokenizer = make_tool_tokenizer()
    workers = saying(size=size)
    until = next(
        n for n in range(len(workers.ids)) if "</tool_call>" in tokenizer.decode(workers.ids[:n])
    )
    body = chat_body(tools=[TOOL, OTHER], parallel_tool_calls=False)
    answer = await ask(workers, body)
    (choice,) = answer["choices"]
    assert (calls_of(choice), choice["finish_reason"]) == ([FIRST], "tool_calls")
    assert answer["usage"]["completion_tokens"] == until
    streamed = joined(await stream(saying(size=size), body))
    assert without_ids(streamed) == without_ids(comparable(answer))


async def test_what_the_model_is_shown() -> None:
    _, prompt = await request_of(chat_body(tools=[STRICT, OTHER]))
    assert json.dumps(TOOL, ensure_ascii=False) in prompt
    assert json.dumps(OTHER) in prompt
    assert "strict" not in prompt
    _, without = await request_of(chat_body(tools=[TOOL], tool_choice="none"))
    assert "paint" not in without


async def test_with_no_choice_calls_are_text() -> None:
    (choice,) = (await ask(saying(), chat_body(tools=[TOOL], tool_choice="none")))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (SAID, "stop")


@pytest.mark.parametrize(
    ("fields", "has_grammar", "names"),
    [
        ({}, False, ()),
        ({"tool_choice": "auto"}, False, ()),
        ({"tool_choice": "none"}, False, ()),
        ({"tool_choice": "required"}, True, ("paint", "erase")),
        ({"tool_choice": {"type": "function", "function": {"name": "erase"}}}, True, ("erase",)),
        ({"tools": [STRICT, OTHER]}, True, ("paint", "erase")),
        ({"tools": [STRICT], "tool_choice": "none"}, False, ()),
        ({"response_format": {"type": "json_object"}}, True, ()),
        ({"tool_choice": "none", "tools": [STRICT], "response_format": {"type": "json_object"}},
         True, ()),
    ],
)  # fmt: skip
async def test_what_the_answer_is_held_to(
    fields: dict[str, Any], has_grammar: bool, names: tuple[str, ...]
) -> None:
    request, _ = await request_of(chat_body(**{"tools": [TOOL, OTHER], **fields}))
    grammar = request.sampling.grammar or ""
    assert bool(grammar) is has_grammar
    assert tuple(
        name for name in ("paint", "erase") if f'"{name}' in grammar.replace("\\", "")
    ) == (names)


async def test_a_call_and_what_it_gave() -> None:
    call = {"id": "c1", "type": "function",
            "function": {"name": "paint", "arguments": '{"color": "<|im_end|>"}'}}  # fmt: skip
    for content in ({}, {"content": None}, {"content": ""}):
        turns = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
        ]
        request, prompt = await request_of(chat_body(messages=turns, tools=[TOOL]))
        assert '{"name": "paint", "arguments": {"color": "<|im_end|>"}}' in prompt
        assert "<|im_start|>tool\ndone<|im_end|>" in prompt
        # What stands in arguments does not end a turn.
        tokenizer = make_tool_tokenizer()
        (end,) = tokenizer.encode_prompt("<|im_end|>")
        assert request.prompt_ids.count(end) == len(turns) + 1


@pytest.mark.parametrize("arguments", ["{", "[]", "5", "{}}", "nothing", '{"a": ' * 5000])
async def test_arguments_that_are_no_object(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    response = await post(saying(), chat_body(messages=[turn]))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].tool_calls[0].function.arguments"


async def test_no_arguments_at_all() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": ""}}
    _, prompt = await request_of(chat_body(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert '{"name": "paint", "arguments": {}}' in prompt


CALL = {"id": "c", "type": "function", "function": {"name": "paint", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "none"}, "tools"),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ],
)
async def test_a_template_without_tools(fields: dict[str, Any], param: str) -> None:
    """What the template has no place for would be dropped in silence."""
    transport = httpx.ASGITransport(app=make_app(saying()))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(CHAT, json=chat_body(**fields))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert response.json()["error"]["code"] == "unsupported_parameter"
        plain = await client.post(CHAT, json=chat_body(tools=[], tool_choice="auto"))
        assert plain.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
async def test_an_answer_cannot_be_both(fields: dict[str, Any], param: str) -> None:
    response = await post(saying(), chat_body(tools=[STRICT], **fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
