"""A scripted tour with clients that others wrote: OpenAI's for Python and Node, and LangChain's."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.e2e.conftest import SAMPLE, Server
from tests.e2e.test_demo import COUNT, DESCRIBE, answer, image_part, text_part

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

CLIENTS = Path(__file__).parent / "clients"
CAPTION = SAMPLE.with_suffix(".txt").read_text().strip()


class Paint(BaseModel):
    """Paint a shape."""

    color: Literal["red", "green"]
    size: Literal[1, 2, 3]


class Board(BaseModel):
    """What is on the board."""

    color: Literal["red", "green", "blue"]
    shapes: list[Literal["circle", "square"]]


def _user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def test_python_client(server: Server) -> None:
    client, model = server.client, server.model
    common: dict[str, Any] = {"model": model, "temperature": 0, "max_completion_tokens": 200}
    create = client.chat.completions.create
    assert "4, 5, 6" in create(messages=_user(COUNT), **common).choices[0].message.content

    several = create(messages=_user(COUNT), **{**common, "temperature": 1}, n=3, seed=4)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    alone = create(messages=_user(COUNT), **{**common, "temperature": 1}, seed=4)
    assert several.choices[0].message.content == alone.choices[0].message.content

    rated = create(messages=_user(COUNT), **common, logprobs=True, top_logprobs=3)
    entries = rated.choices[0].logprobs.content
    assert len(entries) == rated.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert bytes(b for entry in entries[:-1] for b in entry.bytes).decode() == (
        rated.choices[0].message.content
    )

    # The client's own helpers: pydantic in, pydantic out.
    parsed = client.chat.completions.parse(
        messages=_user(DESCRIBE), response_format=Board, **common
    )
    assert isinstance(parsed.choices[0].message.parsed, Board)
    with client.chat.completions.stream(messages=_user(COUNT), **common) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == answer(server, COUNT)


def test_python_client_calls_a_tool_and_answers(server: Server) -> None:
    """A call, its result in the next turn, and the answer to that."""
    import openai

    tools: list[Any] = [openai.pydantic_function_tool(Paint, name="paint")]
    messages = _user("Paint something.")
    options: dict[str, Any] = {
        "model": server.model, "temperature": 0, "max_tokens": 250, "parallel_tool_calls": False,
    }  # fmt: skip
    result = server.client.chat.completions.create(
        messages=messages, tools=tools, tool_choice="required", **options
    )
    choice = result.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    Paint.model_validate_json(call.function.arguments)
    streamed = server.client.chat.completions.create(
        messages=messages, tools=tools, tool_choice="required", stream=True, **options
    )
    pieces = [c for chunk in streamed for c in chunk.choices[0].delta.tool_calls or []]
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    after = server.client.chat.completions.create(messages=messages, tools=tools, **options)
    assert after.usage.prompt_tokens > result.usage.prompt_tokens
    assert after.choices[0].finish_reason in ("stop", "length")


@pytest.fixture(scope="module")
def node_tour(server: Server) -> dict[str, Any]:
    """Run the Node client's tour once."""
    node = shutil.which("node")
    if node is None or not (CLIENTS / "node_modules").is_dir():
        reason = f"needs node, and `npm install` in {CLIENTS}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    command = [node, str(CLIENTS / "tour.mjs"), f"{server.url}/v1", server.model, str(SAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_node_client(server: Server, node_tour: dict[str, Any]) -> None:
    tour, counted = node_tour, answer(server, COUNT)
    assert tour["models"] == [server.model]
    assert tour["whole"]["choices"][0]["message"]["content"] == counted
    assert tour["stream"]["text"] == counted == tour["helper"]
    assert tour["stream"]["roles"] == ["assistant"]
    assert (
        tour["stream"]["usage"]["completion_tokens"] == tour["whole"]["usage"]["completion_tokens"]
    )
    assert tour["image"]["choices"][0]["message"]["content"] == CAPTION
    assert [choice["index"] for choice in tour["several"]["choices"]] == [0, 1, 2]
    assert len(tour["logprobs"]["choices"][0]["logprobs"]["content"]) == 5
    assert 0 <= json.loads(tour["schema"]["choices"][0]["message"]["content"])["n"] <= 9
    call = tour["tools"]["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "paint"
    assert json.loads(call["arguments"])["color"] in ("red", "green")
    assert tour["completion"]["choices"][0]["text"].startswith("Count from 3 to")
    assert tour["badParameter"] == {
        "type": "BadRequestError", "status": 400, "param": "temperature",
    }  # fmt: skip
    assert tour["badModel"]["status"] == 404


def test_langchain(server: Server) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    def model(**options: Any) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=f"{server.url}/v1", api_key="none", model=server.model,
            max_retries=0, **{"temperature": 0, "max_tokens": 80, **options},
        )  # fmt: skip

    counted = answer(server, COUNT, max_tokens=80)
    assert model().invoke(COUNT).content == counted
    assert "".join(str(chunk.content) for chunk in model().stream(COUNT)) == counted
    url = f"data:image/png;base64,{base64.b64encode(SAMPLE.read_bytes()).decode()}"
    seen = HumanMessage([{"type": "image_url", "image_url": {"url": url}}, text_part(DESCRIBE)])
    assert model().invoke([seen]).content == CAPTION
    assert [m.content for m in model().batch([COUNT, COUNT])] == [counted, counted]
    board = model(max_tokens=200).with_structured_output(Board, method="json_schema").invoke(COUNT)
    assert isinstance(board, Board)
    caller = model(max_tokens=250).bind_tools(
        [Paint], tool_choice="Paint", parallel_tool_calls=False, strict=True
    )
    (call,) = caller.invoke("Paint something.").tool_calls
    assert call["name"] == "Paint"
    Paint.model_validate(call["args"])


def test_every_client_sees_the_image_alike(server: Server) -> None:
    assert answer(server, [image_part(), text_part(DESCRIBE)]) == CAPTION
