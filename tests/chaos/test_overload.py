"""Far more than can be served: some are refused at once, the rest is served whole."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from tests.chaos.conftest import Report, leaked_blocks, memory_mib, scaled
from tests.chaos.traffic import Answer, ask
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SECONDS = scaled(12, 120)
# Measured once, with few requests: what is offered is this many times as much.
FACTOR = 10
# Open at once, so that this process is not what is overloaded.
MAX_OPEN = 1200
MAX_GROWTH_MIB = 150.0


def _body(server: Server, number: int) -> dict[str, object]:
    content = f"Count from {number % 9} to {number % 90 + 9}. " + "word " * (number % 60)
    messages = [{"role": "user", "content": content}]
    return {
        "model": server.model, "messages": messages, "stream": True, "max_tokens": 40,
        "ignore_eos": True, "seed": number, "return_token_ids": True,
    }  # fmt: skip


async def _capacity(server: Server, client: httpx.AsyncClient) -> float:
    """Return requests a second with as many at once as run well."""
    started_s = time.monotonic()
    bodies = [_body(server, number) for number in range(64)]
    await asyncio.gather(*(ask(client, "/v1/chat/completions", body) for body in bodies))
    return len(bodies) / (time.monotonic() - started_s)


async def test_e3_overload_is_refused_and_nothing_hangs(
    server: Server, client: httpx.AsyncClient, report: Report
) -> None:
    """E3, E4: overload ended in hangs and random 503; limits were not kept for streams."""
    rate = FACTOR * await _capacity(server, client)
    rng = random.Random(2)
    answers: list[Answer] = []
    jobs: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        answers.append(await ask(client, "/v1/chat/completions", _body(server, number)))

    held: list[float] = []
    started_s = next_s = time.monotonic()
    for number in range(100_000):
        next_s += rng.expovariate(rate)
        if next_s - started_s > SECONDS:
            break
        await asyncio.sleep(max(next_s - time.monotonic(), 0))
        if len(jobs) < MAX_OPEN:
            job = asyncio.ensure_future(one(number))
            jobs.add(job)
            job.add_done_callback(jobs.discard)
        if len(held) < (time.monotonic() - started_s) / SECONDS * 8:
            held.append(await asyncio.to_thread(memory_mib, server))
    await asyncio.wait_for(asyncio.gather(*jobs), 120)

    refused = [answer for answer in answers if answer.status == 429]
    served = [answer for answer in answers if answer.status == 200]
    report.fault("overload")
    report.streams_run += len(served)
    report.refused_429 += len(refused)
    report.status_5xx += sum(answer.status >= 500 for answer in answers)
    report.memory_mib["during overload"] = held
    assert {answer.status for answer in answers} == {200, 429}
    assert all(answer.has_ended and answer.num_tokens == 40 for answer in served)
    assert all("retry-after" in answer.headers for answer in refused)
    assert {answer.error["code"] for answer in refused if answer.error} == {"queue_full"}
    assert len(served) > 20
    leaked = await asyncio.to_thread(leaked_blocks, server, 60)
    report.leaked_blocks += leaked
    assert leaked == 0
    # The first half fills the queues.
    half = held[len(held) // 2 :]
    assert max(half) - half[0] < MAX_GROWTH_MIB, held
    assert (await client.get("/health")).status_code == 200
