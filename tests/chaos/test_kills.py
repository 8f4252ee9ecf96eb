"""Workers die under streams of every kind, and no client can tell."""

from __future__ import annotations

import asyncio
import itertools
import random

import httpx
import pytest

from tests.chaos.conftest import Report, kill_worker, leaked_blocks, scaled
from tests.chaos.traffic import CASES, Answer, ask
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_STREAMS = 16
ROUNDS = scaled(2, 6)


async def _undisturbed(
    client: httpx.AsyncClient, server: Server, jobs: list[tuple[int, int]]
) -> dict[tuple[int, int], Answer]:
    """Return what each (case, seed) says when nothing happens."""
    known: dict[tuple[int, int], Answer] = {}
    gate = asyncio.Semaphore(8)

    async def run(job: tuple[int, int]) -> None:
        case = CASES[job[0]]
        async with gate:
            known[job] = await ask(client, case.path, case.body(server.model, job[1]))

    await asyncio.gather(*map(run, jobs))
    for (case, _), answer in known.items():
        assert answer.has_ended, (CASES[case].name, answer)
    return known


async def _kill_when_all_speak(
    server: Server, report: Report, answers: list[Answer], rng: random.Random
) -> float:
    """Kill a worker in the middle: when nearly all streams have said something; return when."""
    while sum(answer.num_tokens > 0 for answer in answers) < 0.8 * len(answers):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await asyncio.sleep(rng.uniform(0, 1.5))
    return await asyncio.to_thread(kill_worker, server, rng.randrange(8), report)


async def test_e9_killed_workers_do_not_show(
    server: Server, client: httpx.AsyncClient, report: Report
) -> None:
    """E9: streams ended without a word; also with images, n, schemas, tools, stops, logprobs."""
    rng = random.Random(5)
    turns = itertools.cycle(range(len(CASES)))
    rounds = [[(next(turns), r) for _ in range(NUM_STREAMS)] for r in range(ROUNDS)]
    expected = await _undisturbed(client, server, sorted(set(itertools.chain(*rounds))))
    for jobs in rounds:
        answers = [Answer() for _ in jobs]
        bodies = [(CASES[case].path, CASES[case].body(server.model, seed)) for case, seed in jobs]
        streams = [ask(client, *body, answer) for body, answer in zip(bodies, answers, strict=True)]
        killing = _kill_when_all_speak(server, report, answers, rng)
        killed_s, *_ = await asyncio.gather(killing, *streams)
        for job, answer in zip(jobs, answers, strict=True):
            report.streams_run += 1
            report.status_5xx += answer.status >= 500
            report.compared(CASES[job[0]].name, answer.difference(expected[job]))
        await asyncio.to_thread(server.wait_replaced, killed_s)
    leaked = await asyncio.to_thread(leaked_blocks, server)
    report.leaked_blocks += leaked
    assert report.differences == []
    assert report.status_5xx == 0
    assert leaked == 0
    interrupted = server.settled("streams_interrupted_total")
    assert interrupted >= ROUNDS, "no stream met its worker's death: nothing was tested"
    assert server.metric("streams_resumed_total") > 0
    assert server.metric("streams_lost_total") == 0
