"""Prefix hits and times to the first token on a multi-turn trace, by the workers' router.

Run by hand: `python -m tests.perf.routing`. Both routers serve the same trace in turns, each time
with fresh workers; what is told are medians over the turns, and their ratio.
"""

from __future__ import annotations

import asyncio
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

ROUTERS = ("power_of_two", "prefix")
REPEATS = 3
NUM_WORKERS = 4
NUM_CONVERSATIONS = 16
NUM_TURNS = 6
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "away")


@dataclass
class Result:
    """What one pass over the trace gave."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def quantile_ms(self, percent: int) -> float:
        return 1000 * statistics.quantiles(self.first_token_s, n=100)[percent - 1]


async def _turn(client: httpx.AsyncClient, model: str, messages: list[Any], result: Result) -> str:
    body = {
        "model": model, "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    started_s = time.perf_counter()
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            said = "".join(c["delta"].get("content") or "" for c in chunk["choices"])
            if said and not text:
                result.first_token_s.append(time.perf_counter() - started_s)
            text += said
            if usage := chunk.get("usage"):
                result.prompt_tokens += usage["prompt_tokens"]
                result.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    return text


async def _conversation(client: httpx.AsyncClient, model: str, number: int, result: Result) -> None:
    rng = random.Random(number)
    messages: list[Any] = []
    for _ in range(NUM_TURNS):
        await asyncio.sleep(rng.expovariate(1 / 0.3))
        content = " ".join(rng.choice(WORDS) for _ in range(60))
        messages.append({"role": "user", "content": content})
        answer = await _turn(client, model, messages, result)
        messages.append({"role": "assistant", "content": answer})


async def _trace(server: Server) -> Result:
    result = Result()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await asyncio.gather(
            *(_conversation(client, server.model, n, result) for n in range(NUM_CONVERSATIONS))
        )
    return result


def main() -> None:
    """Run the trace under each router, in turns."""
    results: dict[str, list[Result]] = {router: [] for router in ROUTERS}
    settings = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS):
            for router in ROUTERS:
                settings["worker"] |= {"router": router, "num_replicas": NUM_WORKERS}
                config = Path(folder) / f"{router}.yaml"
                config.write_text(yaml.safe_dump(settings))
                with running(config, Path(folder) / "log") as server:
                    time.sleep(5)  # the workers' first report
                    results[router].append(asyncio.run(_trace(server)))
                print(f"pass {repeat + 1} of {REPEATS}: {router} done", flush=True)
    _print(results)


def _print(results: dict[str, list[Result]]) -> None:
    rows: dict[str, Any] = {
        "prefix hits, share of prompt tokens": lambda r: r.hit_rate,
        "time to first token, p50, ms": lambda r: r.quantile_ms(50),
        "time to first token, p99, ms": lambda r: r.quantile_ms(99),
    }
    for name, figure in rows.items():
        medians = [statistics.median(map(figure, results[router])) for router in ROUTERS]
        spread = [[round(figure(r), 3) for r in results[router]] for router in ROUTERS]
        print(
            f"{name}: {ROUTERS[0]} {medians[0]:.3f}, {ROUTERS[1]} {medians[1]:.3f}, "
            f"ratio {medians[1] / medians[0]:.2f}  {spread}"
        )


if __name__ == "__main__":
    main()
