"""Asks the app in process, and puts a stream's chunks together again."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.serving.doubles import ScriptedWorkers, make_app

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi", **fields}


async def post(workers: ScriptedWorkers, body: dict[str, Any]) -> httpx.Response:
    # A model without tools takes images instead.
    app = make_app(workers, tools=speaks_of_tools(body))
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(CHAT if "messages" in body else TEXT, json=body)


def speaks_of_tools(body: Any) -> bool:
    if not isinstance(body, dict):
        return False
    turns = [turn for turn in body.get("messages") or [] if isinstance(turn, dict)]
    return bool(body.get("tools")) or any(
        turn.get("role") == "tool" or turn.get("tool_calls") for turn in turns
    )


async def ask(workers: ScriptedWorkers, body: dict[str, Any]) -> dict[str, Any]:
    response = await post(workers, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(workers: ScriptedWorkers, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a stream's chunks, the last one with the usage."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    blocks = (await post(workers, body)).text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer that a stream's chunks are; each choice's end is checked."""
    *parts, last = chunks
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in parts)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in parts:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"]})
            assert choice.get("finish_reason") is None
            _add(choice, part)
    answer = {"choices": [choices[i] for i in sorted(choices)], "usage": last["usage"]}
    if "prompt_token_ids" in parts[0]:
        answer["prompt_token_ids"] = parts[0]["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in parts[1:])
    return answer


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a whole answer what a stream tells once a chunk, or names the request."""
    return {k: v for k, v in answer.items() if k in ("choices", "usage", "prompt_token_ids")}


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["finish_reason"] = part["finish_reason"]
    if "text" in part:
        choice["text"] = choice.get("text", "") + part["text"]
    else:
        _add_delta(choice.setdefault("message", {"content": None, "refusal": None}), part["delta"])
    if part.get("token_ids"):
        choice.setdefault("token_ids", []).extend(part["token_ids"])
    if part["logprobs"] is None:
        choice.setdefault("logprobs", None)
    elif choice.get("logprobs") is None:
        choice["logprobs"] = part["logprobs"]
    else:
        for key, value in part["logprobs"].items():
            if value is not None:
                choice["logprobs"][key] += value


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    if "role" in delta:
        assert "role" not in message
        message["role"] = delta["role"]
    if delta.get("content"):
        message["content"] = (message["content"] or "") + delta["content"]
    for call in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        assert call.pop("index") == len(calls)
        calls.append(call)
