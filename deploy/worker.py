"""The worker as `deploy.app` deploys it: loaded late, and with its report for the exporter.

Owns when the engine's code is imported. Knows nothing of the engine beyond the worker's methods.
Invariant: importing this module imports no torch, so that settings can be checked and an
application built where there is none.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from workers.config import EngineConfig
from workers.contracts import EngineStats, GenerationRequest, TokenDelta, WorkerInfo

WORKER_CLASS = "workers.actor:Worker"


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's facts and counters, taken together so that they cannot be mixed up."""

    info: WorkerInfo
    stats: EngineStats


class WorkerLike(Protocol):
    """What the wrapped class offers."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]: ...  # noqa: D102
    async def info(self) -> WorkerInfo: ...  # noqa: D102
    async def stats(self) -> EngineStats: ...  # noqa: D102
    async def check_health(self) -> None: ...  # noqa: D102


class WorkerReplica:
    """One worker; `worker_class` is `module:name`, imported in the replica."""

    def __init__(self, config: EngineConfig, worker_class: str = WORKER_CLASS) -> None:
        module, _, name = worker_class.partition(":")
        self._worker: WorkerLike = getattr(importlib.import_module(module), name)(config)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream one request; cancelling this aborts it."""
        async with aclosing(self._worker.generate(request)) as stream:
            async for delta in stream:
                yield delta

    async def info(self) -> WorkerInfo:
        """Return the worker's facts."""
        return await self._worker.info()

    async def report(self) -> WorkerReport:
        """Return facts and counters."""
        return WorkerReport(await self._worker.info(), await self._worker.stats())

    async def check_health(self) -> None:
        """Raise when the worker cannot generate; Serve then replaces it."""
        await self._worker.check_health()
