"""Serve's handles route by prefix and work: on Ray, with fake workers that hold what they ran."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from deploy.app import ROUTING_STATS_PERIOD_S
from tests.deploy.conftest import MODEL_ID, wait_until
from tests.deploy.test_app import CHAT, processes, series, values

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def _conversation(salt: str, num_turns: int) -> dict[str, Any]:
    """Return a body whose prompt begins as that of the turn before."""
    words = "the quick brown fox jumps over the lazy dog "
    turns = [{"role": "user", "content": f"{salt} {number} " + words * 3} for number in range(4)]
    turns += [{"role": "user", "content": f"more {number}"} for number in range(num_turns)]
    return {"model": MODEL_ID, "messages": turns, "max_tokens": 4}


def _where(url: str, body: dict[str, Any]) -> str:
    """Return the worker that one request went to."""
    before = series(url, "requests_admitted_total")
    assert httpx.post(url + CHAT, json=body, timeout=30).status_code == 200
    wait_until(lambda: sum(series(url, "requests_admitted_total").values()) > sum(before.values()))
    after = series(url, "requests_admitted_total")
    (worker,) = [number for number in after if after[number] > before.get(number, 0)]
    return processes(url)[worker]


@pytest.fixture(scope="module")
def known_url(ray_url: str) -> str:
    """The application, once its ingress knows how the workers name blocks."""
    wait_until(lambda: len(values(ray_url, "requests_running")) == 2, 60)
    # A conversation sticks by chance once in 32.
    salts = iter(range(1000))

    def sticks() -> bool:
        salt = str(next(salts))
        return len({_where(ray_url, _conversation(salt, n)) for n in range(6)}) == 1

    wait_until(sticks, 10 * ROUTING_STATS_PERIOD_S)
    return ray_url


def test_a_conversation_stays_with_its_prefix(known_url: str) -> None:
    """Every turn went to a worker at random, which computed the whole conversation again."""
    for salt in ("a", "b", "c"):
        assert len({_where(known_url, _conversation(salt, turn)) for turn in range(8)}) == 1


def test_conversations_are_spread(known_url: str) -> None:
    """Without a known prefix both workers are used."""
    used = Counter(_where(known_url, _conversation(f"new {n}", 0)) for n in range(16))
    assert len(used) == 2


def test_a_busy_worker_shares_its_prefix(known_url: str) -> None:
    """One prompt that all ask for was computed by one worker while the other had nothing to do."""
    body = _conversation("hot", 0) | {"max_tokens": 100}
    # Earlier tests had more workers, whose counters are still there.
    workers = processes(known_url)
    before = series(known_url, "requests_admitted_total")
    with ThreadPoolExecutor(24) as pool:
        jobs = [pool.submit(httpx.post, known_url + CHAT, json=body, timeout=60) for _ in range(24)]
        assert all(job.result().status_code == 200 for job in jobs)

    def admitted() -> list[float]:
        after = series(known_url, "requests_admitted_total")
        return [after[worker] - before.get(worker, 0) for worker in workers]

    wait_until(lambda: sum(admitted()) == 24)
    assert min(admitted()) >= 4, admitted()


def test_a_conversation_outlives_its_worker(known_url: str) -> None:
    worker = _where(known_url, _conversation("moved", 0))
    os.kill(int(worker), signal.SIGKILL)
    assert _where(known_url, _conversation("moved", 1)) != worker
    wait_until(lambda: len(values(known_url, "requests_running")) == 2, 60)


def test_the_choices_of_one_request_are_routed_each(known_url: str) -> None:
    """Serve's id is the same for all of them: all but one waited for a worker for ever."""
    for turn in range(3):
        body = _conversation("several", turn) | {"n": 16, "max_tokens": 20}
        answer = httpx.post(known_url + CHAT, json=body, timeout=30).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(16))
