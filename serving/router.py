"""Reaches the workers through a Ray Serve handle.

Owns the translation of Ray's exceptions into ours. Knows no HTTP and no text. Invariant: what
leaves here is one of our errors, a defect's own exception, or a cancellation, never a Ray type;
and a stream that is closed early is cancelled on its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from workers.contracts import GenerationRequest, TokenDelta, WorkerInfo
from workers.errors import QueueFull, WorkerLost

# The worker, its process or its node is gone or out of reach; or the replica cancelled the
# request because it is being stopped (our own cancellation arrives as CancelledError instead).
LOST = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    ObjectLostError,
    TaskCancelledError,
    ReplicaUnavailableError,
    DeploymentUnavailableError,
)


@contextmanager
def our_errors() -> Iterator[None]:
    """Translate what a handle raises."""
    try:
        yield
    except BackPressureError as error:
        raise QueueFull(f"too many requests are waiting: {error.message}") from error
    except LOST as error:
        raise WorkerLost(f"{type(error).__name__}: {_first_line(error)}") from error
    except RayTaskError as error:
        # An instance of both Ray's type and the original one, printing the worker's traceback:
        # the original is what the rest of the code knows.
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


class RayWorkerClient:
    """The `WorkerClient` over the workers' deployment handle."""

    def __init__(self, workers: DeploymentHandle, health_timeout_s: float) -> None:
        self._workers = workers
        # Once: each new handle brings its own metrics pusher and long-poll client.
        self._stream = workers.options(method_name="generate", stream=True)
        self._health_timeout_s = health_timeout_s

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream one request from the worker that Serve picks."""
        response = self._stream.remote(request)
        is_over = False
        try:
            with our_errors():
                async for delta in response:
                    is_over = delta.finish_reason is not None
                    yield delta
                is_over = True
        finally:
            if not is_over:
                response.cancel()

    async def info(self) -> WorkerInfo:
        """Ask all workers what they serve."""
        answers = await self._ask("info")
        infos = [answer for answer in answers if isinstance(answer, WorkerInfo)]
        if not infos:
            raise WorkerLost("no worker said what it serves")
        return min(infos, key=lambda info: info.max_sequence_len)

    async def check_health(self) -> None:
        """Ask all workers whether they can generate; one that can is enough."""
        if None not in await self._ask("check_health"):  # what it returns
            raise WorkerLost("no worker can generate")

    async def _ask(self, method: str) -> list[object]:
        """Return the workers' answers, or their errors.

        A broadcast does not wait in the queue of requests, so workers that are only busy answer.
        """
        response = self._workers.broadcast(method)
        try:
            with our_errors():
                answers: list[object] = await response.results_async(
                    timeout_s=self._health_timeout_s, return_exceptions=True
                )
                return answers
        except TimeoutError:
            # One hangs, and a broadcast shows none of the answers then: another one may do.
            return [await self._ask_one(method)]

    async def _ask_one(self, method: str) -> object:
        response = getattr(self._workers, method).remote()
        try:
            with our_errors():
                return await asyncio.wait_for(_await(response), self._health_timeout_s)
        except TimeoutError as error:
            response.cancel()
            raise WorkerLost(f"no worker answered in {self._health_timeout_s:g} s") from error


async def _await(response: object) -> object:
    return await response  # type: ignore[misc]  # Serve's is awaitable, and no coroutine


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
