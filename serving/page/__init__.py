"""The chat page at `/`: one file, and headers that let a browser run nothing but that file.

Owns the bytes of `index.html`, their policy and their revalidation. Knows no routes, no model and
no keys: the page is a client of the public API like any other. Invariant: the policy allows
exactly the one style and the one script that stand in the bytes sent with it, and requests to
this server alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from starlette.responses import Response

INDEX = Path(__file__).with_name("index.html")


@dataclass(frozen=True, slots=True)
class Page:
    """The page as it is sent."""

    content: bytes
    etag: str
    policy: str

    @classmethod
    def load(cls) -> Self:
        """Read the page and allow what stands in it."""
        # Through text: browsers hash inline blocks with "\n", whatever ends a line in the file.
        html = INDEX.read_text(encoding="utf-8")
        content = html.encode()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, etag, _policy(html))

    def respond(self, if_none_match: str = "") -> Response:
        """Return the page, or 304 where the browser's copy is this one.

        The argument is the header as it came: etags with commas between them, or a star.
        """
        headers = {
            "etag": self.etag,
            # Kept, and asked for again each time: an upgrade shows at once.
            "cache-control": "no-cache",
            "content-security-policy": self.policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        if known & {self.etag, "*"}:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type="text/html; charset=utf-8")


def _policy(html: str) -> str:
    """Return the content security policy for the page's own inline blocks."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of('script', html)}",
            f"style-src {_hash_of('style', html)}",
            # Pictures that were attached, and the icon.
            "img-src data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Text that a model wrote cannot become markup, not even by mistake.
            "require-trusted-types-for 'script'",
        )
    )


def _hash_of(tag: str, html: str) -> str:
    (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = hashlib.sha256(block.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
