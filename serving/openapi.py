"""How the API describes itself in /openapi.json.

Owns what the document says of answers; what it says of bodies comes from the bodies. Knows no
handler. Invariant: each status and content type that a route can give is in the document.
"""

from __future__ import annotations

from typing import Any

from fastapi.responses import HTMLResponse, PlainTextResponse

from serving.models import Model, ModelList
from serving.responses import Envelope, ErrorBody
from serving.schema_tools import Detokenized, Tokens

# One event of it: a chunk, an error, or the word that ends it.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}}
_ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": {"model": Envelope, "content": _STREAM},
    "/v1/completions": {"model": Envelope, "content": _STREAM},
    "/v1/models": {"model": ModelList},
    "/v1/models/{model_id:path}": {"model": Model},
    "/tokenize": {"model": Tokens},
    "/detokenize": {"model": Detokenized},
}
_TEXTS: dict[str, Any] = {"/": HTMLResponse, "/metrics": PlainTextResponse}


def route_options(path: str) -> dict[str, Any]:
    """Return what a route is registered with."""
    responses: dict[int | str, Any] = {
        status: {"model": ErrorBody, "description": text}
        for status, text in (("4XX", "The request was refused"), ("5XX", "It failed"))
    }
    if path in _ANSWERS:
        responses[200] = {"description": "The answer", **_ANSWERS[path]}
    if path == "/":
        responses[304] = {"description": "The page that the browser has"}
    options: dict[str, Any] = {"responses": responses, "response_model": None}
    if path in _TEXTS:
        options["response_class"] = _TEXTS[path]
        # Refusals are JSON there too.
        for status in ("4XX", "5XX"):
            schema = {"$ref": "#/components/schemas/ErrorBody"}
            responses[status] = {
                "description": responses[status]["description"],
                "content": {"application/json": {"schema": schema}},
            }
    return options
