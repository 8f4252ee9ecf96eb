"""Passes what a process has counted on to whoever shows it.

Owns when: soon after a change, and every so often without one, so that silence means something.
Knows no series and no Ray. Invariant: a report that cannot be passed on costs nothing but a warning
and the time until the next one, which holds all that it held.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable

from workers.contracts import Report, Role
from workers.telemetry.meter import Snapshot

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Without any change. Whoever is silent for much longer is gone.
HEARTBEAT_S = 3.0
# For one report to be taken; and for the last one, which holds up the end of the process.
PUSH_TIMEOUT_S = 5.0
LAST_TIMEOUT_S = 2.0


class Reporter:
    """Reports for one process, on its event loop."""

    def __init__(
        self,
        role: Role,
        model_id: str,
        source: str,
        read: Callable[[], Awaitable[Snapshot]],
        push: Callable[[Report], Awaitable[None]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            role: What the process is.
            model_id: What it serves.
            source: Its name, which no other process has or will have.
            read: Returns its counters.
            push: Takes a report; what it raises is logged.
            interval_s: Between two looks.
        """
        self._role = role
        self._model_id = model_id
        self._source = source
        self._read = read
        self._push = push
        self._interval_s = interval_s
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop; again, it does nothing while that goes on."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def report(self, *, is_last: bool = False) -> Report:
        """Return what there is to report now."""
        snapshot = await self._read()
        return Report(
            self._role, self._model_id, self._source, next(self._numbers), snapshot, is_last
        )

    async def stop(self) -> None:
        """Report for the last time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._send(await self.report(is_last=True), LAST_TIMEOUT_S)

    async def _run(self) -> None:
        sent: Snapshot = {}
        sent_s = float("-inf")
        while True:
            report = await self.report()
            is_due = time.monotonic() - sent_s >= HEARTBEAT_S
            if (is_due or report.snapshot != sent) and await self._send(report):
                sent, sent_s = report.snapshot, time.monotonic()
            await asyncio.sleep(self._interval_s)

    async def _send(self, report: Report, timeout_s: float = PUSH_TIMEOUT_S) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._push(report)
        except Exception as error:  # noqa: BLE001 - numbers are no reason to fail anything
            logger.warning("the counters were not passed on: %r", error)
            return False
        return True
