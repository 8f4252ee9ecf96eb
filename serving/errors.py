"""One table from typed errors to HTTP, and the OpenAI error body.

    RequestError (workers.errors)
    ├── InvalidRequest
    │   └── UnsupportedParameter  known to OpenAI's API, not honoured here yet
    ├── ModelNotFound             the request names a model that is not served
    ├── BodyTooLarge              more bytes than the configured limit
    └── InvalidApiKey             no key, or none that is accepted
    SpecserveError (workers.errors)
    ├── StreamLost                no worker could finish the request, replays included
    └── DeadlineExceeded          the time that was given to the request is over

Owns statuses, OpenAI types and codes. Knows no routes and no Ray. Invariant: what is not in the
table is a 500 whose body says nothing of the inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.errors import (
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    RequestError,
    RequestTooLong,
    SpecserveError,
    WorkerLost,
)


class UnsupportedParameter(InvalidRequest):
    """The parameter is known and not supported yet."""


class ModelNotFound(RequestError):
    """The request names a model that is not served."""


class BodyTooLarge(RequestError):
    """The body has more bytes than the limit."""


class InvalidApiKey(RequestError):
    """The request carries no key, or none that is accepted."""


class StreamLost(SpecserveError):
    """The request was interrupted more often than it may be replayed."""


class DeadlineExceeded(SpecserveError):
    """The request was not finished in its time."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as a client sees it."""

    status: int
    type: str
    code: str | None
    message: str = ""
    param: str | None = None
    retry_after_s: int | None = None

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error body."""
        param = None if self.param is None else _printable(self.param)
        message = _printable(self.message)
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to it."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def _printable(text: str) -> str:
    # A client's own key may come back in here, lone surrogates included.
    return text.encode("utf-8", "backslashreplace").decode()


_INVALID = "invalid_request_error"
_INTERNAL = HttpError(500, "server_error", "internal_error", "internal error")

# The first class in the error's own method resolution order that stands here decides.
TABLE: dict[type[Exception], HttpError] = {
    UnsupportedParameter: HttpError(400, _INVALID, "unsupported_parameter"),
    InvalidRequest: HttpError(400, _INVALID, "invalid_value"),
    RequestTooLong: HttpError(400, _INVALID, "context_length_exceeded"),
    ModelNotFound: HttpError(404, _INVALID, "model_not_found"),
    InvalidApiKey: HttpError(401, _INVALID, "invalid_api_key"),
    BodyTooLarge: HttpError(413, _INVALID, "request_too_large"),
    QueueFull: HttpError(429, "rate_limit_error", "queue_full", retry_after_s=1),
    GenerationFailed: HttpError(500, "server_error", "generation_failed"),
    WorkerLost: HttpError(503, "server_error", "no_worker_ready", retry_after_s=1),
    StreamLost: HttpError(503, "server_error", "stream_lost", retry_after_s=1),
    DeadlineExceeded: HttpError(504, "timeout_error", "timeout"),
}


def to_http(error: Exception) -> HttpError:
    """Return what the client is told about `error`."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            row = TABLE[cls]
            param = error.param if isinstance(error, RequestError) else None
            return HttpError(row.status, row.type, row.code, str(error), param, row.retry_after_s)
    return _INTERNAL


def is_expected(error: Exception) -> bool:
    """Whether `error` is one of ours, so that no traceback is worth logging."""
    return any(cls in TABLE for cls in type(error).__mro__)


def param_path(loc: Sequence[str | int]) -> str | None:
    """Return `messages[0].content[1].image_url` for a validation error's location."""
    path = ""
    for item in loc:
        if isinstance(item, int):
            path += f"[{item}]"
        elif not item.startswith("("):  # a union's tag
            path += f".{item}" if path else item
    return path or None


def from_validation(details: Sequence[Any]) -> HttpError:
    """Return the 400 for pydantic's or FastAPI's list of validation errors."""
    detail = details[0]
    loc = [item for i, item in enumerate(detail["loc"]) if not (i == 0 and item == "body")]
    kind, message = detail["type"], detail["msg"]
    if kind == "json_invalid":
        return HttpError(400, _INVALID, "invalid_json", f"the body is not JSON: {message}")
    param = detail.get("ctx", {}).get("param") if kind == "body_error" else param_path(loc)
    code = {
        "unsupported_parameter": "unsupported_parameter",
        "extra_forbidden": "unknown_parameter",
        "missing": "missing_required_parameter",
    }.get(kind, "invalid_value")
    if kind == "extra_forbidden":
        message = "unknown parameter"
    return HttpError(400, _INVALID, code, f"{param or 'body'}: {message}", param)
