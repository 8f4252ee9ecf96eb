"""The HTTP app: routes, their order of work, and how errors leave.

Owns which path does what. Knows no Ray: what it needs comes in as `Services`. Invariant: an
accepted request ends in exactly one terminal event, and an error before the first token is a
real HTTP status.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from serving.answers import AnswerFormat
from serving.auth import ApiKeys, KeyCheck
from serving.choices import fan_out, merge
from serving.counters import IngressCounters
from serving.deadline import Deadline
from serving.disconnect import ClientDisconnectedError, while_connected
from serving.errors import HttpError, ModelNotFound, from_validation, to_http
from serving.keepalive import Peekable, with_keep_alive
from serving.logs import CLIENT_CLOSED_REQUEST, AccessLog
from serving.middleware import BodyLimit, ErrorBoundary, OpenLimit, RequestIds, cross_origin
from serving.models import ModelList, ServedModel
from serving.openapi import route_options
from serving.page import Page
from serving.prompts import PromptBuilder
from serving.relay import Relay
from serving.schema import ChatBody, CompletionBody, GenerationBody
from serving.schema_tools import (
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokens,
    ToolBody,
)
from serving.streaming import EventStream, collect, events
from serving.textstream import TextDelta, TextRequest, stream_text
from serving.tokenization import Tokenization
from serving.tracing import TraceRequests
from serving.version import installed_version
from workers.contracts import WorkerClient
from workers.errors import SpecserveError
from workers.telemetry.tracing import Tracing

# Paths and methods that are counted apart.
COUNTED = (
    ("/", "GET"), ("/v1/chat/completions", "POST"), ("/v1/completions", "POST"),
    ("/v1/models", "GET"), ("/v1/models/{model_id:path}", "GET"), ("/tokenize", "POST"),
    ("/detokenize", "POST"), ("/version", "GET"), ("/health", "GET"), ("/metrics", "GET"),
)  # fmt: skip
# Prometheus' text format.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
    # Requests with a body at once.
    max_open: int = 1024
    # How long a stream may send nothing before a comment goes out; None = for ever. Also how long
    # its headers wait for the first token.
    keep_alive_s: float | None = 15.0
    # After which any request is given up; None = never.
    max_request_s: float | None = None
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    # Whose pages may ask from a browser.
    cors_origins: tuple[str, ...] = ()
    has_access_log: bool = True
    counters: IngressCounters = field(default_factory=lambda: IngressCounters(COUNTED))
    tracing: Tracing = field(default_factory=Tracing)
    # False where a proxy in front adds `x-request-id` to answers itself.
    echoes_request_id: bool = True


class Routes:
    """The handlers, over one set of services."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._page = Page.load()
        self._model = ServedModel(services.model_id, services.prompts, services.workers)
        self._tokenization = Tokenization(services.prompts)

    async def page(self, http: Request) -> Response:
        """Show the chat page."""
        return self._page.respond(http.headers.get("if-none-match", ""))

    async def chat_completions(self, body: ChatBody, http: Request) -> Response:
        """Answer a chat."""
        self._check_model(body.model)
        request_id = f"chatcmpl-{http.state.request_id}"
        deadline = self._deadline(body)
        request = await deadline.wait_for(self._services.prompts.chat(body, request_id))
        return await self._answer("chat", body, (request,), http, deadline)

    async def completions(self, body: CompletionBody, http: Request) -> Response:
        """Continue a text."""
        self._check_model(body.model)
        request_id = f"cmpl-{http.state.request_id}"
        deadline = self._deadline(body)
        requests = await self._services.prompts.completions(body, request_id)
        return await self._answer("completion", body, requests, http, deadline)

    async def models(self) -> Response:
        """List the one model that is served."""
        return JSONResponse(ModelList(data=[await self._model.entry()]).model_dump())

    async def model(self, model_id: str) -> Response:
        """Describe the model, if it is the one that is served."""
        self._check_model(model_id)
        return JSONResponse((await self._model.entry()).model_dump())

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Return the token ids of a text or a chat."""
        self._check_tool_model(body)
        ids = await self._tokenization.encode(body)
        tokens = Tokens(
            count=len(ids), max_model_len=await self._model.max_model_len(), tokens=list(ids)
        )
        if body.return_token_strs:
            tokens.token_strs = await self._tokenization.strings(ids)
        return JSONResponse(tokens.model_dump(exclude_unset=True))

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Return the text of token ids."""
        self._check_tool_model(body)
        return JSONResponse(Detokenized(prompt=await self._tokenization.decode(body)).model_dump())

    async def version(self) -> Response:
        """Say what runs here."""
        return JSONResponse({"version": installed_version()})

    async def health(self) -> Response:
        """Say whether a worker can generate; 503 when none can."""
        await self._services.workers.check_health()
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Show the workers' counters and gauges."""
        return PlainTextResponse(await self._services.metrics(), media_type=METRICS_TYPE)

    def _check_model(self, name: str) -> None:
        served = self._services.model_id
        if name != served:
            raise ModelNotFound(f"model {name!r} is not served; {served!r} is", "model")

    def _check_tool_model(self, body: ToolBody) -> None:
        if body.model is not None:
            self._check_model(body.model)

    async def _answer(
        self,
        kind: Literal["chat", "completion"],
        body: GenerationBody,
        requests: Sequence[TextRequest],
        http: Request,
        deadline: Deadline,
    ) -> Response:
        n = body.n or 1
        choices = fan_out(requests, n)
        answer = AnswerFormat(
            kind=kind,
            id=requests[0].generation.request_id,
            created=int(time.time()),
            model=self._services.model_id,
            choices=choices,
            token_bytes=self._services.prompts.tokenizer.token_bytes,
            n=n,
            include_usage=body.include_usage,
            returns_ids=bool(body.return_token_ids),
            reports_speculation=body.reports_speculation,
        )
        merged = merge([self._generate(choice, deadline) for choice in choices])
        deltas = Peekable(deadline.bound(merged))
        if not body.stream:
            return JSONResponse(await while_connected(http.receive, collect(answer, deltas)))
        # Wait for the first delta before any header goes out, but not for ever: until then, an
        # error is a status.
        keep_alive_s = self._services.keep_alive_s
        try:
            await while_connected(http.receive, deltas.peek(keep_alive_s))
        except BaseException:  # a peek that is over leaves the request running
            await deltas.aclose()
            raise
        return EventStream(with_keep_alive(events(answer, deltas), keep_alive_s), deltas)

    def _deadline(self, body: GenerationBody) -> Deadline:
        """Return when the request is given up: as it asks, and at the server's own limit."""
        limits = (body.timeout, self._services.max_request_s)
        seconds = min((limit for limit in limits if limit is not None), default=math.inf)
        return Deadline.after(seconds, self._services.counters.timed_out)

    def _generate(
        self, request: TextRequest, deadline: Deadline
    ) -> AsyncGenerator[TextDelta, None]:
        deltas = self._services.relay.run(request.generation)
        text = stream_text(request, self._services.prompts.tokenizer, deltas)
        return self._services.counters.timed(
            text, request.generation.modality, deadline.began_s, lambda: deadline.is_over
        )


# The whole API on one page: path, method, handler.
ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("/", "GET", Routes.page),
    ("/v1/chat/completions", "POST", Routes.chat_completions),
    ("/v1/completions", "POST", Routes.completions),
    ("/v1/models", "GET", Routes.models),
    ("/v1/models/{model_id:path}", "GET", Routes.model),
    ("/tokenize", "POST", Routes.tokenize),
    ("/detokenize", "POST", Routes.detokenize),
    ("/version", "GET", Routes.version),
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
        router.add_api_route(path, bound, methods=[method], **route_options(path))
    app.include_router(router)
    app.add_exception_handler(SpecserveError, _on_typed_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)
    _add_middleware(app, services)
    return app


def _add_middleware(app: FastAPI, services: Services) -> None:
    """Put around the routes what every request passes; last added runs first.

    Ids, which all logs need; spans; counters and access log, which see what is sent in the end; the
    browser's leave, which refusals must carry too and its preflight needs no key for; the boundary
    for errors; the key, before any body is read; the limits of open requests and of bodies.
    """
    app.add_middleware(BodyLimit, max_bytes=services.max_body_bytes)
    app.add_middleware(OpenLimit, max_open=services.max_open)
    if services.api_keys:
        app.add_middleware(KeyCheck, keys=services.api_keys)
    app.add_middleware(ErrorBoundary)
    if services.cors_origins:
        app.add_middleware(CORSMiddleware, **cross_origin(services.cors_origins))
    written = services.has_access_log
    app.add_middleware(AccessLog, counters=services.counters, is_written=written)
    if services.tracing.is_on:
        paths = frozenset(path for path, _ in COUNTED)
        app.add_middleware(TraceRequests, tracing=services.tracing, paths=paths)
    app.add_middleware(RequestIds, is_echoed=services.echoes_request_id)


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
    # The framework's only 400 is a body that it cannot parse, and has no validation error for.
    code = "invalid_json" if error.status_code == 400 else None
    http = HttpError(error.status_code, "invalid_request_error", code, f"{error.detail}")
    return JSONResponse(http.body(), http.status, error.headers)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    # Nobody reads it; for logs and counters, the client's doing and no failure of ours.
    return Response(status_code=CLIENT_CLOSED_REQUEST)
