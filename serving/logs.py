"""The line that ends a request.

Owns what of an exchange is counted and logged. Knows no routes. Invariant: neither bodies nor
headers are written, and a path is written in a form that cannot begin a new line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.counters import IngressCounters

access_logger = logging.getLogger("serving.access")

# nginx's status for a client that went before its answer was complete.
CLIENT_CLOSED_REQUEST = 499
# What is asked every few seconds, by machines.
QUIET_PATHS = frozenset({"/health", "/metrics"})
MAX_PATH_CHARS = 256


class AccessLog:
    """Counts each request, and writes a line for it when it is over."""

    def __init__(self, app: ASGIApp, counters: IngressCounters, *, is_written: bool) -> None:
        self._app = app
        self._counters = counters
        self._is_written = is_written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        self._counters.request_started()
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # so Serve tells that the client went
            exchange.is_gone = True
            raise
        finally:
            seconds = time.perf_counter() - exchange.started_s
            method, path = scope["method"], scope["path"]
            self._counters.request_ended(method, path, exchange.status, seconds)
            if self._is_written:
                exchange.log(method, path, seconds)


class _Exchange:
    """What went over one request's connection."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.started_s = time.perf_counter()
        self._status = 0
        self._num_bytes = 0
        self._is_complete = False
        # Whether the client was seen to go.
        self.is_gone = False

    @property
    def status(self) -> int:
        """What was answered; 499 for an answer that the client did not wait for."""
        # A complete answer was one, also where the client has gone since.
        is_cut = self.is_gone and not self._is_complete
        return CLIENT_CLOSED_REQUEST if is_cut else self._status

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

    def log(self, method: str, path: str, seconds: float) -> None:
        """Write the line."""
        access_logger.log(
            logging.DEBUG if path in QUIET_PATHS else logging.INFO,
            "%s %s %d %.0fms %dB",
            method,
            quote(path[:MAX_PATH_CHARS], safe="/", errors="replace"),
            self.status,
            1000 * seconds,
            self._num_bytes,
        )
