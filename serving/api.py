"""The HTTP app: routes, their order of work, and how errors leave.

Owns which path does what. Knows no Ray: what it needs comes in as `Services`. Invariant: an
accepted request ends in exactly one terminal event, and an error before the first token is a
real HTTP status.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from serving.disconnect import ClientDisconnectedError, while_connected
from serving.errors import HttpError, ModelNotFound, from_validation, to_http
from serving.middleware import BodyLimit, ErrorBoundary, RequestIds
from serving.prompts import PromptBuilder
from serving.relay import Relay
from serving.responses import Model, ModelList
from serving.schema import ChatBody, CompletionBody, GenerationBody
from serving.streaming import AnswerFormat, EventStream, collect, events
from serving.textstream import TextDelta, TextRequest, stream_text
from workers.contracts import WorkerClient
from workers.errors import SpecserveError

# Prometheus' text format.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# nginx's status for a client that went before its answer.
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True, eq=False)
class Services:
    """All that the routes need."""

    # The name clients use in "model".
    model_id: str
    prompts: PromptBuilder
    workers: WorkerClient
    relay: Relay
    # Returns the metrics of all workers as Prometheus text.
    metrics: Callable[[], Awaitable[str]]
    max_body_bytes: int
    # False where a proxy in front adds `x-request-id` to answers itself.
    echoes_request_id: bool = True
    created: int = field(default_factory=lambda: int(time.time()))


class Routes:
    """The handlers, over one set of services."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat_completions(self, body: ChatBody, http: Request) -> Response:
        """Answer a chat."""
        self._check_model(body)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        request = await self._services.prompts.chat(body, request_id)
        return await self._answer("chat", body, request, http)

    async def completions(self, body: CompletionBody, http: Request) -> Response:
        """Continue a text."""
        self._check_model(body)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        request = await self._services.prompts.completion(body, request_id)
        return await self._answer("completion", body, request, http)

    async def models(self) -> Response:
        """List the one model that is served."""
        model = Model(id=self._services.model_id, created=self._services.created)
        return JSONResponse(ModelList(data=[model]).model_dump())

    async def health(self) -> Response:
        """Say whether a worker can generate; 503 when none can."""
        await self._services.workers.check_health()
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Show the workers' counters and gauges."""
        return PlainTextResponse(await self._services.metrics(), media_type=METRICS_TYPE)

    def _check_model(self, body: GenerationBody) -> None:
        served = self._services.model_id
        if body.model != served:
            raise ModelNotFound(f"model {body.model!r} is not served; {served!r} is", "model")

    async def _answer(
        self,
        kind: Literal["chat", "completion"],
        body: GenerationBody,
        request: TextRequest,
        http: Request,
    ) -> Response:
        answer = AnswerFormat(
            kind=kind,
            id=request.generation.request_id,
            created=int(time.time()),
            model=self._services.model_id,
            include_usage=body.include_usage,
        )
        deltas = self._generate(request)
        if not body.stream:
            return JSONResponse(await while_connected(http.receive, collect(answer, deltas)))
        # Wait for the first delta before any header goes out: until then, an error is a status.
        first = await while_connected(http.receive, _first(deltas))
        return EventStream(events(answer, first, deltas), deltas)

    def _generate(self, request: TextRequest) -> AsyncGenerator[TextDelta, None]:
        deltas = self._services.relay.run(request.generation)
        return stream_text(request, self._services.prompts.tokenizer, deltas)


# The whole API on one page: path, method, handler.
ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("/v1/chat/completions", "POST", Routes.chat_completions),
    ("/v1/completions", "POST", Routes.completions),
    ("/v1/models", "GET", Routes.models),
    ("/health", "GET", Routes.health),
    ("/metrics", "GET", Routes.metrics),
)


def build_api(services: Services) -> FastAPI:
    """Build the app."""
    app = FastAPI(title="specserve", docs_url=None, redoc_url=None)
    routes = Routes(services)
    router = APIRouter()
    for path, method, handler in ROUTES:
        bound = handler.__get__(routes)
        router.add_api_route(path, bound, methods=[method], response_model=None)
    app.include_router(router)
    app.add_exception_handler(SpecserveError, _on_typed_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)
    # Last added runs first: ids, then the boundary that logs them, then the limit.
    app.add_middleware(BodyLimit, max_bytes=services.max_body_bytes)
    app.add_middleware(ErrorBoundary)
    app.add_middleware(RequestIds, is_echoed=services.echoes_request_id)
    return app


async def _first(deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
    return await anext(deltas)


def _respond(http: HttpError) -> Response:
    return JSONResponse(http.body(), http.status, http.headers())


async def _on_typed_error(_: Request, error: Exception) -> Response:
    return _respond(to_http(error))


async def _on_invalid_body(_: Request, error: Exception) -> Response:
    details = error.errors() if isinstance(error, RequestValidationError) else []
    return _respond(from_validation(details))


async def _on_http_exception(_: Request, error: Exception) -> Response:
    """Give the framework's own refusals (unknown path, wrong method) OpenAI's shape."""
    assert isinstance(error, HTTPException)
    http = HttpError(
        error.status_code, "invalid_request_error", None, f"{error.detail}", None, None
    )
    return JSONResponse(http.body(), http.status, error.headers)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    # Nobody reads it; for logs and counters, the client's doing and no failure of ours.
    return Response(status_code=CLIENT_CLOSED_REQUEST)
