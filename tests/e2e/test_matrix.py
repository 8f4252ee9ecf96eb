"""Every parameter over HTTP: the same answer with speculation and without, streamed and whole."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.conftest import Server
from tests.e2e.test_demo import COUNT, DESCRIBE, image_part, text_part

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TOLERANCE = 1e-4
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["color", "count", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": SCHEMA}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
# Each with `return_token_ids`; temperature 0 unless it says otherwise.
CHAT: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1, "seed": 3},
    "filtered": {"temperature": 1.3, "seed": 4, "top_p": 0.8, "top_k": 30, "min_p": 0.02},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    "penalties, sampled": {"frequency_penalty": -0.5, "temperature": 0.9, "seed": 6},
    "bias": {"logit_bias": {"5": 5, "20": -100}, "temperature": 1, "seed": 7},
    "stop": {"stop": ["6", "square"]},
    "stop ids": {"stop_token_ids": [25, 26, 27, 28]},
    "min_tokens": {"min_tokens": 30, "max_tokens": 40, "stop": [", "]},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 50, "temperature": 0.7, "seed": 8},
    "n": {"n": 3, "temperature": 1, "seed": 9},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "logprobs, n, stop": {
        "logprobs": True, "top_logprobs": 1, "n": 2, "stop": ["7"], "temperature": 1, "seed": 2,
    },
    "logprobs, penalties": {"logprobs": True, "frequency_penalty": 1, "temperature": 1, "seed": 1},
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "json schema": {"response_format": AS_SCHEMA, "max_tokens": 150},
    "json schema, sampled, n": {
        "response_format": AS_SCHEMA, "max_tokens": 150, "temperature": 1, "seed": 5, "n": 2,
        "logprobs": True,
    },
    "regex": {"structured_outputs": {"regex": "(cat|dog)( (cat|dog)){2,5}"}},
    "choice": {"structured_outputs": {"choice": ["red circle", "blue square"]}},
    "tools, required": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200},
    "tools, auto": {"tools": [TOOL]},
    "one token": {"max_tokens": 1, "logprobs": True},
}  # fmt: skip
TEXT: dict[str, dict[str, Any]] = {
    "greedy": {},
    "echo": {"echo": True},
    "echo, logprobs": {"echo": True, "logprobs": 3, "temperature": 1, "seed": 2},
    "logprobs, stop": {"logprobs": 2, "stop": ["5"]},
    "prompts": {"prompt": ["Count from 3 to", "Spell the word"], "n": 2, "temperature": 1,
                "seed": 3, "logprobs": 1},
    "scored": {"echo": True, "logprobs": 0, "max_tokens": 0},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "max_tokens": 40},
}  # fmt: skip
CASES = [("chat/completions", name) for name in CHAT] + [("completions", name) for name in TEXT]


def _body(server: Server, path: str, name: str, is_shown: bool) -> dict[str, Any]:
    body = {"model": server.model, "temperature": 0, "max_tokens": 45, "return_token_ids": True}
    if path == "completions":
        return {**body, "prompt": "Count from 3 to 9. ", **TEXT[name]}
    content = [image_part(), text_part(DESCRIBE)] if is_shown else COUNT
    return {**body, "messages": [{"role": "user", "content": content}], **CHAT[name]}


def _post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=100)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _stream(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=100) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    events = [line.removeprefix("data: ") for line in lines]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def _assert_close(ours: Any, theirs: Any) -> None:
    """Compare JSON values; numbers that are no integers within the tolerance."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            _assert_close(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _assert_close(one, other)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    else:
        assert ours == theirs


def _comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Leave out what names the request, and how much of its prompt was known already."""
    usage = {k: v for k, v in answer["usage"].items() if k != "prompt_tokens_details"}
    choices = json.loads(json.dumps(answer["choices"]))
    for choice in choices:
        for call in (choice.get("message") or {}).get("tool_calls") or []:
            call.pop("id")
    return {"choices": choices, "usage": usage}


def _joined(chunks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Check that a stream's chunks put together are the whole answer."""
    assert chunks[-1]["choices"] == []
    usage = {k: v for k, v in chunks[-1]["usage"].items() if k != "prompt_tokens_details"}
    assert usage == _comparable(whole)["usage"]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    for expected in whole["choices"]:
        own = [part for part in parts if part["index"] == expected["index"]]
        reasons = [part["finish_reason"] for part in own]
        assert reasons == [None] * (len(own) - 1) + [expected["finish_reason"]]
        ids = [i for part in own for i in part.get("token_ids") or []]
        assert ids == expected["token_ids"]
        if "text" in expected:
            assert "".join(part["text"] for part in own) == expected["text"]
            found = [part["logprobs"] for part in own if part["logprobs"]]
            for key in expected["logprobs"] or {}:
                _assert_close([v for part in found for v in part[key]], expected["logprobs"][key])
            continue
        message = expected["message"]
        assert "".join(p["delta"].get("content") or "" for p in own) == (message["content"] or "")
        calls = [c for part in own for c in part["delta"].get("tool_calls") or []]
        functions = [call["function"] for call in message.get("tool_calls") or []]
        assert [call["function"] for call in calls] == functions
        if expected["logprobs"] is not None:
            found = [e for p in own if p["logprobs"] for e in p["logprobs"]["content"]]
            _assert_close(found, expected["logprobs"]["content"])


@pytest.mark.parametrize("is_shown", [False, True], ids=["text", "image"])
def test_speculation_and_streaming_do_not_show(server: Server, is_shown: bool) -> None:
    """B3, B6, B8, B10, B17, C3, C17: ids, text, log-probabilities, usage and finish reason."""
    cases = [case for case in CASES if not is_shown or case[0] != "completions"]

    def compare(case: tuple[str, str]) -> None:
        body = _body(server, *case, is_shown)
        without = _post(server, case[0], {**body, "speculation": {"enabled": False}})
        for wish in ({"enabled": True}, {"num_draft_tokens": 1}):
            wished = {**body, "speculation": wish}
            _assert_close(_comparable(_post(server, case[0], wished)), _comparable(without))
            _joined(_stream(server, case[0], wished), without)

    with ThreadPoolExecutor(8) as pool:
        jobs = {case: pool.submit(compare, case) for case in cases}
    for case, job in jobs.items():
        assert job.exception() is None, (case, job.exception())


def test_b19_concurrent_schema_requests(server: Server) -> None:
    """B17, B19: 64 at once, with and without an image, at T 0 and 1: all valid, no 5xx."""

    def ask(number: int) -> str:
        options = {
            "temperature": number % 2, "seed": number, "max_tokens": 200,
            "response_format": AS_SCHEMA,
        }  # fmt: skip
        body = {**_body(server, "chat/completions", "greedy", number % 4 == 0), **options}
        (choice,) = _post(server, "chat/completions", body)["choices"]
        assert choice["finish_reason"] == "stop"
        content: str = choice["message"]["content"]
        return content

    before = server.settled("spec_accepted_tokens_total")
    with ThreadPoolExecutor(64) as pool:
        contents = list(pool.map(ask, range(64)))
    for content in contents:
        jsonschema.validate(json.loads(content), SCHEMA)
    assert server.settled("spec_accepted_tokens_total") > before


def test_usage_tells_of_speculation_when_asked(server: Server) -> None:
    """F2: the response, and not only the metrics, says what was drafted and accepted."""
    names = ("spec_draft_tokens_total", "spec_accepted_tokens_total")
    before = [server.settled(name) for name in names]
    body = _body(server, "chat/completions", "greedy", False)
    report = _post(server, "chat/completions", {**body, "speculation": {"report": True}})
    figures = report["usage"]["speculation"]
    after = [server.settled(name) for name in names]
    drafted, accepted = (b - a for a, b in zip(before, after, strict=True))
    assert (figures["draft_tokens"], figures["accepted_tokens"]) == (drafted, accepted)
    assert 0 < figures["steps"] < report["usage"]["completion_tokens"]
    assert figures["fallbacks"] == 0
    assert "speculation" not in _post(server, "chat/completions", body)["usage"]
