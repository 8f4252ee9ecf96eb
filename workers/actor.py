"""The worker as a Ray Serve replica: one engine behind a few methods.

Owns the replica's life: load in the constructor, answer, report what was counted, stop the engine
at the end. The only module of this package that knows Ray. Knows no HTTP and no text. Invariants:
the actor's event loop never runs the engine, so health checks are answered while it is busy;
importing this module imports no torch, so that an application can be built and checked where there
is none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from workers.activity import ActivityLog
from workers.config import EngineConfig
from workers.contracts import GenerationRequest, Report, Role, TokenDelta, WorkerInfo
from workers.telemetry.logs import configure, current_request_id
from workers.telemetry.meter import Snapshot
from workers.telemetry.reporter import Reporter
from workers.telemetry.tracing import load_tracing

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

    def __init__(self, config: EngineConfig, metrics: DeploymentHandle) -> None:
        # Here, and not above: they import torch.
        from workers.engine_loop import EngineLoop
        from workers.factory import build_engine
        from workers.phases import PhaseSpans
        from workers.watchdog import Watchdog

        configure(config.telemetry)
        name = serve.get_replica_context().replica_id.unique_id
        engine = build_engine(config)
        engine.on_end = PhaseSpans(load_tracing(config.telemetry, Role.WORKER, name)).ended
        self._info = engine.info(name)
        engine.recorder.introduce(self._info)
        self._metrics = metrics
        self._loop = EngineLoop(engine, config.stall_timeout_s, on_death=_exit_soon)
        self._watchdog = Watchdog(self._loop.check_health, config.stall_timeout_s, _exit_soon)
        self._activity = ActivityLog(config.telemetry.log_interval_s)
        self._reporter = Reporter(Role.WORKER, config.model_id, name, self._count, self._pass_on)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream one request; a cancelled stream aborts it in the engine."""
        # Serve cancels this generator when the client goes: the abort must not wait for the
        # garbage collector.
        current_request_id.set(request.request_id)
        async with aclosing(self._loop.generate(request)) as stream:
            async for delta in stream:
                yield delta

    async def info(self) -> WorkerInfo:
        """Return what runs here."""
        return self._info

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what routers may know of this worker; Serve asks every few seconds."""
        return await self._loop.routing_stats()

    async def check_health(self) -> None:
        """Raise when the engine is dead or stuck; Serve then replaces the replica.

        Serve calls this before the first request, and every few seconds: reports begin here, on
        the event loop, which the constructor does not run on.
        """
        self._reporter.start()
        self._loop.check_health()

    async def _count(self) -> Snapshot:
        snapshot = (await self._loop.stats()).snapshot
        self._activity.show(snapshot, time.monotonic())
        return snapshot

    async def _pass_on(self, report: Report) -> None:
        await self._metrics.take.remote(report)

    async def __del__(self) -> None:
        """Report for the last time and stop the threads, when Serve drops the replica."""
        if reporter := getattr(self, "_reporter", None):  # the constructor may have failed
            snapshot = (await self._loop.stats()).snapshot
            self._activity.show(snapshot, time.monotonic(), is_last=True)
            await reporter.stop()
        for name in ("_watchdog", "_loop"):
            if part := getattr(self, name, None):
                part.close()
