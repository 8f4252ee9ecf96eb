"""API keys and other origins: who gets in, what the rest is told, and what is never shown."""

from __future__ import annotations

import hmac
import logging
import pickle
from pathlib import Path
from typing import Any

import httpx
import pytest

import serving.auth
from serving.api import ROUTES
from serving.auth import OPEN_PATHS, ApiKeys, load_api_keys
from serving.config import ServingConfig
from tests.serving.doubles import ScriptedWorkers, deltas_of, encode, make_app
from workers.errors import ConfigError

KEYS = ("sk-first", "sk-second", "sk-third")
VARIABLE = "TEST_API_KEYS"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
ORIGIN = "https://app.example"


def client_of(keys: tuple[str, ...] = KEYS, **options: Any) -> httpx.AsyncClient:
    workers = ScriptedWorkers([list(deltas_of(encode("fine<|im_end|>")))])
    app = make_app(workers, api_keys=ApiKeys(keys), **options)
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("header", [*map("Bearer {}".format, KEYS), "bearer  sk-first "])
async def test_each_key_opens(header: str) -> None:
    async with client_of() as client:
        response = await client.post(CHAT, json=BODY, headers={"authorization": header})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "sk-first", "Basic sk-first", "Bearer sk-fir",
     "Bearer SK-FIRST", "Bearer sk-first sk-second", "Bearer sk-first,sk-second",
     b"Bearer \xff\xfe"],
)  # fmt: skip
async def test_everything_else_is_refused(header: str | bytes | None) -> None:
    headers = {} if header is None else {"authorization": header}
    async with client_of() as client:
        response = await client.post(CHAT, json=BODY, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert set(error) == {"message", "type", "param", "code"}
    assert "sk-" not in response.text
    assert response.headers["x-request-id"]


async def test_only_the_open_paths_are_open() -> None:
    """A route that is added later needs a key unless somebody says that it does not."""
    async with client_of() as client:
        for path, method, _ in ROUTES:
            response = await client.request(method, path)
            assert (response.status_code == 401) is (path not in OPEN_PATHS), path
        assert {path for path, _, _ in ROUTES} >= OPEN_PATHS
        for path in ("/v1/nothing", "//v1/models", "/openapi.json", "/health/"):
            assert (await client.get(path)).status_code == 401, path


async def test_without_keys_all_is_open() -> None:
    async with client_of(()) as client:
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert (await client.post(CHAT, json=BODY, headers=bearer("any"))).status_code == 200


async def test_a_refusal_reads_no_body() -> None:
    """Else whoever has no key can still make the server hold bodies."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-length", b"9" * 12)], "asgi": {}, "root_path": "",
    }  # fmt: skip
    app: Any = make_app(ScriptedWorkers([]), api_keys=ApiKeys(KEYS))
    await app(scope, receive, send)
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("key", [*KEYS, "sk-other", ""])
def test_all_keys_are_always_compared(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an answer must not tell which key it was, nor how much of one was right."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    keys = ApiKeys(KEYS)

    class Module:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(serving.auth, "hmac", Module)
    assert keys.accept(f"Bearer {key}") is (key in KEYS)
    assert len(compared) == len(KEYS)
    assert {len(part) for pair in compared for part in pair} == {32}


async def test_keys_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with client_of() as client:
        await client.post(CHAT, json=BODY, headers=bearer("sk-first"))
        await client.post(CHAT, json=BODY, headers=bearer("sk-wrong"))
        await client.get("/v1/models?key=sk-query", headers=bearer("sk-first"))
    # httpx logs the client's side of the test.
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("serving")]
    assert len(ours) == 3
    assert not [line for line in ours if "sk-" in line]


def test_keys_from_file_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team's\nsk-a\n\n  sk-b  \n#sk-c\n")
    monkeypatch.setenv(VARIABLE, "sk-d, sk-e,")
    keys = load_api_keys(str(file), VARIABLE)
    accepted = [k for k in "abcde" if keys.accept(f"Bearer sk-{k}")]
    assert accepted == ["a", "b", "d", "e"]
    assert not keys.accept("Bearer #sk-c")
    assert not keys.accept("Bearer ")


@pytest.mark.parametrize("value", [None, ""])
def test_no_keys(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert not load_api_keys(None, VARIABLE)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        (b"", "holds no key"),
        (b"# only\n\n", "holds no key"),
        (b"\xff\xfesecret", "is no text"),
        (b"sk-ok\nsecret # of somebody\n", "entry 2"),
    ],
)
def test_a_file_without_keys_stops_the_start(
    content: bytes | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would be open to all, though its operator asked for keys."""
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_api_keys(str(file), VARIABLE)
    assert "secret" not in f"{caught.value}"
    assert caught.value.key == "ingress.api_key_file"


@pytest.mark.parametrize("value", [" , ", "sk-a,secret two"])
def test_a_variable_without_keys_stops_the_start(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError) as caught:
        load_api_keys(None, VARIABLE)
    assert "secret" not in f"{caught.value}"


def test_settings_hold_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps the arguments of deployments, and shows them."""
    monkeypatch.setenv("SPECSERVE_API_KEYS", "sk-secret")
    config = ServingConfig("m", "/m", api_key_file="/keys")
    assert b"sk-secret" not in pickle.dumps(config)
    assert "sk-secret" not in repr(ApiKeys(["sk-secret"]))
    assert b"sk-secret" not in pickle.dumps(ApiKeys(["sk-secret"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("api_key_file", "keys.txt"),
        ("api_key_env", ""),
        ("cors_origins", ("https://a.example/",)),
        ("cors_origins", ("a.example",)),
        ("keep_alive_s", -1),
        ("keep_alive_s", float("nan")),
    ],
)
def test_settings_are_checked(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServingConfig("m", "/m", **{key: value})
    assert caught.value.key == f"ingress.{key}"


def preflight(headers: str) -> dict[str, str]:
    return {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": headers,
    }


async def test_a_preflight_needs_no_key() -> None:
    """A browser sends none with it, so the API could not be used from a page at all."""
    async with client_of(cors_origins=(ORIGIN,)) as client:
        # As OpenAI's own client sends them.
        headers = preflight("authorization, content-type, x-request-id, x-stainless-os")
        response = await client.options(CHAT, headers=headers)
        refused = await client.options(CHAT, headers={**headers, "origin": "https://evil.example"})
        unknown = await client.options(CHAT, headers=preflight("x-other"))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert response.headers["access-control-allow-methods"] == "GET, POST"
    assert refused.status_code == unknown.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


async def test_refusals_can_be_read_across_origins() -> None:
    """Without the header a page sees "network error" instead of the 401 or 413."""
    headers = {"origin": ORIGIN, **bearer("sk-first")}
    async with client_of(cors_origins=(ORIGIN,), max_body_bytes=4000) as client:
        responses = [
            await client.post(CHAT, json=BODY, headers={"origin": ORIGIN}),
            await client.post(CHAT, json={}, headers=headers),
            await client.post(CHAT, content=b"x" * 5000, headers=headers),
            await client.get("/v1/nothing", headers=headers),
            await client.post(CHAT, json=BODY, headers=headers),
        ]
    assert [r.status_code for r in responses] == [401, 400, 413, 404, 200]
    for response in responses:
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"]


async def test_a_failure_can_be_read_across_origins() -> None:
    app = make_app(ScriptedWorkers([[RuntimeError("x")]]), cors_origins=("*",))
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(CHAT, json=BODY, headers={"origin": ORIGIN})
    assert response.status_code == 500
    assert response.headers["access-control-allow-origin"] == "*"


async def test_other_origins_are_off_by_default() -> None:
    async with client_of(()) as client:
        response = await client.post(CHAT, json=BODY, headers={"origin": ORIGIN})
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers
        assert (await client.options(CHAT, headers=preflight("x"))).status_code == 405
