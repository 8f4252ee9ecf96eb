"""The command line: output, exit codes, and the chat client against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from deploy import cli, client
from deploy.local import choose_port, reachable_host
from tests.serving.doubles import picture
from workers.errors import ConfigError

DEMO = str(cli.DEFAULT_CONFIG)


def run(*args: str, **options: Any) -> Any:
    return CliRunner().invoke(cli.app, list(args), **options)


def test_check_config_prints_what_the_processes_get() -> None:
    result = run("check-config", DEMO)
    assert result.exit_code == 0
    resolved = yaml.safe_load(result.stdout)
    assert resolved["engine"]["speculation"]["method"] == "draft_model"
    assert resolved["engine"]["cache"]["block_size"] == 16
    assert resolved["serving"]["max_replays"] >= 1


@pytest.mark.parametrize("command", ["check-config", "render", "serve"])
def test_a_wrong_config_is_one_line_and_exit_code_1(tmp_path: Path, command: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("model_id: m\ntarget: {path: ./gone}\ncache: {block_sise: 16}\n")
    result = run(command, *(["--config"] if command == "serve" else []), str(file))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "cache.block_sise" in result.stderr


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model_id: m\ntarget: {path: ./gone}\n")
    result = run("check-config", str(file))
    assert result.exit_code == 1
    assert "config.json" in result.stderr


def test_render_writes_a_serve_config() -> None:
    result = run("render", DEMO)
    assert result.exit_code == 0
    document = yaml.safe_load(result.stdout)
    application = document["applications"][0]
    assert application["import_path"] == "deploy.app:build_app"
    # The demo's paths stay portable, and defaults stay with the code.
    assert application["args"]["target"] == {"path": "demo:target"}
    assert "block_size" not in application["args"]["cache"]


def test_ports() -> None:
    assert choose_port("127.0.0.1", 0) > 0
    with pytest.raises(ConfigError, match=r"http\.port"):
        choose_port("192.0.2.1", 8000)
    with pytest.raises(ConfigError, match=r"http\.port"):
        choose_port("a" * 70, 0)  # longer than a name may be, which is no OSError
    assert reachable_host("0.0.0.0") == "127.0.0.1"


@pytest.mark.parametrize("option", [("--port", "70000"), ("--port", "-1"), ("--host", "")])
def test_a_wrong_address_is_one_line(option: tuple[str, str]) -> None:
    """Options pass by the file's checks, and sockets raise errors of several classes."""
    result = run("serve", *option)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert f"http.{option[0].removeprefix('--')}" in result.stderr


def test_the_curl_lines_hold_json() -> None:
    line = cli._curl("http://x", "m", '"Count from 3 to 9."')
    body = json.loads(line.partition("-d '")[2].rstrip().removesuffix("'"))
    assert body["messages"][0]["content"] == "Count from 3 to 9."


Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], list[Any]]:
    """Answer the client's requests with a handler; return the bodies that it got."""

    def install(handler: Handler) -> list[Any]:
        bodies: list[Any] = []

        def handle(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            bodies.append(json.loads(request.content))
            return handler(request)

        mock = httpx.Client(transport=httpx.MockTransport(handle))
        monkeypatch.setattr(client.httpx, "get", mock.get)
        monkeypatch.setattr(client.httpx, "stream", mock.stream)
        return bodies

    return install


def sse(*items: Any) -> httpx.Response:
    lines = [f"data: {i if isinstance(i, str) else json.dumps(i)}\n\n" for i in items]
    return httpx.Response(200, text="".join(lines))


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def test_chat_with_an_image(server: Any, tmp_path: Path) -> None:
    bodies = server(lambda _: sse(chunk("a red "), chunk("square"), "[DONE]"))
    picture().save(tmp_path / "a.png")
    result = run("chat", "what?", "--image", str(tmp_path / "a.png"))
    assert (result.exit_code, result.stdout) == (0, "a red square\n")
    content = bodies[0]["messages"][0]["content"]
    assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert content[1] == {"type": "text", "text": "what?"}
    assert (bodies[0]["model"], bodies[0]["stream"]) == ("m", True)


def test_a_conversation_keeps_its_history(server: Any) -> None:
    bodies = server(lambda _: sse(chunk("yes"), "[DONE]"))
    assert run("chat", input="one\ntwo\n").exit_code == 0
    assert [m["role"] for m in bodies[1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "no such thing"}}), "no such thing"),
        (httpx.Response(502, text="bad gateway"), "bad gateway"),
        (sse(chunk("a"), {"error": {"message": "worker lost"}}), "worker lost"),
        (sse(chunk("a")), "without [DONE]"),
        (httpx.Response(502, text="<html>\n<p>bad\n</html>"), "<html> <p>bad </html>"),
        (httpx.Response(502, json={"error": "down"}), '{"error":"down"}'),
        (httpx.Response(200, text="<html>\nwelcome\n</html>"), "without [DONE]"),
        (sse("{not json"), "no chat chunk: {not json"),
        (sse([]), "no chat chunk"),
        (sse({"choices": 5}), "no chat chunk"),
        (sse({"choices": [{"delta": None}]}), "no chat chunk"),
        (sse({"choices": [{"delta": {"content": 5}}]}), "no chat chunk"),
        (sse({"error": "overloaded"}), "overloaded"),
        (sse({"error": {"message": "x" * 10_000}}), "xxx..."),
    ],
)
def test_chat_errors(server: Any, response: httpx.Response, message: str) -> None:
    """E9: a cut stream is not taken for an answer, and what is no answer is told in one line."""
    server(lambda _: response)
    result = run("chat", "hi")
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1000


def test_comments_in_a_stream_are_skipped(server: Any) -> None:
    """Proxies send them to keep a connection open."""
    text = ': ping\n\nevent: x\ndata:{"choices": []}\n\n' + sse(chunk("yes"), "[DONE]").text
    server(lambda _: httpx.Response(200, text=text))
    assert run("chat", "hi").stdout == "yes\n"


@pytest.mark.parametrize("body", ["<html>\n</html>", "[]", '{"data": []}', '{"data": [5]}', "5"])
def test_a_server_of_another_kind(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Whatever listens at that port may answer: a line, no traceback."""
    response = httpx.Response(200, text=body, request=httpx.Request("GET", "http://x"))
    monkeypatch.setattr(client.httpx, "get", lambda *_, **__: response)
    result = run("chat", "hi")
    assert result.exit_code == 1
    assert "no specserve answers" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["http://x:port", "http://[", "x", "", "http://\0", "ftp://x"])
def test_a_url_that_is_none(url: str) -> None:
    """A client library refuses some of them with an error outside its own tree."""
    result = run("chat", "hi", "--url", url)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_no_server() -> None:
    port = choose_port("127.0.0.1", 0)
    result = run("chat", "hi", "--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == 1
    assert "no specserve answers" in result.stderr
