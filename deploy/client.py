"""A small chat client for a running server.

Owns the HTTP side of `specserve chat`. Knows nothing of the server's inside: it speaks the OpenAI
API, as any client would.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx


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
    except httpx.HTTPError as error:
        raise ChatError(f"no specserve answers at {url}: {error}") from error
    name: str = response.json()["data"][0]["id"]
    return name


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
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield from _text_of(json.loads(data))
    except httpx.HTTPError as error:
        raise ChatError(f"{url}: {error}") from error
    raise ChatError("the stream ended without [DONE]")


def _text_of(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise ChatError(event["error"]["message"])
    for choice in event["choices"]:
        yield choice["delta"].get("content") or ""


def _message(text: str) -> str:
    try:
        message: str = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text
    return message
