"""/tokenize, /detokenize, /v1/models, /version: what a client can learn before it asks."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from typing import Any

import httpx
import pytest

from serving import models
from serving.models import ServedModel
from serving.processor import VideoSupport
from serving.videos import VideoLayout
from tests.serving.doubles import (
    ScriptedWorkers,
    data_url,
    deltas_of,
    encode,
    make_app,
    make_services,
    make_tokenizer,
    picture,
)
from workers.contracts import WorkerInfo

USER = {"role": "user", "content": "hello there"}
SHOWN = {
    "role": "user",
    "content": [
        {"type": "text", "text": "what? <|im_end|>"},
        {"type": "image_url", "image_url": {"url": data_url(picture())}},
        {"type": "image_url", "image_url": {"url": data_url(picture(100, 90))}},
    ],
}
SPECIAL = "<|im_start|>hello 中文<|im_end|>"


def client_of(workers: ScriptedWorkers | None = None, **options: Any) -> httpx.AsyncClient:
    if workers is None:
        workers = ScriptedWorkers([list(deltas_of(encode("fine<|im_end|>")))])
    transport = httpx.ASGITransport(app=make_app(workers, **options))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def post(path: str, body: Any) -> httpx.Response:
    # As ASCII: HTTP clients cannot send a lone surrogate, only its escape.
    content, headers = json.dumps(body), {"content-type": "application/json"}
    async with client_of() as client:
        return await client.post(path, content=content, headers=headers)


async def test_a_text() -> None:
    answer = (await post("/tokenize", {"model": "demo", "prompt": SPECIAL})).json()
    ids = encode(SPECIAL)
    assert answer == {"count": len(ids), "max_model_len": 4096, "tokens": ids}
    assert (await post("/tokenize", {"prompt": ""})).json()["tokens"] == []


async def test_token_strings() -> None:
    body = {"prompt": "hello<|im_end|>", "return_token_strs": True, "add_special_tokens": False}
    answer = (await post("/tokenize", body)).json()
    assert len(answer["token_strs"]) == answer["count"]
    assert "".join(answer["token_strs"]) == "hello<|im_end|>"


@pytest.mark.parametrize(
    "messages", [[USER], [SHOWN], [SHOWN, {**USER, "role": "assistant"}, USER]]
)
async def test_messages_count_what_the_usage_says(messages: list[Any]) -> None:
    """A client that fits its prompt to the context counts with this; pictures count most."""
    workers = ScriptedWorkers([list(deltas_of(encode("fine<|im_end|>")))])
    async with client_of(workers) as client:
        body = {"model": "demo", "messages": messages}
        await _assert_counted(client, workers, body)


async def _assert_counted(
    client: httpx.AsyncClient, workers: ScriptedWorkers, body: dict[str, Any]
) -> None:
    counted = (await client.post("/tokenize", json=body)).json()
    answered = (await client.post("/v1/chat/completions", json=body)).json()
    assert counted["count"] == answered["usage"]["prompt_tokens"]
    assert tuple(counted["tokens"]) == workers.requests[0].prompt_ids


async def test_tools_are_counted_as_the_model_is_told_of_them() -> None:
    """A client with tools counted a prompt without them."""
    workers = ScriptedWorkers([list(deltas_of(encode("fine<|im_end|>")))])
    tool = {"type": "function", "function": {"name": "paint", "description": "Paints."}}
    async with client_of(workers, tools=True) as client:
        body = {"model": "demo", "messages": [USER], "tools": [tool]}
        await _assert_counted(client, workers, body)
        twice = await client.post("/tokenize", json={**body, "tools": [tool, tool]})
    assert twice.status_code == 400
    assert twice.json()["error"]["param"] == "tools[1].function.name"


async def test_without_the_generation_prompt() -> None:
    whole = (await post("/tokenize", {"messages": [USER]})).json()["tokens"]
    body = {"messages": [USER], "add_generation_prompt": False}
    cut = (await post("/tokenize", body)).json()["tokens"]
    assert whole[: len(cut)] == cut
    assert whole[len(cut) :] == encode("<|im_start|>assistant")


@pytest.mark.parametrize("text", [SPECIAL, "😀 a", ""])
async def test_there_and_back(text: str) -> None:
    ids = (await post("/tokenize", {"prompt": text})).json()["tokens"]
    answer = await post("/detokenize", {"model": "demo", "tokens": ids})
    assert answer.json() == {"prompt": text}


BAD: list[tuple[str, Any, str | None]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", [], None),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [USER], "add_special_tokens": False}, "add_special_tokens"),
    ("/tokenize", {"messages": [USER], "chat_template": "x"}, "chat_template"),
    ("/tokenize", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
     "messages[0].content[0].image_url"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "1"}, "tokens"),
    ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [5, 6, 10**6]}, "tokens[2]"),
    ("/detokenize", {"tokens": [5, "6"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_bodies(path: str, body: Any, param: str | None) -> None:
    response = await post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_an_id_that_only_the_model_has_is_no_token() -> None:
    """Models have more rows than their tokenizer has tokens."""
    last = make_tokenizer().vocab_size - 1
    assert (await post("/detokenize", {"tokens": [last]})).status_code == 200
    response = await post("/detokenize", {"tokens": [last, last + 1]})
    assert response.json()["error"]["param"] == "tokens[1]"


@pytest.mark.parametrize(
    ("path", "rest"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})]
)
async def test_another_model_is_404(path: str, rest: dict[str, Any]) -> None:
    response = await post(path, {"model": "other", **rest})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/demo"])
async def test_the_model(path: str) -> None:
    async with client_of() as client:
        answer = (await client.get(path)).json()
    entry = answer["data"][0] if path == "/v1/models" else answer
    assert entry.pop("created") > 1_700_000_000
    assert entry == {
        "id": "demo", "object": "model", "owned_by": "specserve", "root": "demo",
        "max_model_len": 4096, "modalities": ["text", "image"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["other", "org/other", ""])
async def test_unknown_models_are_404(name: str) -> None:
    async with client_of() as client:
        response = await client.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_a_model_may_be_named_like_a_repository() -> None:
    workers = ScriptedWorkers([])
    services = make_services(workers)
    served = ServedModel("org/name", services.prompts, workers)
    assert (await served.entry()).id == "org/name"


async def test_modalities() -> None:
    layout = next(iter(VideoLayout))
    processor: Any = object()
    expected: list[tuple[dict[str, Any], list[str]]] = [
        ({"vision": False}, ["text"]),
        ({"videos": VideoSupport(layout, processor)}, ["text", "image", "video"]),
        # Of the family, but this installation cannot process them.
        ({"videos": VideoSupport(layout, None, "no torchvision")}, ["text", "image"]),
    ]
    for options, modalities in expected:
        async with client_of(**options) as client:
            (entry,) = (await client.get("/v1/models")).json()["data"]
        assert entry["modalities"] == modalities


async def test_the_list_does_not_wait_for_workers() -> None:
    """A client that lists the models while workers load must not take the server for broken."""
    workers = ScriptedWorkers([], is_healthy=False)
    async with client_of(workers) as client:
        response = await client.get("/v1/models")
        assert response.status_code == 200
        assert response.json()["data"][0]["max_model_len"] is None
        counted = await client.post("/tokenize", json={"prompt": "hi"})
        assert counted.json()["max_model_len"] is None
    assert workers.num_asked == 1  # else each waits for the time-out again


async def test_workers_are_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = ScriptedWorkers([])
    served = ServedModel("demo", make_services(workers).prompts, workers)
    now_s = 1000.0
    monkeypatch.setattr(models.time, "monotonic", lambda: now_s)
    assert await asyncio.gather(*(served.max_model_len() for _ in range(5))) == [4096] * 5
    assert workers.num_asked == 1
    now_s += models.MEMORY_S
    workers.is_healthy = False
    assert await served.max_model_len() == 4096  # what was known holds meanwhile
    assert workers.num_asked == 2
    now_s += models.RETRY_S
    workers.is_healthy = True

    async def other() -> WorkerInfo:
        raise AssertionError("asked again though it is known")

    assert await served.max_model_len() == 4096
    monkeypatch.setattr(workers, "info", other)
    assert await served.max_model_len() == 4096


async def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"specserve": "1.2.3"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    async with client_of() as client:
        assert (await client.get("/version")).json() == {"version": "1.2.3"}
        versions.clear()
        assert (await client.get("/version")).json() == {"version": "unknown"}
