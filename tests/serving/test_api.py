"""The app in process: answers, streams, statuses, and what a disconnect leaves behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from serving.api import ROUTES
from serving.images import ImageLimits
from tests.serving.doubles import (
    Script,
    ScriptedWorkers,
    data_url,
    deltas_of,
    encode,
    make_app,
    picture,
)
from workers.contracts import FinishReason
from workers.errors import GenerationFailed, QueueFull, RequestTooLong, WorkerLost

TEXT = "the quick 中文😀 fox"
# As a worker that stops sends them: the last token is the stop.
IDS = encode(f"{TEXT}<|im_end|>")
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "hi"}


def client_of(workers: ScriptedWorkers, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=make_app(workers, **options))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def scripted(*scripts: Script, **options: Any) -> ScriptedWorkers:
    return ScriptedWorkers(list(scripts) or [list(deltas_of(IDS, (3,)))], **options)


async def post(workers: ScriptedWorkers, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    async with client_of(workers) as client:
        return await client.post(path, json=body)


def parse(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.isascii()
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [b[6:] if b[6:] == "[DONE]" else json.loads(b[6:]) for b in blocks]


async def test_chat() -> None:
    response = await post(scripted(), BODY)
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(IDS)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
async def test_c4_c7_chat_stream(size: int) -> None:
    """C4, C7: role first, finish_reason null until the end, text whole, one [DONE]."""
    workers = scripted(list(deltas_of(IDS, (size,), FinishReason.LENGTH)))
    events = parse(await post(workers, {**BODY, "stream": True}))
    assert events.pop() == "[DONE]"
    assert all("usage" not in event for event in events)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "".join(c["delta"].get("content", "") for c in choices) == TEXT
    assert choices[-1]["delta"] == {}
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_c1_c2_c3_usage_chunk(path: str) -> None:
    """C1, C2, C3: usage only if asked, null in all but the last chunk, counting tokens."""
    body = {**(BODY if path == CHAT else COMPLETION), "stream": True}
    events = parse(
        await post(scripted(), {**body, "stream_options": {"include_usage": True}}, path)
    )
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(IDS)
    assert all(event["usage"] is None for event in events)
    plain = await post(scripted(), {**body, "stream": False}, path)
    assert plain.json()["usage"] == last["usage"]
    for options in ({}, {"include_usage": False}):
        events = parse(await post(scripted(), {**body, "stream_options": options}, path))
        assert all("usage" not in event for event in events[:-1])


async def test_completion_stream() -> None:
    events = parse(await post(scripted(), {**COMPLETION, "stream": True}, "/v1/completions"))
    assert events.pop() == "[DONE]"
    assert {event["object"] for event in events} == {"text_completion"}
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_c8_stop_string_on_both_endpoints(path: str) -> None:
    """C8: no part of the stop string is sent, and the engine's stream is closed."""
    workers = scripted()
    body = {**(BODY if path == CHAT else COMPLETION), "stop": ["k 中", "zzz"]}
    choice = (await post(workers, body, path)).json()["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == "the quic"
    assert (workers.num_open, workers.num_closed_early) == (0, 1)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestTooLong("too long"), 400, "context_length_exceeded"),
        (QueueFull("full"), 429, "queue_full"),
        (GenerationFailed("nan"), 500, "generation_failed"),
        (WorkerLost("died"), 503, "stream_lost"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_is_a_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    response = await post(scripted([error]), {**BODY, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("error", [GenerationFailed("nan"), WorkerLost("died"), RuntimeError("x")])
async def test_an_error_after_the_first_token_is_an_event(error: Exception) -> None:
    """E9: the cut stream cannot be taken for a complete one."""
    workers = scripted([*deltas_of(IDS, (2,))[:2], error])
    events = parse(await post(workers, {**BODY, "stream": True}))
    assert "error" in events[-1]
    assert "[DONE]" not in events
    assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])


async def test_a_lost_worker_does_not_show() -> None:
    deltas = deltas_of(IDS, (2,))
    workers = scripted([*deltas[:3], WorkerLost("died")], list(deltas))
    events = parse(await post(workers, {**BODY, "stream": True}))
    assert events[-1] == "[DONE]"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == TEXT


async def test_images_reach_the_workers() -> None:
    workers = scripted()
    content = [
        {"type": "image_url", "image_url": {"url": data_url(picture())}},
        {"type": "text", "text": "what?"},
    ]
    response = await post(workers, {**BODY, "messages": [{"role": "user", "content": content}]})
    assert response.status_code == 200
    request = workers.requests[0]
    assert len(request.images) == 1
    assert response.json()["usage"]["prompt_tokens"] == len(request.prompt_ids)


async def test_the_seed_is_always_set_and_survives_a_replay() -> None:
    deltas = deltas_of(IDS, (2,))
    workers = scripted([*deltas[:1], WorkerLost("died")], list(deltas))
    await post(workers, BODY)
    first, second = workers.requests
    assert first.sampling.seed == second.sampling.seed


async def test_models_health_metrics() -> None:
    workers = scripted()
    async with client_of(workers) as client:
        models = (await client.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == ["demo"]
        assert (await client.get("/health")).status_code == 200
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "specserve_up 1" in metrics.text
        workers.is_healthy = False
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["error"]["code"] == "no_worker_ready"


async def test_the_api_describes_itself() -> None:
    async with client_of(scripted()) as client:
        document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) == {path.replace(":path", "") for path, _, _ in ROUTES}
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert chat["temperature"]["anyOf"][0]["maximum"] == 2


async def test_unknown_paths_and_methods_have_the_error_body() -> None:
    async with client_of(scripted()) as client:
        missing, wrong = await client.get("/v1/nothing"), await client.get(CHAT)
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    for response in (missing, wrong):
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("a b", False), ("x" * 200, False)])
async def test_request_ids(given: str, kept: bool) -> None:
    async with client_of(scripted()) as client:
        response = await client.post(CHAT, json=BODY, headers={"x-request-id": given})
    assert (response.headers["x-request-id"] == given) is kept


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_body_limit(is_chunked: bool) -> None:
    body = json.dumps(BODY).encode() + b" " * 5000

    async def chunks() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with client_of(scripted(), max_body_bytes=4000) as client:
        headers = {"content-type": "application/json"}
        content = chunks() if is_chunked else body
        response = await client.post(CHAT, content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert (await client.post(CHAT, json=BODY)).status_code == 200


@pytest.mark.parametrize(
    ("length", "status"),
    [("9" * 5000, 413), ("²".encode("latin-1"), 200), ("-1", 200), ("4001", 413), ("4000", 200)],
)
async def test_any_content_length_is_an_answer(length: Any, status: int) -> None:
    """Python refuses to convert thousands of digits, and digits that are none of ASCII's."""
    headers = {"content-type": "application/json", "content-length": length}
    async with client_of(scripted(), max_body_bytes=4000) as client:
        response = await client.post(CHAT, content=json.dumps(BODY), headers=headers)
    assert response.status_code == status


async def test_image_limit_is_configurable() -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    body = {**BODY, "messages": [{"role": "user", "content": [part, part]}]}
    async with client_of(scripted(), limits=ImageLimits(max_images=1)) as client:
        response = await client.post(CHAT, json=body)
    assert response.json()["error"]["param"] == "messages[0].content[1].image_url"


def chat_scope(spec_version: str = "2.3") -> dict[str, Any]:
    return {
        "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")],
        "asgi": {"spec_version": spec_version},
        "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
    }  # fmt: skip


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_sent", [0, 1, 3])
async def test_e13_a_send_to_nobody_is_no_failure(
    stream: bool, num_sent: int, spec_version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """E13: each client that goes in the middle would leave a traceback in the log."""
    workers = scripted()
    payload = json.dumps({**BODY, "stream": stream}).encode()
    inbox: list[Any] = [{"type": "http.request", "body": payload, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return inbox.pop() if inbox else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if len(sent) >= num_sent:
            raise OSError("the connection is gone")
        sent.append(message)

    await make_app(workers)(chat_scope(spec_version), receive, send)  # type: ignore[misc]
    assert len(sent) <= num_sent
    assert workers.num_open == 0  # also where the stream's own generator never started
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


async def test_an_oserror_of_ours_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It must not pass for a client that went, which nobody is told of."""
    response = await post(scripted([OSError("disk")]), BODY)
    assert response.status_code == 500
    assert [r.levelname for r in caplog.records if r.name == "serving.middleware"] == ["ERROR"]


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_closes_the_worker_stream(stream: bool) -> None:
    """C21: a client that goes must not leave its request running."""
    workers = ScriptedWorkers([list(deltas_of(encode(TEXT * 50)))], delay_s=0.005)
    sent: list[Any] = []
    gone = asyncio.Event()
    payload = json.dumps({**BODY, "stream": stream}).encode()
    inbox: list[Any] = [{"type": "http.request", "body": payload, "more_body": False}]

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    task = asyncio.create_task(make_app(workers)(chat_scope(), receive, send))  # type: ignore[arg-type]
    await workers.wait_taken(5)
    gone.set()
    await asyncio.wait_for(task, 1)
    assert (workers.num_open, workers.num_closed_early) == (0, 1)
    assert workers.num_taken < 40


@pytest.mark.parametrize("stream", [True, False])
async def test_cancellation_closes_the_worker_stream(stream: bool) -> None:
    """C21: this is how Serve tells the app that the client has gone."""
    workers = ScriptedWorkers([list(deltas_of(encode(TEXT * 50)))], delay_s=0.005)
    async with client_of(workers) as client:
        task = asyncio.create_task(client.post(CHAT, json={**BODY, "stream": stream}))
        await workers.wait_taken(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (workers.num_open, workers.num_closed_early) == (0, 1)


async def test_e4_requests_beyond_the_limit_are_refused_at_once() -> None:
    """E4: streams were not counted, queued without end, and health was refused with them."""
    gate = asyncio.Event()
    workers = scripted(gate=gate)
    async with client_of(workers, max_open=3) as client:
        for _ in range(3):  # places are given back
            gate.clear()
            bodies = [{**BODY, "stream": number % 2 == 0} for number in range(3)]
            jobs = [asyncio.ensure_future(client.post(CHAT, json=body)) for body in bodies]
            while workers.num_open < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            refused = await client.post(CHAT, json=BODY)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert refused.headers["retry-after"] == "1"
            assert (await client.get("/health")).status_code == 200
            gate.set()
            assert [(await job).status_code for job in jobs] == [200, 200, 200]
