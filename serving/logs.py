"""Which request a log line belongs to, and how lines look.

Owns the id of the request at hand, the handler of our loggers and the line that ends a request.
Knows no routes. Invariants: every record that passes our handler has a `request_id`, "-" outside
of requests; neither bodies nor headers are written, and a path is written in a form that cannot
begin a new line; no logger but our own is touched.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextvars import ContextVar
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

access_logger = logging.getLogger("serving.access")

# The packages whose code runs in an ingress replica.
LOGGERS = ("serving", "workers", "deploy")
FORMAT = "%(asctime)s %(levelname)s %(request_id)s %(name)s: %(message)s"
NO_REQUEST = "-"
# nginx's status for a client that went before its answer was complete.
CLIENT_CLOSED_REQUEST = 499
# What is asked every few seconds, by machines.
QUIET_PATHS = frozenset({"/health", "/metrics"})
MAX_PATH_CHARS = 256

# Set where a request enters. Tasks and threads that it starts get copies.
current_request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        record.request_id = current_request_id.get()
        return True


class _OurHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A class of its own, so that it is found again."""


def configure(level: str) -> None:
    """Send our loggers' lines to stderr; again, it only sets the level."""
    handler = _OurHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(RequestIdFilter())
    for logger in map(logging.getLogger, LOGGERS):
        logger.setLevel(level)
        if not any(isinstance(present, _OurHandler) for present in logger.handlers):
            logger.addHandler(handler)
            # A handler of the root logger would write the line a second time.
            logger.propagate = False


class AccessLog:
    """Writes one line for each request, when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # so Serve tells that the client went
            exchange.is_gone = True
            raise
        finally:
            exchange.log(scope["method"], scope["path"])


class _Exchange:
    """What went over one request's connection."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._started_s = time.perf_counter()
        self._status = 0
        self._num_bytes = 0
        self._is_complete = False
        # Whether the client was seen to go.
        self.is_gone = False

    async def receive(self) -> Message:
        """Pass on what the client sends."""
        message = await self._receive()
        self.is_gone = self.is_gone or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Pass on what the app sends."""
        try:
            await self._send(message)
        except OSError:
            self.is_gone = True
            raise
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            self._num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)

    def log(self, method: str, path: str) -> None:
        """Write the line."""
        # A complete answer was one, also where the client has gone since.
        is_cut = self.is_gone and not self._is_complete
        access_logger.log(
            logging.DEBUG if path in QUIET_PATHS else logging.INFO,
            "%s %s %d %.0fms %dB",
            method,
            quote(path[:MAX_PATH_CHARS], safe="/", errors="replace"),
            CLIENT_CLOSED_REQUEST if is_cut else self._status,
            1000 * (time.perf_counter() - self._started_s),
            self._num_bytes,
        )
