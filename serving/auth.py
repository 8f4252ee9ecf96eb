"""Who may ask: API keys, and the paths that need one.

Owns where keys come from, how they are compared and the 401. Knows no routes. Invariants: the
keys stay in the process that read them, as digests; how long a comparison takes says nothing of
any key; a path that is not known to be open needs a key, and no body is read before it is given.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.errors import InvalidApiKey, to_http
from workers.errors import ConfigError

# Probes, scrapes and the page, which has a field for the key.
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version"})
# What a header can carry as one word.
_KEY = re.compile(r"[\x21-\x7e]+")


class ApiKeys:
    """The accepted keys; none = everybody is welcome."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, authorization: str) -> bool:
        """Return whether the header's value carries one of the keys."""
        scheme, _, key = authorization.partition(" ")
        # Starlette decodes headers so.
        digest = _digest(key.strip().encode("latin-1"))
        is_known = False
        for known in self._digests:  # all of them: the time must not tell which one it was
            is_known |= hmac.compare_digest(digest, known)
        return is_known and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    # Of equal lengths, whatever the keys' are.
    return hashlib.sha256(key).digest()


def load_api_keys(file: str | None, variable: str) -> ApiKeys:
    """Read the keys of a file, one a line, and of an environment variable, separated by commas.

    Raises:
        ConfigError: The file cannot be read, one of them holds no key, or something that is none.
    """
    keys: list[str] = []
    if file is not None:
        lines = [line.strip() for line in _read(file).splitlines()]
        found = {n: line for n, line in enumerate(lines, 1) if line and not line.startswith("#")}
        keys += _checked("ingress.api_key_file", file, found)
    if value := os.environ.get(variable, ""):
        parts = [part.strip() for part in value.split(",")]
        found = {n: part for n, part in enumerate(parts, 1) if part}
        keys += _checked("ingress.api_key_env", variable, found)
    return ApiKeys(keys)


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError:  # its own words would quote the content
        problem = "is no text"
    raise ConfigError("ingress.api_key_file", file, problem)


def _checked(setting: str, source: str, keys: dict[int, str]) -> list[str]:
    if not keys:
        raise ConfigError(setting, source, "holds no key")
    for number, key in keys.items():
        if not _KEY.fullmatch(key):
            accepted = f"entry {number} is no key: printable ASCII without spaces"
            raise ConfigError(setting, source, accepted)
    return list(keys.values())


class KeyCheck:
    """Lets requests with a key pass, and those to open paths."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization")
        if given is not None and self._keys.accept(given):
            await self._app(scope, receive, send)
            return
        problem = "no API key was given" if given is None else "the API key is not valid"
        http = to_http(InvalidApiKey(f"{problem}; send the header Authorization: Bearer KEY"))
        headers = {"www-authenticate": "Bearer"}
        await JSONResponse(http.body(), http.status, headers)(scope, receive, send)
