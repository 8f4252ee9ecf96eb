"""What an ingress counts.

Owns when each series of an ingress changes. Knows no metrics library and no Ray: the exporter reads
snapshots. On the event loop only. Invariant: what a worker counted is not among it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from serving import series
from serving.errors import StreamLost
from serving.textstream import TextDelta
from workers.contracts import FinishReason
from workers.errors import GenerationFailed, RequestError, WorkerLost
from workers.telemetry.meter import Family, Meter, Snapshot, total
from workers.telemetry.series import MODALITIES

# Requests that this process's router has sent, by decision. Serve makes the router itself, and
# hands it nothing of ours.
ROUTED: Counter[str] = Counter()
MODELS_PREFIX = "/v1/models/"
METHODS = ("GET", "POST", "OPTIONS", "HEAD")


class IngressCounters:
    """One ingress process's."""

    def __init__(self, routes: tuple[tuple[str, str], ...] = ()) -> None:
        """Let every series exist.

        Args:
            routes: Path and method of the routes; others are counted together.
        """
        self._meter = meter = Meter(series.FAMILIES)
        self._paths = frozenset(path for path, _ in routes)
        for path, method in routes:
            meter.touch(series.HTTP_REQUESTS, path, method, "200")
            meter.touch(series.HTTP_SECONDS, path)
        for modality in MODALITIES:
            for family in (series.STARTED, series.FIRST_TOKEN_SECONDS, series.STREAM_SECONDS):
                meter.touch(family, modality)
        for outcome in series.OUTCOMES:
            meter.touch(series.FINISHED, outcome)
        for source in series.IMAGE_SOURCES:
            meter.touch(series.IMAGES, source)
        self._num_open_requests = self._num_open_streams = 0

    async def snapshot(self) -> Snapshot:
        """Return all values as of now."""
        meter = self._meter
        meter.set(series.HTTP_OPEN, self._num_open_requests)
        meter.set(series.OPEN, self._num_open_streams)
        for decision in series.DECISIONS:
            meter.set(series.ROUTED, ROUTED[decision], decision)
        return meter.snapshot()

    def value(self, family: Family, **labels: str) -> float:
        """Return a counter's sum over its series with these label values."""
        return total(self._meter.snapshot(), family, **labels)

    def request_started(self) -> None:
        """Count an HTTP request in."""
        self._num_open_requests += 1

    def request_ended(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an HTTP request out."""
        self._num_open_requests -= 1
        route = self._route(path)
        method = method if method in METHODS else "other"
        self._meter.add(series.HTTP_REQUESTS, 1, route, method, str(status))
        self._meter.observe(series.HTTP_SECONDS, seconds, route)

    def _route(self, path: str) -> str:
        if path in self._paths:
            return path
        model = f"{MODELS_PREFIX}{{model_id:path}}"
        return model if path.startswith(MODELS_PREFIX) and model in self._paths else "other"

    async def timed(
        self,
        deltas: AsyncGenerator[TextDelta, None],
        modality: str,
        arrived_s: float,
        is_late: Callable[[], bool],
    ) -> AsyncGenerator[TextDelta, None]:
        """Pass an answer's deltas on, and count how they come and what becomes of it.

        Args:
            deltas: The answer.
            modality: What its request holds.
            arrived_s: When that arrived, on the clock of `time.perf_counter`.
            is_late: Whether its time is over; asked when it was closed before its end.
        """
        meter = self._meter
        meter.add(series.STARTED, 1, modality)
        self._num_open_streams += 1
        outcome, last_s = "abort", None
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    last_s = self._tokens(len(delta.token_ids), last_s, arrived_s, modality)
                    if delta.finish_reason is not None:  # whoever reads may close it at once
                        outcome = _finish(delta)
                    yield delta
        except Exception as error:
            outcome = _failure(error)
            raise
        finally:
            if outcome == "abort" and is_late():
                outcome = "timeout"
            self._num_open_streams -= 1
            meter.add(series.FINISHED, 1, outcome)
            meter.observe(series.STREAM_SECONDS, time.perf_counter() - arrived_s, modality)

    def _tokens(
        self, num_tokens: int, last_s: float | None, arrived_s: float, modality: str
    ) -> float | None:
        """Count tokens that came now; return when the last one came."""
        if not num_tokens:
            return last_s
        now_s = time.perf_counter()
        if last_s is None:
            self._meter.observe(series.FIRST_TOKEN_SECONDS, now_s - arrived_s, modality)
        else:
            wait_s = (now_s - last_s) / num_tokens
            self._meter.observe(series.TOKEN_SECONDS_BETWEEN, wait_s, times=num_tokens)
        return now_s

    def interrupted(self) -> None:
        """Count a stream that lost its worker."""
        self._meter.add(series.INTERRUPTED)

    def replayed(self, num_tokens: int) -> None:
        """Count a replay, by the tokens it takes along."""
        self._meter.add(series.REPLAYED_TOKENS, num_tokens)

    def resumed(self, seconds: float) -> None:
        """Count a replay that went on, so long after the loss."""
        self._meter.add(series.RESUMED)
        self._meter.observe(series.RESUME_SECONDS, seconds)

    def lost(self) -> None:
        """Count a stream that was given up."""
        self._meter.add(series.LOST)

    def timed_out(self) -> None:
        """Count a request that ran out of time."""
        self._meter.add(series.TIMED_OUT)

    def images_loaded(self, by_source: Counter[str], seconds: float) -> None:
        """Count a request's images, and the time they took."""
        for source, number in by_source.items():
            self._meter.add(series.IMAGES, number, source)
        self._meter.observe(series.IMAGE_SECONDS, seconds)


def _finish(delta: TextDelta) -> str:
    if delta.finish_reason is FinishReason.STOP and delta.num_calls:
        return "tool_calls"
    return str(delta.finish_reason)


def _failure(error: Exception) -> str:
    """Return what became of a stream that ended with an error."""
    if isinstance(error, RequestError):
        return "error" if isinstance(error, GenerationFailed) else "refused"
    return "lost" if isinstance(error, StreamLost | WorkerLost) else "error"
