"""Time between tokens of running streams while long prompts come in, by the budget of a step.

Run by hand: `python -m tests.perf.pacing`. The same work under each budget, in turns, each time
with a fresh worker; what is told are medians over the turns, and their ratio to no budget.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.conftest import ROOT, Server, running

BUDGETS_MS = (0, 250, 60)
REPEATS = 3
NUM_STREAMS = 4
NUM_PROMPTS = 24


@dataclass
class Result:
    """What one pass gave."""

    gaps_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    seconds: float = 0.0


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    """Return when each chunk with text came."""
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if any(choice["text"] for choice in chunk["choices"]):
                    times.append(time.perf_counter())
    return times


async def _work(server: Server) -> Result:
    result = Result()
    body = {"model": server.model, "temperature": 1, "stream": True, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        streams = [
            asyncio.ensure_future(
                _stream(client, {**body, "prompt": f"Count {n}", "max_tokens": 1500, "seed": n})
            )
            for n in range(NUM_STREAMS)
        ]
        await asyncio.sleep(1)
        started_s = time.perf_counter()
        rng = random.Random(1)
        for _ in range(NUM_PROMPTS):
            ids = [rng.randrange(20, 700) for _ in range(1900)]
            times = await _stream(client, {**body, "prompt": ids, "max_tokens": 2, "seed": 1})
            result.first_token_s.append(times[1] - times[0])
        result.seconds = time.perf_counter() - started_s
        assert not any(stream.done() for stream in streams), "the streams ended too early"
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return result


async def _gaps(server: Server) -> Result:
    """Work, with a watcher of its own: a stream whose gaps are looked at."""
    body = {
        "model": server.model, "prompt": "Watch", "temperature": 1, "stream": True, "seed": 9,
        "ignore_eos": True, "max_tokens": 1800,
    }  # fmt: skip
    times: list[float] = []

    async def watch() -> None:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())  # noqa: PERF401 - read meanwhile

    watcher = asyncio.ensure_future(watch())
    await asyncio.sleep(1)
    num_before = len(times)
    result = await _work(server)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    seen = times[num_before:]
    result.gaps_s = [later - earlier for earlier, later in itertools.pairwise(seen)]
    return result


def main() -> None:
    """Do the work under each budget, in turns."""
    results: dict[int, list[Result]] = {budget: [] for budget in BUDGETS_MS}
    settings = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    settings["worker"]["num_replicas"] = 1
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(REPEATS):
            for budget in BUDGETS_MS:
                settings["scheduler"] = {
                    "max_step_tokens": 2048, "max_chunk_tokens": 2048, "max_running": 16,
                    "max_step_ms": budget,
                }  # fmt: skip
                config = Path(folder) / "config.yaml"
                config.write_text(yaml.safe_dump(settings))
                with running(config, Path(folder) / "log") as server:
                    results[budget].append(asyncio.run(_gaps(server)))
    _print(results)


def _print(results: dict[int, list[Result]]) -> None:
    figures: dict[str, Any] = {
        "gap between tokens, p99, ms": lambda r: 1000 * statistics.quantiles(r.gaps_s, n=100)[98],
        "gap between tokens, longest, ms": lambda r: 1000 * max(r.gaps_s),
        "long prompt's first token, p50, ms": lambda r: 1000 * statistics.median(r.first_token_s),
    }
    for name, figure in figures.items():
        print(name)
        for budget, passes in results.items():
            values = [round(figure(each), 1) for each in passes]
            middle = statistics.median(values)
            ratio = middle / statistics.median(map(figure, results[0]))
            print(f"  max_step_ms {budget}: {middle}, ratio {ratio:.2f} {values}")


if __name__ == "__main__":
    main()
