"""Comments in long waits: their order, and that nothing is left behind wherever one is cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from serving.keepalive import KEEP_ALIVE, Peekable, with_keep_alive
from tests.serving.doubles import ScriptedWorkers, deltas_of, encode, make_app
from workers.errors import GenerationFailed, RequestTooLong, WorkerLost

IDS = encode("hello there<|im_end|>")
INTERVAL_S = 0.001
LONG_S = 60.0


class Source:
    """A stream that waits for the test before each item, and notes its end."""

    def __init__(self, *items: bytes | Exception) -> None:
        self.go = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.is_closed = False
        self.stream = self._play(items)

    async def _play(self, items: tuple[bytes | Exception, ...]) -> AsyncGenerator[bytes, None]:
        self.is_asked.set()
        try:
            for item in items:
                await self.go.wait()
                self.go.clear()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            await asyncio.sleep(0)  # closing may take more than a moment
            self.is_closed = True


def other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


async def test_comments_then_items() -> None:
    source = Source(b"a", b"b")
    got: list[bytes] = []
    async for event in with_keep_alive(source.stream, INTERVAL_S):
        got.append(event)
        if got[-2:] == [KEEP_ALIVE] * 2:
            source.go.set()
    assert [event for event in got if event != KEEP_ALIVE] == [b"a", b"b"]
    assert got[:2] == [KEEP_ALIVE] * 2
    assert got[got.index(b"a") + 1 :][:2] == [KEEP_ALIVE] * 2
    assert source.is_closed
    assert not other_tasks()


async def test_no_interval_no_comments() -> None:
    source = Source(b"a")
    source.go.set()
    assert [event async for event in with_keep_alive(source.stream, None)] == [b"a"]


async def test_an_error_passes() -> None:
    source = Source(b"a", GenerationFailed("x"))
    stream = with_keep_alive(source.stream, LONG_S)
    source.go.set()
    assert await anext(stream) == b"a"
    source.go.set()
    with pytest.raises(GenerationFailed):
        await anext(stream)
    assert source.is_closed
    assert not other_tasks()


async def test_closing_at_a_comment_closes_the_source() -> None:
    """Else: "asynchronous generator is already running", and a wait that nobody ends."""
    source = Source(b"a")
    stream = with_keep_alive(source.stream, INTERVAL_S)
    assert await anext(stream) == KEEP_ALIVE
    await stream.aclose()
    assert source.is_closed
    assert not other_tasks()


async def test_closing_at_an_item_closes_the_source() -> None:
    source = Source(b"a", b"b")
    source.go.set()
    stream = with_keep_alive(source.stream, LONG_S)
    assert await anext(stream) == b"a"
    await stream.aclose()
    assert source.is_closed


async def test_cancelling_a_wait_closes_the_source() -> None:
    source = Source(b"a")
    stream = with_keep_alive(source.stream, LONG_S)
    waiter = asyncio.ensure_future(anext(stream))
    await source.is_asked.wait()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert source.is_closed
    assert not other_tasks()


async def test_a_stream_that_never_started_can_be_closed() -> None:
    source = Source(b"a")
    await with_keep_alive(source.stream, INTERVAL_S).aclose()
    assert not source.is_asked.is_set()
    assert not other_tasks()


async def test_a_peek_takes_nothing() -> None:
    source = Source(b"a", b"b")
    stream = Peekable(source.stream)
    assert not await stream.peek(0)
    source.go.set()
    assert await stream.peek(None)
    assert await stream.peek(0)
    source.go.set()
    assert [item async for item in stream] == [b"a", b"b"]


async def test_a_peek_that_is_cancelled_leaves_the_item() -> None:
    source = Source(b"a", b"b")
    stream = Peekable(source.stream)
    waiter = asyncio.ensure_future(stream.peek(None))
    await source.is_asked.wait()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    source.go.set()
    assert await anext(stream) == b"a"
    assert not await stream.peek(0)
    await stream.aclose()
    assert source.is_closed
    assert not other_tasks()


async def test_a_peek_raises_what_came_instead_of_an_item() -> None:
    source = Source(GenerationFailed("x"))
    source.go.set()
    with pytest.raises(GenerationFailed):
        await Peekable(source.stream).peek(None)
    with pytest.raises(StopAsyncIteration):
        await Peekable(Source().stream).peek(None)


class Exchange:
    """One request to the app, message by message."""

    def __init__(self, workers: ScriptedWorkers, path: str, **body: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._news = asyncio.Event()
        payload = json.dumps({"model": "demo", "stream": True, **body}).encode()
        self._inbox = [{"type": "http.request", "body": payload, "more_body": False}]
        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
            "asgi": {"spec_version": "2.3"}, "scheme": "http", "server": ("test", 80),
            "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        app: Any = make_app(workers, keep_alive_s=INTERVAL_S)
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._inbox:
            return self._inbox.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self._news.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def events(self) -> list[str]:
        text = b"".join(m.get("body", b"") for m in self.sent).decode()
        return [block for block in text.split("\n\n") if block]

    async def comments(self, num_comments: int) -> None:
        while self.events.count(": keep-alive") < num_comments:
            self._news.clear()
            await self._news.wait()


CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"prompt": "hi"},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_long_prefill_sends_comments(path: str) -> None:
    """Proxies close what is silent for a minute, which a long prompt's prefill may be."""
    workers = ScriptedWorkers([list(deltas_of(IDS, (2,)))], gate=asyncio.Event())
    exchange = Exchange(workers, path, **BODIES[path])
    await exchange.comments(3)
    assert workers.gate is not None
    workers.gate.set()
    await exchange.task
    assert exchange.status == 200
    assert exchange.events[-1] == "data: [DONE]"
    first_text = next(i for i, e in enumerate(exchange.events) if '"he' in e)
    assert exchange.events[:first_text].count(": keep-alive") >= 3
    chunks = [json.loads(e[6:]) for e in exchange.events[:-1] if e.startswith("data: ")]
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [c["text"] if path == COMPLETION else c["delta"].get("content", "") for c in choices]
    assert "".join(texts) == "hello there"
    assert not other_tasks()


@pytest.mark.parametrize("error", [RequestTooLong("x"), WorkerLost("x"), RuntimeError("x")])
async def test_the_first_error_after_a_comment_is_an_event(error: Exception) -> None:
    """The status is sent; and the cut stream cannot be taken for a complete one."""
    workers = ScriptedWorkers([[error]], gate=asyncio.Event())
    exchange = Exchange(workers, CHAT, **BODIES[CHAT])
    await exchange.comments(1)
    assert workers.gate is not None
    workers.gate.set()
    await exchange.task
    assert exchange.status == 200
    assert "error" in json.loads(exchange.events[-1].removeprefix("data: "))
    assert "data: [DONE]" not in exchange.events
    assert workers.num_open == 0


@pytest.mark.parametrize("is_cancelled", [True, False])
@pytest.mark.parametrize("num_comments", [0, 1, 3])
async def test_c21_a_client_that_goes_during_the_wait_ends_its_request(
    num_comments: int, is_cancelled: bool
) -> None:
    """C21: the prefill of a request that nobody waits for must not go on.

    Without comments the end may meet the wait for the headers, or the moment when it is over.
    """
    workers = ScriptedWorkers([list(deltas_of(IDS))], gate=asyncio.Event())
    exchange = Exchange(workers, CHAT, **BODIES[CHAT])
    while not workers.num_open:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await exchange.comments(num_comments)
    if is_cancelled:
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
    else:
        exchange.gone.set()
        await exchange.task
    assert (workers.num_open, workers.num_closed_early) == (0, 1)
    assert not other_tasks()


async def test_c21_no_moment_to_go_leaves_the_request_running() -> None:
    """C21: between two waits there is always a turn of the loop in which nobody holds the item."""
    for num_turns in range(60):
        workers = ScriptedWorkers([list(deltas_of(IDS))])
        workers.gate = asyncio.Event()
        exchange = Exchange(workers, COMPLETION, **BODIES[COMPLETION])
        while not workers.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        workers.gate.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        exchange.task.cancel()
        await asyncio.gather(exchange.task, return_exceptions=True)
        assert workers.num_open == 0, num_turns
        assert not other_tasks(), num_turns
