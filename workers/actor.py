"""The worker as a Ray Serve replica: one engine behind three methods.

Owns the replica's life: load in the constructor, answer, stop the engine at the end. The only
module of this package that knows Ray. Knows no HTTP and no text. Invariants: the actor's event
loop never runs the engine, so health checks are answered while it is busy; importing this module
imports no torch, so that an application can be built and checked where there is none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray import serve

from workers.config import EngineConfig
from workers.contracts import GenerationRequest, TokenDelta, WorkerReport

# Time for the open streams to tell their ingress before the process goes.
EXIT_DELAY_S = 1.0


def _exit_soon() -> None:
    """End the process, whose engine is dead or stuck.

    A replica that only fails its requests has the shortest queue, and draws the traffic until the
    controller has failed its health check three times; a dead process is replaced at once.
    """
    threading.Timer(EXIT_DELAY_S, os._exit, args=(1,)).start()


class Worker:
    """What `deploy.app` wraps into a Serve deployment."""

    def __init__(self, config: EngineConfig) -> None:
        # Here, and not above: they import torch.
        from workers.engine_loop import EngineLoop
        from workers.factory import build_engine
        from workers.watchdog import Watchdog

        engine = build_engine(config)
        self._info = engine.info(serve.get_replica_context().replica_id.unique_id)
        self._loop = EngineLoop(engine, config.stall_timeout_s, on_death=_exit_soon)
        self._watchdog = Watchdog(self._loop.check_health, config.stall_timeout_s, _exit_soon)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream one request; a cancelled stream aborts it in the engine."""
        # Serve cancels this generator when the client goes: the abort must not wait for the
        # garbage collector.
        async with aclosing(self._loop.generate(request)) as stream:
            async for delta in stream:
                yield delta

    async def report(self) -> WorkerReport:
        """Return facts and counters."""
        return WorkerReport(self._info, self._loop.stats)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what routers may know of this worker; Serve asks every few seconds."""
        return await self._loop.routing_stats()

    async def check_health(self) -> None:
        """Raise when the engine is dead or stuck; Serve then replaces the replica."""
        self._loop.check_health()

    def __del__(self) -> None:
        """Stop the worker's threads when Serve drops the replica."""
        for name in ("_watchdog", "_loop"):  # the constructor may have failed
            if part := getattr(self, name, None):
                part.close()
