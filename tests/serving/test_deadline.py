"""A request's time: shared by all that it waits for, and over for all of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

import httpx
import pytest

from serving import series
from serving.api import build_api
from serving.deadline import Deadline
from serving.errors import DeadlineExceeded
from tests.serving.doubles import ScriptedWorkers, deltas_of, encode, make_services

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
IDS = encode("the quick brown fox<|im_end|>")


async def _slow(num: int, seconds: float) -> AsyncGenerator[int, None]:
    for i in range(num):
        await asyncio.sleep(seconds)
        yield i


async def test_items_come_until_the_time_is_over() -> None:
    exceeded: list[int] = []
    deadline = Deadline.after(1, lambda: exceeded.append(1))
    source = _slow(1000, 0.01)
    got: list[int] = []

    async def take() -> None:
        async for item in deadline.bound(source):
            got.append(item)  # noqa: PERF401 - also those before the error

    with pytest.raises(DeadlineExceeded, match="not finished in 1 s"):
        await take()
    assert 2 < len(got) < 1000
    assert exceeded == [1]
    with pytest.raises(StopAsyncIteration):  # it is closed
        await anext(source)
    with pytest.raises(DeadlineExceeded):
        await deadline.wait_for(asyncio.sleep(1))


@pytest.mark.parametrize("seconds", [5.0, math.inf])
async def test_what_is_in_time_is_left_alone(seconds: float) -> None:
    deadline = Deadline.after(seconds, pytest.fail)
    assert [item async for item in deadline.bound(_slow(5, 0))] == list(range(5))

    async def work() -> str:
        raise TimeoutError("its own")

    assert await deadline.wait_for(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(TimeoutError, match="its own"):
        await deadline.wait_for(work())


async def _post(workers: ScriptedWorkers, **options: object) -> tuple[httpx.Response, float]:
    max_request_s = options.pop("max_request_s", None)
    services = make_services(workers, max_request_s=max_request_s)
    transport = httpx.ASGITransport(app=build_api(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, **options})
    return response, services.counters.value(series.TIMED_OUT)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("limit", [{"timeout": 0.05}, {"max_request_s": 0.05, "timeout": 60}])
async def test_a_request_that_waits_too_long_is_a_504(is_stream: bool, limit: dict) -> None:
    """It waited in a queue for ever, and held its place when nobody wanted the answer."""
    workers = ScriptedWorkers([list(deltas_of(IDS))], gate=asyncio.Event())
    response, num_timed_out = await _post(workers, stream=is_stream, n=2, **limit)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    assert (workers.num_open, workers.num_closed_early) == (0, 2)
    assert num_timed_out == 1


async def test_a_stream_that_runs_too_long_ends_with_an_error_event() -> None:
    workers = ScriptedWorkers([list(deltas_of(encode("the quick " * 500)))], delay_s=0.01)
    response, num_timed_out = await _post(workers, stream=True, timeout=1)
    assert response.status_code == 200
    events = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert '"code":"timeout"' in events[-1].replace(" ", "")
    assert "[DONE]" not in response.text
    assert len(events) > 3
    assert (workers.num_open, workers.num_closed_early) == (0, 1)
    assert num_timed_out == 1


async def test_a_request_in_time_is_answered() -> None:
    workers = ScriptedWorkers([list(deltas_of(IDS))])
    response, num_timed_out = await _post(workers, timeout=30)
    assert response.status_code == 200
    assert num_timed_out == 0
