"""A worker without an engine, for tests of the application around it.

Token number n of an answer is a function of n alone, so a replay on another worker goes on with
the same text. Its worker id is its process id, so that a test can kill the one that it means.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

from workers.config import EngineConfig
from workers.contracts import (
    FinishReason,
    GenerationRequest,
    Report,
    Role,
    TokenDelta,
    WorkerInfo,
)
from workers.errors import GenerationFailed, InvalidRequest, WorkerLost
from workers.telemetry import series
from workers.telemetry.meter import Meter, Snapshot
from workers.telemetry.reporter import Reporter

DELAY_S = 0.02
DEFAULT_TOKENS = 20
# Seeds that ask for a failure.
REFUSED, FAILED, LOST, BUG = 1001, 1002, 1003, 1004
FAILURES = {FAILED: GenerationFailed, LOST: WorkerLost, BUG: ValueError}


def token_at(position: int) -> int:
    return 100 + position * 7 % 150


class FakeWorker:
    def __init__(self, config: EngineConfig, metrics: Any) -> None:
        self._config = config
        self._metrics = metrics
        self._running = 0
        self._meter = Meter(series.FAMILIES)
        for reason in series.FINISH_REASONS:
            self._meter.touch(series.FINISHED, reason)
        info = (self._name, "t", "", "none", "none", "cpu", "float32")
        self._meter.set(series.WORKER_INFO, 1, *info)
        self._meter.set(series.BLOCKS, 64)
        self._reporter = Reporter(
            Role.WORKER, config.model_id, self._name, self._count, self._pass_on, interval_s=0.1
        )

    @property
    def _name(self) -> str:
        return str(os.getpid())

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        seed = request.sampling.seed
        if seed == REFUSED:
            raise InvalidRequest("refused by the worker", "seed")
        self._running += 1
        self._meter.add(series.ADMITTED)
        reason = "abort"
        try:
            num_tokens = request.sampling.max_tokens or DEFAULT_TOKENS
            start = len(request.emitted_ids)
            while start < num_tokens:
                await asyncio.sleep(DELAY_S)
                if seed in FAILURES and start >= 4:
                    reason = "error"
                    raise FAILURES[seed]("x")
                ids = tuple(token_at(i) for i in range(start, min(start + 2, num_tokens)))
                start += len(ids)
                self._meter.add(series.GENERATED_TOKENS, len(ids))
                finish = FinishReason.LENGTH if start == num_tokens else None
                reason = "length" if finish else reason
                yield TokenDelta(request.request_id, start - len(ids), ids, finish)
        finally:
            self._running -= 1
            self._meter.add(series.FINISHED, 1, reason)

    async def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self._name, model_id=self._config.model_id, target="t", draft=None,
            method="none", attention_backend="none", max_sequence_len=2048, num_blocks=64,
            block_size=16, device="cpu", dtype="float32",
        )  # fmt: skip

    async def _count(self) -> Snapshot:
        self._meter.set(series.RUNNING, self._running)
        self._meter.set(series.FREE_BLOCKS, 64 - self._running)
        return self._meter.snapshot()

    async def _pass_on(self, report: Report) -> None:
        await self._metrics.take.remote(report)

    async def record_routing_stats(self) -> dict[str, object]:
        return {"block_size": 16, "lookahead": 0, "prefixes": b""}

    async def check_health(self) -> None:
        self._reporter.start()

    async def __del__(self) -> None:
        await self._reporter.stop()
