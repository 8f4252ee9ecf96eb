"""Log lines: each with the id of its own request, one at its end, and nothing private in them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.doubles import ScriptedWorkers, deltas_of, encode, make_app
from workers.errors import WorkerLost
from workers.telemetry import logs
from workers.telemetry.config import TelemetryConfig
from workers.telemetry.logs import LOGGERS, RequestIdFilter, configure

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
DELTAS = deltas_of(encode("hello there<|im_end|>"), (2,))


class Recorder(logging.Handler):
    """Keeps records as a handler of ours sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.addFilter(RequestIdFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, request_id: str) -> list[str]:
        return [r.getMessage() for r in self.records if vars(r)["request_id"] == request_id]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    logger, recorder = logging.getLogger("serving"), Recorder()
    level = logger.level
    logger.addHandler(recorder)
    logger.setLevel(logging.DEBUG)
    yield recorder
    logger.removeHandler(recorder)
    logger.setLevel(level)


@pytest.fixture
def restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers


def client_of(workers: ScriptedWorkers, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=make_app(workers, **options))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_side_by_side_have_their_own_ids(recorder: Recorder, stream: bool) -> None:
    """One id for the process would give each line the id of whoever came last."""
    # Each loses its worker once, in mid-stream, which the relay logs.
    cut = [*DELTAS[:1], WorkerLost("died")]
    workers = ScriptedWorkers([cut, list(cut), list(DELTAS)], delay_s=0.002)
    async with client_of(workers) as client:
        await asyncio.gather(
            *(
                client.post(CHAT, json={**BODY, "stream": stream}, headers={"x-request-id": name})
                for name in ("one", "two")
            )
        )
    for name in ("one", "two"):
        lines = recorder.of(name)
        assert len(lines) == 2
        assert lines[0].startswith(f"request chatcmpl-{name} lost its worker")
        assert lines[1].startswith(f"POST {CHAT} 200 ")
    assert not recorder.of("-")


@pytest.mark.parametrize(
    ("path", "prefix", "body"),
    [(CHAT, "chatcmpl", BODY), ("/v1/completions", "cmpl", {"model": "demo", "prompt": "hi"})],
)
async def test_the_answer_and_the_workers_carry_the_id(
    path: str, prefix: str, body: dict[str, Any]
) -> None:
    workers = ScriptedWorkers([list(DELTAS)])
    async with client_of(workers) as client:
        given = await client.post(path, json=body, headers={"x-request-id": "mine"})
        made = await client.post(path, json=body)
    assert given.json()["id"] == f"{prefix}-mine"
    assert made.json()["id"] == f"{prefix}-{made.headers['x-request-id']}"
    assert [r.request_id for r in workers.requests] == [given.json()["id"], made.json()["id"]]


async def test_an_id_may_come_again(recorder: Recorder) -> None:
    """Clients send the same one with each retry, also while the first try still runs."""
    workers = ScriptedWorkers([list(DELTAS)], delay_s=0.002)
    async with client_of(workers) as client:
        headers = {"x-request-id": "same"}
        answers = await asyncio.gather(
            *(client.post(CHAT, json=BODY, headers=headers) for _ in range(3))
        )
    assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {
        "hello there"
    }
    assert len(recorder.of("same")) == 3


def access_lines(recorder: Recorder) -> list[tuple[str, str]]:
    return [
        (r.levelname, re.sub(r"\d+ms", "Nms", r.getMessage()))
        for r in recorder.records
        if r.name == "serving.access"
    ]


async def test_a_line_a_request(recorder: Recorder) -> None:
    async with client_of(ScriptedWorkers([list(DELTAS)]), max_body_bytes=4000) as client:
        sizes = [
            len((await client.post(CHAT, json=BODY)).content),
            len((await client.post(CHAT, json={**BODY, "stream": True})).content),
            len((await client.post(CHAT, json={"secret": "body"})).content),
            len((await client.post(CHAT, content=b"x" * 5000)).content),
            len((await client.get("/v1/models?secret=query")).content),
            len((await client.get("/health")).content),
            len((await client.get("/metrics")).content),
        ]
    assert access_lines(recorder) == [
        ("INFO", f"POST {CHAT} 200 Nms {sizes[0]}B"),
        ("INFO", f"POST {CHAT} 200 Nms {sizes[1]}B"),
        ("INFO", f"POST {CHAT} 400 Nms {sizes[2]}B"),
        ("INFO", f"POST {CHAT} 413 Nms {sizes[3]}B"),
        ("INFO", f"GET /v1/models 200 Nms {sizes[4]}B"),
        ("DEBUG", f"GET /health 200 Nms {sizes[5]}B"),
        ("DEBUG", f"GET /metrics 200 Nms {sizes[6]}B"),
    ]
    assert not [r for r in recorder.records if "secret" in r.getMessage()]


async def test_a_path_cannot_write_a_line_of_its_own(recorder: Recorder) -> None:
    """A decoded line break in a path would let anybody forge what the log says."""
    async with client_of(ScriptedWorkers([])) as client:
        await client.get("/v1/a%0d%0aINFO%20forged/%F0%9F%98%80" + "x" * 500)
    ((_, line),) = access_lines(recorder)
    assert "%0D%0AINFO%20forged/%F0%9F%98%80" in line
    assert line.isascii()
    assert len(line) < 400


async def test_no_access_log(recorder: Recorder) -> None:
    async with client_of(ScriptedWorkers([list(DELTAS)]), has_access_log=False) as client:
        await client.post(CHAT, json=BODY)
    assert not access_lines(recorder)


@pytest.mark.parametrize(
    ("stream", "end", "spec_version"),
    [
        (True, "disconnect", "2.3"),
        (False, "disconnect", "2.3"),
        (True, "send", "2.3"),
        (True, "send", "2.4"),
        (True, "cancel", "2.3"),
        (False, "cancel", "2.3"),
    ],
)
async def test_e13_a_client_that_went_is_a_499(
    recorder: Recorder, stream: bool, end: str, spec_version: str
) -> None:
    """E13: neither a success nor a failure of the server's; each server says it in another way."""
    workers = ScriptedWorkers([list(deltas_of(encode("hello there " * 50)))], delay_s=0.002)
    payload = json.dumps({**BODY, "stream": stream}).encode()
    inbox: list[Any] = [{"type": "http.request", "body": payload, "more_body": False}]
    is_gone = asyncio.Event()

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if end == "send" and workers.num_taken > 1:
            raise OSError("the connection is gone")

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")], "root_path": "",
        "asgi": {"spec_version": spec_version},
    }  # fmt: skip
    app: Any = make_app(workers)
    task = asyncio.create_task(app(scope, receive, send))
    await workers.wait_taken(2)
    if end == "disconnect":
        is_gone.set()
    elif end == "cancel":
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [line.split(" Nms")[0] for _, line in access_lines(recorder)] == [f"POST {CHAT} 499"]


@pytest.mark.usefixtures("restored")
def test_configured_twice_a_line_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    root, ray = logging.getLogger(), logging.getLogger("ray.serve")
    untouched = [(x.level, x.propagate, list(x.handlers)) for x in (root, ray)]
    configure(TelemetryConfig(log_level="WARNING"))
    configure(TelemetryConfig())
    logging.getLogger("serving.relay").info("outside")
    logging.getLogger("serving.relay").debug("too quiet")
    entered = logs.current_request_id.set("mine")
    logging.getLogger("workers.x").warning("inside %d", 5)
    logs.current_request_id.reset(entered)
    first, second = stderr.getvalue().splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(stamp + " INFO - serving.relay: outside", first)
    assert re.fullmatch(stamp + " WARNING mine workers.x: inside 5", second)
    assert untouched == [(x.level, x.propagate, list(x.handlers)) for x in (root, ray)]


@pytest.mark.usefixtures("restored")
def test_a_json_line_is_an_object_with_the_request_s_id(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    configure(TelemetryConfig(log_format="json"))
    entered = logs.current_request_id.set("mine")
    logging.getLogger("serving.relay").warning('lost "%s"\nafter %d', "é", 5)
    logs.current_request_id.reset(entered)
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("workers.engine").exception("failed")
    first, second = (json.loads(line) for line in stderr.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", first.pop("time"))
    assert first == {
        "level": "WARNING", "request_id": "mine", "logger": "serving.relay",
        "message": 'lost "é"\nafter 5',
    }  # fmt: skip
    assert (second["request_id"], second["message"]) == ("-", "failed")
    assert "ValueError" in second["exc_info"]
