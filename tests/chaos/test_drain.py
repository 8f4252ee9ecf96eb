"""SIGTERM while streams run: they end, whole; who comes later is told; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chaos.conftest import CONFIG, Report
from tests.chaos.traffic import CASES, Answer, ask
from tests.e2e.conftest import Server, running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

# They end within the grace also on a busy machine.
NUM_TOKENS = 120


@pytest.fixture
def leaving(tmp_path: Path) -> Iterator[Server]:
    """A server of its own: it does not outlive the test."""
    with running(CONFIG, tmp_path / "log") as server:
        yield server


async def test_e5_streams_end_before_the_server_does(leaving: Server, report: Report) -> None:
    """E5, E6: SIGTERM cut the streams, and those that came meanwhile got a 500."""
    bodies = [
        (case.path, {**case.body(leaving.model, 1), "max_tokens": NUM_TOKENS}) for case in CASES[:6]
    ]
    async with httpx.AsyncClient(base_url=leaving.url, timeout=60) as client:
        expected = [await ask(client, *body) for body in bodies]
        answers = [Answer() for _ in bodies]
        pairs = zip(bodies, answers, strict=True)
        jobs = [asyncio.ensure_future(ask(client, *body, answer)) for body, answer in pairs]
        while not all(answer.num_tokens for answer in answers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for pid in leaving.pids("-m\0deploy\0serve"):
            os.kill(pid, signal.SIGTERM)
        report.fault("SIGTERM of the server")
        statuses = await _statuses_until(client, leaving, jobs)
        await asyncio.gather(*jobs)
    for case, answer, twin in zip(CASES, answers, expected, strict=False):
        report.streams_run += 1
        report.compared(f"{case.name}, at the end", answer.difference(twin))
    assert report.differences == []
    # Taken while it was still known, refused, or nobody there; never a failure in the middle.
    assert statuses <= {0, 200, 404, 503}


async def _statuses_until(
    client: httpx.AsyncClient, server: Server, jobs: list[asyncio.Future[Answer]]
) -> set[int]:
    """Return what newcomers get while the old streams end; 0 = no connection."""
    statuses = set()
    while not all(job.done() for job in jobs):
        try:
            body = {"model": server.model, "prompt": "hi", "max_tokens": 1}
            statuses.add((await client.post("/v1/completions", json=body)).status_code)
        except httpx.TransportError:
            statuses.add(0)
        await asyncio.sleep(0.1)
    return statuses
