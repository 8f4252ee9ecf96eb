"""Keeps one request's stream going while workers come and go.

Owns the tokens that the client already has, and the decision to replay. Knows no Ray, no text and
no HTTP: it sees a `WorkerClient`. Invariant: the deltas it yields are contiguous from the first
token to exactly one terminal delta, or it raises; no token is yielded twice; an error of the
request itself is never replayed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from serving.counters import IngressCounters
from serving.errors import StreamLost
from serving.keepalive import Peekable
from workers.contracts import FinishReason, GenerationRequest, TokenDelta, WorkerClient
from workers.errors import QueueFull, WorkerLost

logger = logging.getLogger(__name__)

# The first replay is immediate. Later ones wait 1, 3, 7, ... times this: the worker that fails
# fastest has the shortest queue and is picked again until Serve has noticed.
DEFAULT_BACKOFF_S = 1.0
# How often a request that waits for its first token looks whether there is a worker.
LOOK_S = 5.0


class NoWorkerLeft(WorkerLost):
    """There has been no worker for too long."""


class WorkerWatch:
    """Knows since when there has been no worker; asks once for all who want to know."""

    def __init__(
        self,
        workers: WorkerClient,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._wait_s = wait_s
        self._clock = clock
        self._gone_since_s: float | None = None
        self._asking: asyncio.Future[None] | None = None

    async def check(self) -> None:
        """Return while there is hope.

        Raises:
            NoWorkerLeft: For as long as a request may wait, none was there.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        await asyncio.shield(self._asking)
        since_s = self._gone_since_s
        if since_s is not None and self._clock() - since_s >= self._wait_s:
            raise NoWorkerLeft(f"there has been no worker for {self._wait_s:g} s")

    async def _ask(self) -> None:
        try:
            await self._workers.check_health()
        except WorkerLost:
            if self._gone_since_s is None:
                self._gone_since_s = self._clock()
        else:
            self._gone_since_s = None


class _Totals:
    """What the workers of one request counted, as one worker would have."""

    def __init__(self) -> None:
        # Of the workers that are gone, and of all with the present one.
        self._before = self._now = (0, 0, 0, 0)
        self._is_begun = False

    def add(self, delta: TokenDelta) -> TokenDelta:
        """Return the delta with the totals of all workers; the prompt is scored once."""
        own = (
            delta.num_draft_tokens, delta.num_accepted_tokens, delta.num_steps, delta.num_fallbacks
        )  # fmt: skip
        drafts, accepted, steps, fallbacks = self._now = (
            own[0] + self._before[0], own[1] + self._before[1],
            own[2] + self._before[2], own[3] + self._before[3],
        )  # fmt: skip
        scores = None if self._is_begun else delta.prompt_logprobs
        self._is_begun = True
        if self._now == own and scores is delta.prompt_logprobs:
            return delta
        return replace(
            delta, num_draft_tokens=drafts, num_accepted_tokens=accepted, num_steps=steps,
            num_fallbacks=fallbacks, prompt_logprobs=scores,
        )  # fmt: skip

    def end_worker(self) -> None:
        """Keep what a worker counted: the next one begins at zero."""
        self._before = self._now

    def without_scores(self, request: GenerationRequest) -> GenerationRequest:
        """Ask for the prompt's log-probabilities only until the client has them."""
        if not self._is_begun or request.sampling.num_prompt_logprobs is None:
            return request
        return replace(request, sampling=replace(request.sampling, num_prompt_logprobs=None))


class Relay:
    """Runs requests on workers, each again on another one while its worker is lost."""

    def __init__(
        self,
        workers: WorkerClient,
        max_replays: int,
        backoff_s: float = DEFAULT_BACKOFF_S,
        *,
        worker_wait_s: float = 30.0,
        look_s: float = LOOK_S,
        counters: IngressCounters | None = None,
    ) -> None:
        """Prepare; nothing is asked before a request runs.

        Args:
            workers: Who generates.
            max_replays: Workers that one request may lose before it is given up.
            backoff_s: Unit of the waits between replays.
            worker_wait_s: How long a request waits while there is no worker at all.
            look_s: How often a request that waits for its first token looks whether there is.
            counters: Where losses and replays are counted; None = its own.
        """
        self._workers = workers
        self._max_replays = max_replays
        self._backoff_s = backoff_s
        self._look_s = look_s
        self._watch = WorkerWatch(workers, worker_wait_s)
        self.counters = IngressCounters() if counters is None else counters

    async def run(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream the request's deltas to its terminal one; closing this aborts the request.

        Raises:
            StreamLost: Interrupted more than `max_replays` times.
            RequestError: The request was refused or failed.
        """
        emitted: list[int] = list(request.emitted_ids)
        totals = _Totals()
        lost_s = 0.0
        for attempt in range(self._max_replays + 1):
            if attempt:
                self.counters.replayed(len(emitted))
                await asyncio.sleep(self._backoff_s * (2 ** (attempt - 1) - 1))
            resumed = totals.without_scores(request.resume_after(emitted))
            is_first = True
            try:
                async with aclosing(Peekable(self._workers.generate(resumed))) as stream:
                    await self._wait_for_first(stream)
                    async for delta in stream:
                        fresh = totals.add(self._fresh(delta, len(emitted)))
                        emitted.extend(fresh.token_ids)
                        if attempt and is_first:
                            self.counters.resumed(time.perf_counter() - lost_s)
                        is_first = False
                        yield fresh
                        if fresh.finish_reason is not None:
                            return
                raise WorkerLost("the stream ended without a terminal delta")
            except NoWorkerLeft:
                if attempt == 0:
                    raise  # nothing was lost
                break
            except (WorkerLost, QueueFull) as error:
                if isinstance(error, QueueFull) and attempt == 0:
                    raise  # nothing was lost: the client may try again itself
                totals.end_worker()
                lost_s = time.perf_counter()
                self.counters.interrupted()
                logger.warning(
                    "request %s lost its worker after %d tokens (attempt %d): %s",
                    request.request_id, len(emitted), attempt + 1, error,
                )  # fmt: skip
        self.counters.lost()
        raise StreamLost(f"interrupted {attempt + 1} times; no worker finished it")

    async def _wait_for_first(self, stream: Peekable[TokenDelta]) -> None:
        """Wait for the first delta, but not for workers that do not come back.

        Serve lets a request wait for a replica as long as there is none.

        Raises:
            NoWorkerLeft: They did not.
        """
        try:
            while not await stream.peek(self._look_s):
                await self._watch.check()
        except StopAsyncIteration:
            raise WorkerLost("the stream ended before its first delta") from None

    @staticmethod
    def _fresh(delta: TokenDelta, num_emitted: int) -> TokenDelta:
        """Return the part of `delta` that the client does not have."""
        if delta.start > num_emitted:
            raise WorkerLost(f"tokens {num_emitted} to {delta.start} are missing")
        if delta.finish_reason is FinishReason.ABORT:
            # We did not abort it: a worker that is being stopped did.
            raise WorkerLost("the worker aborted the request")
        return delta.after(num_emitted)
