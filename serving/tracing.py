"""The spans of an ingress: of each HTTP request, and of each try on a worker.

Owns how a trace comes in with a request and goes on with it. Knows no routes and no Ray. Invariant:
neither bodies nor headers but the trace's own become part of a span.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace

from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.logs import QUIET_PATHS
from workers.contracts import GenerationRequest, TokenDelta, WorkerClient, WorkerInfo
from workers.telemetry.logs import current_request_id
from workers.telemetry.tracing import TRACEPARENT, Tracing, fail, traceparent_of

# Of the HTTP request at hand.
_current: ContextVar[str] = ContextVar("traceparent", default="")


class TraceRequests:
    """Puts a span around every request but the machines' own."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing, paths: frozenset[str]) -> None:
        """Prepare.

        Args:
            app: What runs the request.
            tracing: Makes the spans.
            paths: Those that a span's name may hold; anybody can ask for any other.
        """
        self._app = app
        self._tracing = tracing
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        span = self._tracing.start(
            f"{method} {path}" if path in self._paths else method,
            Headers(scope=scope).get(TRACEPARENT, ""),
            SpanKind.SERVER,
            {"http.request.method": method, "specserve.request_id": current_request_id.get()},
        )

        async def send_and_look(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        entered = _current.set(traceparent_of(span))
        try:
            await self._app(scope, receive, send_and_look)
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            _current.reset(entered)
            span.end()


class TracedWorkers:
    """A `WorkerClient` whose streams are spans, one for each worker that a request came to."""

    def __init__(self, workers: WorkerClient, tracing: Tracing) -> None:
        self._workers = workers
        self._tracing = tracing

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Stream one request."""
        span = self._tracing.start(
            "generate",
            _current.get(),
            SpanKind.CLIENT,
            {
                "specserve.request_id": request.request_id,
                "specserve.replayed_tokens": len(request.emitted_ids),
            },
        )
        traced = replace(request, traceparent=traceparent_of(span))
        try:
            async with aclosing(self._workers.generate(traced)) as deltas:
                async for delta in deltas:
                    yield delta
        except Exception as error:
            fail(span, error)
            raise
        finally:
            span.end()

    async def info(self) -> WorkerInfo:
        """Return what a worker serves."""
        return await self._workers.info()

    async def check_health(self) -> None:
        """Return when a worker can generate."""
        await self._workers.check_health()
