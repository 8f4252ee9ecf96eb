"""The chat page as a user meets it: a browser, the real server, a picture and its answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser import Tab, chromium, tab
from tests.e2e.conftest import ROOT, SAMPLE, Server
from tests.e2e.test_demo import COUNT, DESCRIBE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

CAPTION = SAMPLE.with_suffix(".txt").read_text().strip()
# Kept to be looked at.
SHOTS = ROOT / "out"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def _last_text(opened: Tab) -> str:
    shown = opened.page.get_by_label("Answer").last
    expect(shown).to_have_attribute("aria-busy", "false", timeout=60_000)
    return shown.locator(".text").text_content() or ""


def _shoot(opened: Tab, name: str) -> Path:
    SHOTS.mkdir(exist_ok=True)
    path = SHOTS / f"page-{name}.png"
    opened.page.screenshot(path=path)
    return path


@pytest.mark.parametrize(("name", "width", "height"), [("wide", 1100, 800), ("phone", 390, 780)])
def test_a_picture_is_described(
    server: Server, browser: Browser, name: str, width: int, height: int
) -> None:
    """The answer is the API's, and its strip tells what the drafts did."""
    size = {"width": width, "height": height}
    with tab(browser, server.url, viewport=size) as opened:  # type: ignore[arg-type]
        expect(opened.page.locator("#model")).to_have_text(server.model)
        opened.page.locator("#files").set_input_files([SAMPLE])
        opened.ask(DESCRIBE)
        assert _last_text(opened) == CAPTION
        figures = opened.page.locator(".figures").last.text_content() or ""
        found = re.search(r"accepted (\d+) of (\d+) drafts .* (\d\.\d) tokens per step", figures)
        assert found, figures
        assert 0 < int(found[1]) <= int(found[2])
        assert float(found[3]) > 1
        opened.ask(COUNT)
        assert "4, 5, 6" in _last_text(opened)
        assert opened.page.locator(".step .accepted").count() > 0
        is_wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not opened.page.evaluate(is_wider), "it scrolls sideways"
        assert _shoot(opened, name).stat().st_size > 10_000


def test_dark_and_at_rest(server: Server, browser: Browser) -> None:
    with tab(browser, server.url, color_scheme="dark") as opened:
        expect(opened.page.get_by_role("button", name="Send")).to_be_visible()
        _shoot(opened, "dark")
