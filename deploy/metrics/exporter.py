"""The exporter as a Ray Serve deployment of a single replica.

Owns the ledger's life: loaded at the start, saved with every report before it counts. Knows no
series. Invariants: one process renders all of it, and nothing that was not saved: so whichever
ingress is asked, and whichever process has been replaced, the exporter itself included, no counter
falls; and a process that hangs delays no scrape, since none is asked.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time

import ray

from deploy.metrics.ledger import Ledger
from deploy.metrics.store import RayStore, Store, load, save
from deploy.metrics.text import Build, render
from serving.version import installed_version
from workers.contracts import Report
from workers.telemetry.config import TelemetryConfig
from workers.telemetry.logs import configure

logger = logging.getLogger(__name__)


class MetricsExporter:
    """What `deploy.app` wraps into a Serve deployment."""

    def __init__(self, app_name: str, telemetry: TelemetryConfig) -> None:
        configure(telemetry)
        self._store: Store = RayStore(app_name)
        self._ledger: Ledger = load(self._store, time.monotonic())
        self._build: Build = (installed_version(), platform.python_version(), ray.__version__)
        # Reports are saved one after the other.
        self._saving = asyncio.Lock()

    async def take(self, report: Report) -> None:
        """Keep what a process has counted."""
        async with self._saving:
            entry = self._ledger.plan(report, time.monotonic())
            if entry is None:
                return
            try:
                await asyncio.to_thread(save, self._store, entry)
            except Exception as error:  # noqa: BLE001 - to show nothing would be worse
                logger.warning("the counters of %s were not saved: %r", report.source, error)
            self._ledger.commit(entry)

    async def render(self, report: Report) -> str:
        """Return everything as Prometheus' text, with what the ingress that asks has counted."""
        await self.take(report)
        return render(self._ledger, self._build, time.monotonic())
