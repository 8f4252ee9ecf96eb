"""A browser for the tests of the chat page: Debian's Chromium, driven by playwright.

Synchronous, and only for modules whose tests are: while it is open, the thread has its event loop.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Nothing but what the page asks for.
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def find_chromium() -> str:
    """Return the binary. Without one the test is skipped, in CI it fails."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    reason = f"no browser: none of {', '.join(NAMES)} is installed"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def chromium() -> Iterator[Browser]:
    path = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page, and what went wrong in it."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).last.fill(text)
        self.page.keyboard.press("Enter")

    def check(self) -> None:
        assert self.elsewhere == [], "requests to other origins"
        assert self.errors == []


@contextmanager
def tab(browser: Browser, url: str, **options: Any) -> Iterator[Tab]:
    """Open the page; whatever its console reports as an error fails the test at the end."""
    context = browser.new_context(**options)
    page = context.new_page()
    opened = Tab(page, url)
    page.on("console", lambda m: opened.errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("request", lambda r: None if _is_ours(r.url, url) else opened.elsewhere.append(r.url))
    try:
        page.goto(url)
        yield opened
        opened.check()
    finally:
        context.close()


def _is_ours(requested: str, url: str) -> bool:
    return requested.startswith((f"{url.rstrip('/')}/", "data:", "blob:"))


@contextmanager
def serving(app: Callable[..., object]) -> Iterator[str]:
    """Serve an app on a free port of the loopback, in a thread."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
