"""How a process's log lines look, and which request each belongs to.

Owns the id of the request at hand and the handler of our loggers. Knows no HTTP and no engine.
Invariants: every record that passes our handler has a `request_id`, "-" outside of requests; no
logger but our own is touched.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

from workers.telemetry.config import TelemetryConfig

# The packages whose code runs in the application's processes.
LOGGERS = ("serving", "workers", "deploy")
FORMAT = "%(asctime)s %(levelname)s %(request_id)s %(name)s: %(message)s"
# Name in a JSON line -> attribute of a record.
JSON_FIELDS = {
    "asctime": "time", "levelname": "level", "request_id": "request_id", "name": "logger",
    "message": "message",
}  # fmt: skip
NO_REQUEST = "-"

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


def configure(config: TelemetryConfig) -> None:
    """Send our loggers' lines to stderr; again, it only sets level and format."""
    handler = _present() or _OurHandler(sys.stderr)
    handler.setFormatter(_formatter(config.log_format))
    if not handler.filters:
        handler.addFilter(RequestIdFilter())
    for logger in map(logging.getLogger, LOGGERS):
        logger.setLevel(config.log_level)
        if handler not in logger.handlers:
            logger.addHandler(handler)
            # A handler of the root logger would write the line a second time.
            logger.propagate = False


def _present() -> _OurHandler | None:
    handlers = logging.getLogger(LOGGERS[0]).handlers
    return next((handler for handler in handlers if isinstance(handler, _OurHandler)), None)


def _formatter(log_format: str) -> logging.Formatter:
    if log_format == "text":
        return logging.Formatter(FORMAT)
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(list(JSON_FIELDS), rename_fields=JSON_FIELDS, json_ensure_ascii=False)
