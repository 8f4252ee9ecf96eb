"""What every HTTP request passes before and after its route.

Owns request ids, the limits of bodies and of open requests, what browsers may send and the last
resort for errors. Knows no routes. Invariant: every answer carries `x-request-id`, which the log
lines of its request know; no more than the limit of a body is ever held, nor of more requests than
may be open, and no exception leaves the app.

Plain ASGI, since Starlette's decorator form runs the app in a second task and would come between
a client's disconnect and the stream it has to cancel.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import BodyTooLarge, to_http
from workers.errors import QueueFull
from workers.telemetry.logs import current_request_id

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
# What may be echoed and logged.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# As many as 64 bits have.
MAX_LENGTH_DIGITS = 20

# What clients in a browser send, OpenAI's own included; the rest a browser always allows.
_CORS_HEADERS = (
    "authorization",
    "content-type",
    REQUEST_ID_HEADER,
    "openai-organization",
    "openai-project",
    *(
        f"x-stainless-{name}"
        for name in (
            "arch", "helper-method", "lang", "os", "package-version", "retry-count", "runtime",
            "runtime-version", "timeout",
        )
    ),
)  # fmt: skip


def cross_origin(origins: Sequence[str]) -> dict[str, Any]:
    """Return Starlette's options that let pages of `origins` use the API from a browser."""
    return {
        "allow_origins": origins,
        "allow_methods": ("GET", "POST"),
        "allow_headers": _CORS_HEADERS,
        "expose_headers": (REQUEST_ID_HEADER, "retry-after"),
    }


class RequestIds:
    """Takes the client's request id or makes one, and returns it with the answer."""

    def __init__(self, app: ASGIApp, *, is_echoed: bool) -> None:
        self._app = app
        self._is_echoed = is_echoed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        entered = current_request_id.set(request_id)

        async def send_with_id(message: Message) -> None:
            if self._is_echoed and message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            current_request_id.reset(entered)


class ErrorBoundary:
    """Turns what no handler knew into a 500, and logs it with the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            try:
                await send(message)
            except OSError as error:  # how servers say that the connection is gone
                raise ClientDisconnect from error

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            # The client's doing and no failure of ours: nobody to answer, nothing to log.
            logger.debug("request %s: the client went", scope["state"].get("request_id"))
        # Boundary: a defect of ours in one request must not reach the server's own handler.
        except Exception as error:
            logger.exception("request %s failed", scope["state"].get("request_id"))
            if not is_started:
                http = to_http(error)
                response = JSONResponse(http.body(), http.status, http.headers())
                with suppress(ClientDisconnect):
                    await response(scope, receive, watched_send)


class OpenLimit:
    """Refuses requests with a body beyond so many at once, before the body is read."""

    def __init__(self, app: ASGIApp, max_open: int) -> None:
        self._app = app
        self._max_open = max_open
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._num_open >= self._max_open:
            http = to_http(QueueFull(f"{self._num_open} requests are open; try again later"))
            headers = {**http.headers(), "connection": "close"}  # its body is not read
            await JSONResponse(http.body(), http.status, headers)(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1


class BodyLimit:
    """Reads bodies up to a limit before the app runs, and refuses longer ones with 413."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        is_too_large = _exceeds(length, self._max_bytes)
        chunks: list[bytes] = []
        num_bytes, more = 0, not is_too_large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # gone before its body was complete: nobody to answer, nothing failed
            chunks.append(message.get("body", b""))
            num_bytes += len(chunks[-1])
            is_too_large = num_bytes > self._max_bytes
            more = message.get("more_body", False) and not is_too_large
        if is_too_large:
            http = to_http(BodyTooLarge(f"the body is larger than {self._max_bytes} bytes"))
            # The rest of the body is not read, so the connection cannot be used again.
            headers = {"connection": "close"}
            await JSONResponse(http.body(), http.status, headers)(scope, receive, send)
            return
        await self._app(scope, _replay(b"".join(chunks), receive), send)


def _exceeds(length: str, max_bytes: int) -> bool:
    """Return whether a content-length, as the client wrote it, is a number above the limit."""
    # `isdigit` takes digits that `int` does not, and `int` raises for thousands of them.
    if not (length.isascii() and length.isdigit()):
        return False
    return len(length) > MAX_LENGTH_DIGITS or int(length) > max_bytes


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body in one message, then what the server says."""
    is_given = False

    async def replayed() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
