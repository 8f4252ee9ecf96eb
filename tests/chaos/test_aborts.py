"""Clients that go at any time leave nothing behind."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.chaos.conftest import Report, leaked_blocks, scaled
from tests.chaos.traffic import CASES, ask
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_ABORTS = scaled(150, 1000)
AT_ONCE = 32


async def test_d9_random_aborts_leave_nothing(
    server: Server, client: httpx.AsyncClient, report: Report
) -> None:
    """D9: aborted requests leaked blocks, and later answers were wrong."""
    case = CASES[0]
    body = {**case.body(server.model, 1), "max_tokens": 60}
    before = await ask(client, case.path, body)
    rng = random.Random(3)
    gate = asyncio.Semaphore(AT_ONCE)

    async def go_away(number: int) -> None:
        case = CASES[number % len(CASES)]
        async with gate:
            job = asyncio.ensure_future(ask(client, case.path, case.body(server.model, number)))
            await asyncio.wait({job}, timeout=rng.expovariate(1 / 0.4))
            job.cancel()
            (outcome,) = await asyncio.gather(job, return_exceptions=True)
        report.aborts += 1
        report.fault("client disconnected")
        if not isinstance(outcome, BaseException):
            report.status_5xx += outcome.status >= 500
            report.refused_429 += outcome.status == 429

    await asyncio.gather(*map(go_away, range(NUM_ABORTS)))
    leaked = await asyncio.to_thread(leaked_blocks, server)
    report.leaked_blocks += leaked
    assert leaked == 0
    assert report.status_5xx == 0
    after = await ask(client, case.path, body)
    report.compared("after the aborts", after.difference(before))
    assert report.differences == []
