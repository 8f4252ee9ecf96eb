"""A worker without an engine, for tests of the application around it.

Token number n of an answer is a function of n alone, so a replay on another worker goes on with
the same text. Its worker id is its process id, so that a test can kill the one that it means.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator

from workers.config import EngineConfig
from workers.contracts import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    TokenDelta,
    WorkerInfo,
    WorkerReport,
)
from workers.errors import GenerationFailed, InvalidRequest, WorkerLost

DELAY_S = 0.02
DEFAULT_TOKENS = 20
# Seeds that ask for a failure.
REFUSED, FAILED, LOST, BUG = 1001, 1002, 1003, 1004
FAILURES = {FAILED: GenerationFailed, LOST: WorkerLost, BUG: ValueError}


def token_at(position: int) -> int:
    return 100 + position * 7 % 150


class FakeWorker:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._running = 0
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._tokens = 0
        self._accepted = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        seed = request.sampling.seed
        if seed == REFUSED:
            raise InvalidRequest("refused by the worker", "seed")
        self._running += 1
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
                self._tokens += len(ids)
                finish = FinishReason.LENGTH if start == num_tokens else None
                reason = "length" if finish else reason
                yield TokenDelta(request.request_id, start - len(ids), ids, finish)
        finally:
            self._running -= 1
            self._finished[reason] += 1

    async def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=str(os.getpid()), model_id=self._config.model_id, target="t", draft=None,
            method="none", attention_backend="none", max_sequence_len=2048, num_blocks=64,
            block_size=16, device="cpu", dtype="float32",
        )  # fmt: skip

    async def report(self) -> WorkerReport:
        stats = EngineStats(
            admitted=self._running + sum(self._finished.values()),
            finished=dict(self._finished),
            num_running=self._running,
            generated_tokens=self._tokens,
            num_blocks=64,
            num_free_blocks=64 - self._running,
        )
        return WorkerReport(await self.info(), stats)

    async def record_routing_stats(self) -> dict[str, object]:
        return {"block_size": 16, "lookahead": 0, "prefixes": b""}

    async def check_health(self) -> None:
        return
