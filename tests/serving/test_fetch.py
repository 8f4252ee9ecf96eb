"""Images by URL: from the public internet only, within limits, and every failure a 400."""

from __future__ import annotations

import asyncio
import gzip
import io
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpcore
import httpx
import pytest

from serving.errors import UnsupportedParameter
from serving.fetch import FetchLimits, ImageFetcher, is_public
from tests.serving.doubles import ScriptedWorkers, deltas_of, encode, make_app, picture
from workers.errors import ConfigError, InvalidRequest

PARAM = "messages[0].content[0].image_url"
Reply = Callable[[str], Awaitable[bytes] | bytes]


def _png() -> bytes:
    buffer = io.BytesIO()
    picture().save(buffer, "PNG")
    return buffer.getvalue()


PNG = _png()


def _response(body: bytes = b"", status: str = "200 OK", **headers: Any) -> bytes:
    headers = {"content_length": len(body), **headers}
    lines = [f"{key.replace('_', '-')}: {value}" for key, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


@asynccontextmanager
async def _serving(reply: Reply) -> AsyncIterator[str]:
    """Run an HTTP server that answers each path with what `reply` says."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            answer = reply(head.split()[1].decode())
            writer.write(answer if isinstance(answer, bytes) else await answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def _fetcher(max_bytes: int = 10_000, **limits: Any) -> AsyncIterator[ImageFetcher]:
    limits = {"enabled": True, "private_addresses": True, "timeout_s": 5.0, **limits}
    fetcher = ImageFetcher(FetchLimits(**limits), max_bytes)
    try:
        yield fetcher
    finally:
        await fetcher.aclose()


async def _refusal(url: str, reply: Reply = lambda _: b"", **limits: Any) -> str:
    """Return why a URL (or a path of the test's server) is not fetched."""
    async with _serving(reply) as base, _fetcher(**limits) as fetcher:
        with pytest.raises(InvalidRequest) as refusal:
            await fetcher.fetch(base + url if url.startswith("/") else url, PARAM)
    assert refusal.value.param == PARAM
    message = str(refusal.value)
    assert message.startswith(f"{PARAM}: the image was not fetched: ")
    return message.removeprefix(f"{PARAM}: the image was not fetched: ")


async def test_an_image_is_fetched() -> None:
    async with _serving(lambda _: _response(PNG)) as base, _fetcher() as fetcher:
        assert await fetcher.fetch(f"{base}/a.png?size=1#top", PARAM) == PNG


async def test_it_is_off_unless_it_was_allowed() -> None:
    fetcher = ImageFetcher(FetchLimits(), 100)
    with pytest.raises(UnsupportedParameter, match=r"only data: URLs .*ingress\.fetch\.enabled"):
        await fetcher.fetch("https://example.com/a.png", PARAM)


PRIVATE = [
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1",
    "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:c0a8:101::",
    "2001:0:5ef5:79fb::1", "2001:db8::1", "fec0::1", "64:ff9b:1::1", "::7f00:1", "::a00:1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_c14_addresses_that_are_not_public(address: str) -> None:
    """C14: an image URL on a link-local or internal address was requested."""
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "0x7f.1", "127.1", "017700000001",
     "[::1]", "[::ffff:127.0.0.1]", "0", "LOCALHOST"],
)  # fmt: skip
async def test_c14_every_spelling_of_this_machine_is_refused(host: str) -> None:
    reason = await _refusal(f"http://{host}:9/a.png", private_addresses=False)
    assert reason in (
        "its host resolves to an address that is not public", "its host does not resolve",
    )  # fmt: skip


Resolved = dict[str, list[str]]


@pytest.fixture
def resolving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that makes names resolve as told; it returns whom was connected to."""

    def install(names: Resolved, then: Resolved | None = None) -> list[str]:
        connected: list[str] = []
        asked: list[str] = []

        async def getaddrinfo(self: Any, host: Any, port: Any, **options: Any) -> Any:
            name = host.decode() if isinstance(host, bytes) else host
            table = then if then is not None and name in asked else names
            asked.append(name)
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
                for a in table.get(name, [name])
            ]

        async def connect(self: Any, host: str, *options: Any, **more: Any) -> Any:
            connected.append(host)
            raise httpcore.ConnectError("nobody is asked in a test")

        monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)
        monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
        return connected

    return install


async def test_c14_the_connection_goes_to_what_was_checked(
    resolving: Callable[..., list[str]],
) -> None:
    """C14: a name that resolves to another address the second time (rebinding)."""
    connected = resolving({"a.example": ["8.8.8.8"]}, then={"a.example": ["127.0.0.1"]})
    async with _fetcher(private_addresses=False) as fetcher:
        with pytest.raises(InvalidRequest, match="cannot be reached"):
            await fetcher.fetch("http://a.example/x", PARAM)
        assert connected == ["8.8.8.8"]
        with pytest.raises(InvalidRequest, match="not public"):
            await fetcher.fetch("http://a.example/x", PARAM)
    assert connected == ["8.8.8.8"]


async def test_c14_one_private_address_among_public_ones(
    resolving: Callable[..., list[str]],
) -> None:
    connected = resolving({"a.example": ["8.8.8.8", "10.0.0.1"]})
    async with _fetcher(private_addresses=False) as fetcher:
        with pytest.raises(InvalidRequest, match="not public") as refusal:
            await fetcher.fetch("https://a.example/x", PARAM)
    assert connected == []
    assert "10.0.0.1" not in str(refusal.value)


async def test_c14_a_redirect_is_checked_like_the_first_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C14: the first host is public, what it redirects to is not."""
    checked: list[str] = []

    def first_is_public(address: Any) -> bool:
        checked.append(str(address))
        return len(checked) == 1

    monkeypatch.setattr("serving.fetch.is_public", first_is_public)
    inside = _response(PNG)

    def reply(path: str) -> bytes:
        return inside if path == "/inside" else _response(status="302 Found", location="/inside")

    reason = await _refusal("/", reply, private_addresses=False)
    assert reason == "its host resolves to an address that is not public"
    assert checked == ["127.0.0.1", "127.0.0.1"]


@pytest.mark.parametrize("status", ["301 M", "302 F", "303 S", "307 T", "308 P"])
async def test_redirects_are_followed(status: str) -> None:
    def reply(path: str) -> bytes:
        return _response(PNG) if path == "/b" else _response(status=status, location="b")

    async with _serving(reply) as base, _fetcher() as fetcher:
        assert await fetcher.fetch(f"{base}/a", PARAM) == PNG


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("/", "more than 3 redirects"),
        ("file:///etc/passwd", "only http and https URLs are fetched"),
        ("gopher://a.example/", "only http and https URLs are fetched"),
        ("//user:secret@a.example/", "a URL must hold no user name"),
        ("http://[broken", "a redirect leads to no URL"),
        ("http://a.example:99999/", "it is no URL"),
    ],
)
async def test_redirects_that_are_not_followed(location: str, reason: str) -> None:
    assert await _refusal("/", lambda _: _response(status="302 F", location=location)) == reason


async def test_no_redirect_leads_from_https_to_http() -> None:
    fetcher = ImageFetcher(FetchLimits(enabled=True), 100)
    with pytest.raises(Exception, match="from https to http"):
        fetcher._checked("http://a.example/", was_secure=True)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "only http and https URLs are fetched"),
        ("ftp://a.example/x", "only http and https URLs are fetched"),
        ("HTTP:/x", "only http and https URLs are fetched"),
        ("just text", "only http and https URLs are fetched"),
        ("", "only http and https URLs are fetched"),
        ("http://a.example:99999/", "it is no URL"),
        ("http://user@a.example/", "a URL must hold no user name"),
        ("http://a.example/" + "x" * 9000, "the URL has more than 8192 characters"),
        ("http://nowhere.invalid/", "its host does not resolve"),
        ("http://" + "a" * 70 + ".example/", "its host does not resolve"),
    ],
)
async def test_c9_urls_that_cannot_be_fetched(url: str, reason: str) -> None:
    """C9: a DNS error was a 500."""
    assert await _refusal(url) == reason


async def test_c9_a_host_that_does_not_answer_is_refused() -> None:
    """C9: no connection, and a connection without an answer, were 500."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    assert await _refusal(f"http://127.0.0.1:{port}/") == "its host cannot be reached"

    async def never(_: str) -> bytes:
        await asyncio.sleep(30)
        return b""

    reason = await _refusal("/", lambda path: never(path), timeout_s=0.2)
    assert reason == "no answer in 0.2 s"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_response(b"x", "404 Not Found"), "its host answered 404"),
        (_response(b"x", "500 Oops"), "its host answered 500"),
        (_response(b"x", "204 Nothing"), "its host answered 204"),
        (_response(status="302 F"), "a redirect leads nowhere"),
        (_response(gzip.compress(PNG), content_encoding="gzip"), "its host sent it compressed"),
        (_response(b"x" * 10_001), "it has more than 10000 bytes"),
        (_response(b"", content_length="9" * 18), "it has more than 10000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 20_000, "it has more than 10000 bytes"),
        (b"hello\r\n\r\n", "its host does not speak HTTP"),
        (b"", "its host does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nx", "its host does not speak HTTP"),
    ],
)
async def test_c9_c11_answers_that_are_no_image(answer: bytes, reason: str) -> None:
    """C9, C11: 404 was a 500, or an empty answer with status 200."""
    assert await _refusal("/", lambda _: answer) == reason


async def test_allowed_hosts() -> None:
    limits = FetchLimits(enabled=True, allowed_hosts=("img.example", ".cdn.example"))
    for host in ("img.example", "IMG.example.", "a.cdn.example", "a.b.CDN.example"):
        assert limits.allows_host(host)
    for host in ("example", "ximg.example", "cdn.example", "cdn.example.evil"):
        assert not limits.allows_host(host)
    reason = await _refusal("http://127.0.0.1/", allowed_hosts=("img.example",))
    assert reason == "its host is not among ingress.fetch.allowed_hosts"


@pytest.mark.parametrize("changes", [{"timeout_s": 0}, {"timeout_s": float("nan")},
                                     {"max_redirects": -1}, {"max_redirects": 99}])  # fmt: skip
def test_ranges(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"ingress\.fetch\."):
        FetchLimits(**changes)


def _body(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "demo", "messages": [{"role": "user", "content": parts}]}


async def _post(body: dict[str, Any], fetcher: ImageFetcher) -> tuple[httpx.Response, Any]:
    workers = ScriptedWorkers([list(deltas_of(encode("fine<|im_end|>")))])
    transport = httpx.ASGITransport(app=make_app(workers, fetcher=fetcher))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/chat/completions", json=body), workers


async def test_the_api_fetches_each_url_once() -> None:
    paths: list[str] = []

    def reply(path: str) -> bytes:
        paths.append(path)
        return _response(PNG)

    async with _serving(reply) as base, _fetcher() as fetcher:
        response, workers = await _post(_body(f"{base}/a", f"{base}/b", f"{base}/a"), fetcher)
    assert response.status_code == 200, response.text
    assert sorted(paths) == ["/a", "/b"]
    assert len(workers.requests[0].images) == 3


async def test_the_api_names_the_first_image_that_fails() -> None:
    def reply(path: str) -> bytes:
        return _response(b"<html>") if path == "/b" else _response(status="404 No")

    async with _serving(reply) as base, _fetcher() as fetcher:
        for urls, place in (((f"{base}/b", f"{base}/c"), 1), ((f"{base}/b",), 0)):
            response, workers = await _post(_body(*urls), fetcher)
            error = response.json()["error"]
            assert response.status_code == 400
            assert error["param"] == f"messages[0].content[{place}].image_url"
            assert workers.requests == []
    async with _fetcher(private_addresses=False) as fetcher:
        response, _ = await _post(_body("http://127.0.0.1:1/x"), fetcher)
    assert (response.status_code, response.json()["error"]["param"]) == (400, PARAM)


async def test_a_client_that_goes_stops_the_fetch() -> None:
    """C21: the server went on asking for somebody who was not there any more."""
    is_asked, is_closed = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        is_asked.set()
        await reader.read()  # until the other side closes
        is_closed.set()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with _fetcher(timeout_s=60) as fetcher:
        task = asyncio.ensure_future(fetcher.fetch(f"http://127.0.0.1:{port}/", PARAM))
        await is_asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(is_closed.wait(), 5)
    server.close()
