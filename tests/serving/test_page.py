"""The chat page: what it is sent with, and what it does in a browser.

Most tests play raw bytes to it, as any server of the API might send them; the last ones let it
talk to the real app. Synchronous throughout, for `tests.browser`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from serving.page import Page
from tests.browser import Tab, chromium, serving, tab
from tests.serving.doubles import (
    ScriptedWorkers,
    data_url,
    deltas_of,
    encode,
    make_app,
    picture,
)
from workers.errors import GenerationFailed

PNG = base64.b64decode(data_url(picture()).partition(",")[2])
UPLOAD: Any = {"name": "board.png", "mimeType": "image/png", "buffer": PNG}
DONE = b"data: [DONE]\n\n"


def client() -> TestClient:
    return TestClient(make_app(ScriptedWorkers([])))  # type: ignore[arg-type]


def test_it_is_sent_with_a_strict_policy() -> None:
    """No script but its own can run, whatever a model writes, and none of its data leaves."""
    response = client().get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    policy = dict(
        rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("require-trusted-types-for") == "'script'"
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'", "img-src": "data: blob:", "connect-src": "'self'",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip


def test_it_is_one_small_file_that_needs_no_other() -> None:
    html = client().get("/").text
    assert len(html.encode()) < 30_000
    assert not re.search(r"https?:|url\(|@import|src=", html.replace("image.src = url", ""))
    assert re.findall(r'href="(.{5})', html) == ["data:"]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", " style=", "on="):
        assert way not in html
    assert re.findall(r"fetch\((\w+)", html) == ["path"]


def test_a_copy_that_is_known_is_not_sent_again() -> None:
    whole = client().get("/")
    etag = whole.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = client().get("/", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert client().get("/", headers={"if-none-match": '"other"'}).content == whole.content


@dataclass
class Stub:
    """A server of the API that sends the bytes it is told to."""

    pieces: list[bytes] = field(default_factory=lambda: [DONE])
    status: int = 200
    card: dict[str, Any] = field(default_factory=lambda: {"id": "stub"})
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> Callable[..., object]:
        page = Page.load()

        async def root(request: Request) -> Response:
            return page.respond()

        async def models(request: Request) -> Response:
            return self._refusal(request) or JSONResponse({"data": [self.card]})

        async def chat(request: Request) -> Response:
            self.bodies.append(await request.json())
            if self.status != 200:
                return Response(self.pieces[0], self.status)
            return self._refusal(request) or StreamingResponse(self._play())

        return Starlette(
            routes=[
                Route("/", root),
                Route("/v1/models", models),
                Route("/v1/chat/completions", chat, methods=["POST"]),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "that key is not known"}}, 401)

    async def _play(self) -> AsyncGenerator[bytes, None]:
        for piece in self.pieces:
            yield piece


def event(end: str = "\n", **fields: Any) -> bytes:
    return f"data: {json.dumps(fields, ensure_ascii=False)}{end}{end}".encode()


def chunk(text: str, totals: tuple[int, int, int, int] | None = None, **options: Any) -> bytes:
    """Return a text chunk; the totals are drafts, accepted ones, steps and tokens."""
    if totals is not None:
        names = ("draft_tokens", "accepted_tokens", "steps", "tokens")
        options["speculation"] = {**dict(zip(names, totals, strict=True)), "fallbacks": 0}
    return event(choices=[{"delta": {"content": text}, "finish_reason": None}], **options)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def opened(browser: Browser, stub: Stub) -> Iterator[Tab]:
    with serving(stub.app()) as url, tab(browser, url) as page:
        expect(page.page.get_by_role("heading", name="stub is ready.")).to_be_visible()
        yield page


def last_text(opened: Tab, text: str) -> None:
    answer = opened.page.get_by_label("Answer").last
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer.locator(".text")).to_have_text(text)


def failed(opened: Tab, message: str, *, logged: bool = False) -> None:
    """See the message; `logged`: the browser reports the status as an error of its own."""
    expect(opened.page.get_by_role("alert").locator("p")).to_have_text(message)
    if logged:
        assert all("Failed to load resource" in error for error in opened.errors)
        opened.errors.clear()


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_cut_anywhere(opened: Tab, stub: Stub, size: int, end: str) -> None:
    """A character, a line end or a field cut in two came out as something else."""
    texts = ("中文", "😀 and", "\r\n", "  two\u2028lines")
    sent = f": ping{end}{end}".encode()
    sent += b"".join(event(end, choices=[{"delta": {"content": text}}]) for text in texts)
    sent += f"event: x{end}data:[DONE]{end}{end}".encode()
    stub.pieces = [sent[i : i + size] for i in range(0, len(sent), size)]
    opened.ask("hi")
    answer = opened.page.get_by_label("Answer")
    expect(answer).to_have_attribute("aria-busy", "false")
    assert answer.locator(".text").text_content() == "".join(texts)
    expect(answer.locator(".speculation")).to_be_hidden()
    expect(opened.page.get_by_role("alert")).to_have_count(0)


def test_steps_of_speculation(opened: Tab, stub: Stub) -> None:
    stub.pieces = [
        chunk("a", (0, 0, 1, 1)),
        chunk("b", (4, 4, 2, 6)),
        chunk("c", (8, 5, 3, 8)),
        event(choices=[], usage={"completion_tokens": 8}),
        DONE,
    ]
    opened.ask("hi")
    last_text(opened, "abc")
    kinds = [
        [mark.get_attribute("class") for mark in step.locator("i").all()]
        for step in opened.page.locator(".step").all()
    ]
    accepted, rejected, own = (["mark accepted"], ["mark rejected"], ["mark own"])
    assert kinds == [own, accepted * 4 + own, accepted + rejected * 3 + own]
    figures = opened.page.locator(".figures")
    expect(figures).to_contain_text("accepted 5 of 8 drafts (63 %) · 2.7 tokens per step")
    summary = "Speculation: accepted 5 of 8 drafts (63 %), 2.7 tokens per step"
    expect(opened.page.get_by_role("img", name=summary)).to_be_visible()
    last = opened.page.locator(".step").last
    expect(last).to_have_attribute(
        "title", "Step 3: 1 accepted, 3 rejected, 1 of the target\u2019s own"
    )
    last.hover()
    expect(opened.page.locator(".chunk.lit")).to_have_text("c")
    expect(opened.page.locator(".summary .legend")).to_be_visible()


def test_counts_that_start_again_go_on(opened: Tab, stub: Stub) -> None:
    """E9: another worker took the stream over and counted from zero."""
    stub.pieces = [chunk("a", (8, 6, 2, 8)), chunk("b", (4, 2, 1, 11)), DONE]
    opened.ask("hi")
    last_text(opened, "ab")
    expect(opened.page.locator(".figures")).to_contain_text("accepted 8 of 12 drafts (67 %)")


def test_text_of_a_model_stays_text(opened: Tab, stub: Stub) -> None:
    """Markup that a model wrote ran in the browser of whoever asked it."""
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    stub.card = {"id": text}
    stub.pieces = [chunk(text, (1, 1, 1, 2)), DONE]
    dialogs: list[str] = []
    opened.page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    opened.page.reload()
    expect(opened.page.locator("#model")).to_have_text(text)
    opened.ask(text)
    last_text(opened, text)
    expect(opened.page.get_by_label("You").locator("p")).to_have_text(text)
    expect(opened.page.locator("main img, main script")).to_have_count(0)
    assert dialogs == []


def test_what_is_sent(opened: Tab, stub: Stub) -> None:
    page = opened.page
    stub.pieces = [chunk("first"), DONE]
    opened.ask("one\ntwo")
    last_text(opened, "first")
    body = stub.bodies[0]
    assert 0 <= body.pop("seed") < 2**32
    assert body == {
        "model": "stub", "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "one\ntwo"}], "temperature": 0,
        "max_tokens": 512, "speculation": {"enabled": True, "report": True},
    }  # fmt: skip
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Max tokens").fill("")
    page.get_by_label("Seed").fill("-7")
    page.get_by_label("Speculation", exact=True).uncheck()
    opened.ask("three")
    last_text(opened, "first")
    body = stub.bodies[1]
    assert "temperature" not in body
    assert "max_tokens" not in body
    assert (body["seed"], body["speculation"]["enabled"]) == (-7, False)
    assert [m["content"] for m in body["messages"]] == ["one\ntwo", "first", "three"]
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_label("Answer")).to_have_count(0)
    opened.ask("anew")
    last_text(opened, "first")
    assert [m["content"] for m in stub.bodies[2]["messages"]] == ["anew"]


def test_nothing_is_sent_that_the_fields_refuse(opened: Tab, stub: Stub) -> None:
    page = opened.page
    opened.ask("  ")
    page.get_by_label("Temperature").fill("3")
    opened.ask("hi")
    expect(page.get_by_label("Message", exact=True).last).to_have_value("hi")
    page.get_by_label("Temperature").fill("1.35")
    opened.ask("a")
    page.keyboard.press("Shift+Enter")
    last_text(opened, "")
    assert [body["messages"][-1]["content"] for body in stub.bodies] == ["a"]


def test_images_by_every_way(opened: Tab, stub: Stub) -> None:
    page, url = opened.page, data_url(picture())
    page.locator("#files").set_input_files([UPLOAD])
    for kind, name in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        page.get_by_label("Message", exact=True).last.evaluate(
            """(box, [kind, name, url]) => {
                const bytes = Uint8Array.from(atob(url.split(",")[1]), (c) => c.charCodeAt(0));
                const transfer = new DataTransfer();
                transfer.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
                const Kind = kind === "drop" ? DragEvent : ClipboardEvent;
                const options = { bubbles: true, cancelable: true, [name]: transfer };
                box.dispatchEvent(new Kind(kind, options));
            }""",
            [kind, name, url],
        )
        expect(page.get_by_role("button", name=f"Remove {kind}.png")).to_be_visible()
    page.get_by_role("button", name="Remove drop.png").click()
    expect(page.locator("#thumbs img")).to_have_count(2)
    opened.ask("what is it?")
    last_text(opened, "")
    expect(page.get_by_label("You").get_by_role("img")).to_have_count(2)
    expect(page.locator("#thumbs img")).to_have_count(0)
    image = {"type": "image_url", "image_url": {"url": url}}
    content = stub.bodies[0]["messages"][0]["content"]
    assert content == [image, image, {"type": "text", "text": "what is it?"}]


def test_a_file_that_is_no_image_is_refused(opened: Tab) -> None:
    upload: Any = {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"}
    opened.page.locator("#files").set_input_files([upload])
    expect(opened.page.locator("#notice")).to_have_text("a.txt is not an image.")


@pytest.mark.parametrize(
    ("modalities", "is_shown"), [(None, True), (["text"], False), (["text", "image"], True)]
)
def test_images_only_where_the_model_takes_them(
    opened: Tab, stub: Stub, modalities: list[str] | None, is_shown: bool
) -> None:
    stub.card = {"id": "other"} | ({"modalities": modalities} if modalities else {})
    opened.page.reload()
    expect(opened.page.locator("#model")).to_have_text("other")
    expect(opened.page.get_by_role("button", name="Attach images")).to_be_visible(visible=is_shown)


def test_errors_are_shown_and_can_be_tried_again(opened: Tab, stub: Stub) -> None:
    stub.status, stub.pieces = 429, [event(error={"message": "the queue is full"})[6:]]
    opened.ask("hi")
    failed(opened, "the queue is full", logged=True)
    stub.pieces = [b"<h1>not ours</h1>"]
    opened.page.get_by_role("button", name="Try again").click()
    failed(opened, "The server answered with status 429.", logged=True)
    stub.status, stub.pieces = 200, [chunk("at last"), DONE]
    opened.page.get_by_role("button", name="Try again").click()
    last_text(opened, "at last")
    assert [len(body["messages"]) for body in stub.bodies] == [1, 1, 1]


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (event(error={"message": "no worker is left"}), "no worker is left"),
        (b"", "The stream broke off."),
        (b'data: {"choices"', "The stream broke off."),
        (b"data: {\n\n", "The stream broke off."),
    ],
)
def test_a_stream_without_its_end(opened: Tab, stub: Stub, tail: bytes, message: str) -> None:
    """An answer that broke off in the middle looked complete."""
    stub.pieces = [chunk("half an"), tail]
    opened.ask("hi")
    failed(opened, message)
    last_text(opened, "half an")


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, stub: Stub) -> None:
    stub.key, stub.pieces = "s3cret", [chunk("welcome"), DONE]
    with serving(stub.app()) as url, tab(browser, url) as opened:
        page = opened.page
        for key, is_right in (("wrong", False), ("s3cret", True)):
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use key").click()
            notice = "" if is_right else "that key is not known"
            expect(page.locator("#notice")).to_have_text(notice)
        opened.errors.clear()
        page.reload()
        expect(page.get_by_role("heading", name="stub is ready.")).to_be_visible()
        expect(page.get_by_label("API key")).to_be_hidden()
        opened.ask("hi")
        last_text(opened, "welcome")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


# The real app, with scripted workers.

TEXT = "the quick 中文😀 fox"


@pytest.fixture
def workers() -> ScriptedWorkers:
    return ScriptedWorkers([list(deltas_of(encode(f"{TEXT}<|im_end|>"), (3,)))], delay_s=0.01)


@pytest.fixture
def real(browser: Browser, workers: ScriptedWorkers) -> Iterator[Tab]:
    with serving(make_app(workers)) as url, tab(browser, url) as page:
        yield page


def test_the_api_answers_the_page(real: Tab, workers: ScriptedWorkers) -> None:
    real.page.locator("#files").set_input_files([UPLOAD])
    expect(real.page.locator("#thumbs img")).to_be_visible()
    real.ask("hello there")
    last_text(real, TEXT)
    expect(real.page.locator(".strip")).to_be_visible()
    assert len(workers.requests[0].images) == 1


def test_an_error_of_the_api_is_shown(real: Tab, workers: ScriptedWorkers) -> None:
    workers.scripts = [[GenerationFailed("the model failed")]]
    real.ask("hello")
    failed(real, "the model failed", logged=True)


def test_stop_aborts_in_the_worker(real: Tab, workers: ScriptedWorkers) -> None:
    """C21: generation ran on after the client had gone."""
    workers.scripts, workers.delay_s = [list(deltas_of(encode("hello " * 4000)))], 0.02
    real.ask("hello")
    expect(real.page.locator(".chunk").first).to_be_visible()
    real.page.get_by_role("button", name="Stop").click()
    expect(real.page.locator(".note")).to_have_text("Stopped.")
    deadline = time.monotonic() + 10
    while workers.num_open:
        assert time.monotonic() < deadline, "the request runs on"
        time.sleep(0.02)
    assert workers.num_closed_early == 1
    expect(real.page.get_by_role("button", name="Send")).to_be_visible()
