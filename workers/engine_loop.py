"""The engine's thread, and asyncio's way to it.

Owns the thread that steps the engine, the mailbox to it and one queue per stream. Knows no Ray and
no HTTP. Commands go in through the mailbox and run between steps; results come out once per step
for all requests together, so the asyncio loop wakes once a step and not once a token.

Invariants: only the engine's thread touches the engine (but for `prepare`, made for it); every
stream ends with a finish reason or an exception, also when the thread dies; a stream gets its own
run's deltas only, since each run has a key of its own and a request id may come again (a replay).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from workers.contracts import GenerationRequest, TokenDelta
from workers.engine import Engine, StepResult
from workers.errors import RequestError, SpecserveError, WorkerLost
from workers.stats import EngineStats

logger = logging.getLogger(__name__)

T = TypeVar("T")
# How long a step may take before its counters are told as they were.
STATS_TIMEOUT_S = 1.0

_Event = TokenDelta | SpecserveError


class EngineLoop:
    """Runs an engine in a thread of its own and streams to one asyncio loop."""

    def __init__(
        self,
        engine: Engine,
        stall_timeout_s: float = 20.0,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        # Called on the engine's thread when it ended by an error, after its streams were told.
        self._on_death = on_death
        self._keys = itertools.count()
        # On the asyncio loop: run key -> its stream.
        self._streams: dict[str, asyncio.Queue[_Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        # Shared with the thread, under the condition's lock.
        self._wake = threading.Condition()
        self._mailbox: list[Callable[[], None]] = []
        self._stopping = False
        # Why nothing is accepted any more; None while the thread runs.
        self._end: str | None = None
        # As of the last time that somebody asked.
        self._stats = engine.stats()
        # Since when the thread works on one step or on its mailbox, on the monotonic clock; None
        # while there is nothing to do.
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream a request; closing the iterator early aborts it.

        Raises:
            RequestError: It was refused, or failed on its own.
            WorkerLost: The engine died or is stuck.
        """
        self.check_health()
        self._loop = asyncio.get_running_loop()
        if request.sampling.grammar is not None:
            await asyncio.to_thread(self._engine.prepare, request)
        key = f"{request.request_id}#{next(self._keys)}"
        queue = self._streams[key] = asyncio.Queue()
        over = False
        try:
            self._post(partial(self._add, replace(request, request_id=key)))
            while not over:
                event = await queue.get()
                over = not isinstance(event, TokenDelta) or event.finish_reason is not None
                if isinstance(event, SpecserveError):
                    raise event
                yield replace(event, request_id=request.request_id)
        finally:
            del self._streams[key]
            if not over and self._end is None:
                with contextlib.suppress(WorkerLost):  # it died meanwhile, and its blocks with it
                    self._post(partial(self._engine.abort, key))

    async def routing_stats(self) -> dict[str, Any]:
        """Return what a router may know, as of between two steps.

        Raises:
            WorkerLost: The engine died.
        """
        return await self._ask(self._engine.routing_stats)

    async def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> EngineStats:
        """Return the engine's counters, as of between two steps.

        Those that it last told, where it is stuck or dead: they are not lost with it.
        """
        with contextlib.suppress(WorkerLost, TimeoutError):
            self._stats = await asyncio.wait_for(self._ask(self._engine.stats), timeout_s)
        return self._stats

    async def _ask(self, question: Callable[[], T]) -> T:
        """Return what a function says on the engine's thread.

        Raises:
            WorkerLost: The engine died.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def resolve(answer: T) -> None:
            if not future.done():  # whoever asked may have given up
                future.set_result(answer)

        def answer() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(resolve, question())

        self._post(answer)
        return await future

    def check_health(self) -> None:
        """Return if the engine lives and gets on with what it has to do.

        Raises:
            WorkerLost: It does not.
        """
        if self._end is not None:
            raise WorkerLost(f"the engine stopped: {self._end}")
        since_s = self._busy_since_s
        if since_s is not None and time.monotonic() - since_s > self._stall_timeout_s:
            raise WorkerLost(f"a step has been running for over {self._stall_timeout_s:g} s")

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the thread after its present step; open streams end with WorkerLost."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._end is not None:
                raise WorkerLost(f"the engine stopped: {self._end}")
            self._mailbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        end = "it was closed"
        try:
            while self._wait_for_work():
                self._busy_since_s = time.monotonic()
                result = self._engine.step()
                if result.deltas or result.failures:
                    self._call(partial(self._deliver, result))
        except Exception as error:
            # The engine's state is unknown now: crash loudly, and let another worker replay.
            logger.exception("the engine thread died")
            end = repr(error)
        finally:
            # In this order: a stream that is registered later is refused by `_post`.
            with self._wake:
                self._end = end
            self._call(partial(self._end_streams, end))
        if not self._stopping:
            self._on_death()

    def _wait_for_work(self) -> bool:
        """Run the mailbox; return whether there is a step to run, or False to stop."""
        while True:
            with self._wake:
                while not (self._mailbox or self._stopping or self._engine.has_work):
                    self._busy_since_s = None
                    self._wake.wait()
                self._busy_since_s = time.monotonic()
                commands, self._mailbox = self._mailbox, []
                if self._stopping:
                    return False
            for command in commands:
                command()
            if self._engine.has_work:
                return True

    def _add(self, request: GenerationRequest) -> None:
        try:
            self._engine.add(request)
        except RequestError as error:
            result = StepResult(failures={request.request_id: error})
            self._call(partial(self._deliver, result))

    def _call(self, function: Callable[[], None]) -> None:
        """Run a function on the asyncio loop, if there ever was one and it still runs."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(function)

    def _deliver(self, result: StepResult) -> None:
        """Hand a step's results to their streams (on the asyncio loop)."""
        for delta in result.deltas:
            if delta.request_id in self._streams:
                self._streams[delta.request_id].put_nowait(delta)
        for key, error in result.failures.items():
            if key in self._streams:
                self._streams[key].put_nowait(error)

    def _end_streams(self, end: str) -> None:
        for queue in self._streams.values():
            queue.put_nowait(WorkerLost(f"the engine stopped: {end}"))
