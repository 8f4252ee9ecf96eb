"""A small chat client for a running server.

Owns the HTTP side of `specserve chat`. Knows nothing of the server's inside: it speaks the OpenAI
API, as any client would.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

# What reading an answer raises that is no JSON, or JSON of another shape.
UNEXPECTED = (ValueError, LookupError, TypeError, AttributeError)
# Of what a server sends in place of an answer.
MAX_SHOWN = 300


class ChatError(Exception):
    """The server refused or broke off."""


def image_part(path: Path) -> dict[str, Any]:
    """Return a content part with the image as a `data:` URL."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    payload = base64.b64encode(path.read_bytes()).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{payload}"}}


def user_message(text: str, images: Sequence[Path] = ()) -> dict[str, Any]:
    """Return a user message, images first."""
    if not images:
        return {"role": "user", "content": text}
    parts = [image_part(path) for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def first_model(url: str) -> str:
    """Return the name of the model that the server serves."""
    try:
        response = httpx.get(f"{url}/v1/models", timeout=10)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, *UNEXPECTED) as error:
        raise ChatError(f"no specserve answers at {url}: {_one_line(str(error))}") from error


def stream_chat(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the answer's text as it arrives.

    Raises:
        ChatError: The request was refused, or the stream broke before its end.
    """
    # Between two tokens of a busy server, seconds may pass; minutes mean that it is gone.
    timeout = httpx.Timeout(10, read=120)
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=timeout
        ) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise ChatError(_message(response.text))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue  # a blank line or a comment
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                yield _text_of(data)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChatError(f"{url}: {_one_line(str(error))}") from error
    raise ChatError("the stream ended without [DONE]")


def _text_of(data: str) -> str:
    try:
        event = json.loads(data)
        if "error" not in event:
            return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    except UNEXPECTED as error:
        raise ChatError(f"the server sent no chat chunk: {_one_line(data)}") from error
    raise ChatError(_message(data))


def _message(text: str) -> str:
    with suppress(*UNEXPECTED):  # not ours then, perhaps a proxy's page
        text = str(json.loads(text)["error"]["message"])
    return _one_line(text)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
