"""The Prometheus that `specserve observe` runs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deploy import cli
from deploy.observe import ObserveError, observing, prometheus_config


@pytest.mark.parametrize(
    ("url", "scheme", "target", "path"),
    [
        ("http://127.0.0.1:8000", "http", "127.0.0.1:8000", "/metrics"),
        ("https://example.org/", "https", "example.org", "/metrics"),
        ("http://[::1]:80/llm/", "http", "[::1]", "/llm/metrics"),
    ],
)
def test_a_server_is_one_target(url: str, scheme: str, target: str, path: str) -> None:
    config = prometheus_config(url, 0.25)
    (job,) = config["scrape_configs"]
    assert (job["scheme"], job["metrics_path"]) == (scheme, path)
    assert job["static_configs"][0]["targets"] == [target]
    assert config["global"]["scrape_interval"] == "250ms"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://example.org", "http://", "http://a:b"])
def test_a_url_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(ObserveError):
        prometheus_config(url, 1)
    result = CliRunner().invoke(cli.app, ["observe", "--url", url])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_without_prometheus_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(cli.app, ["observe"])
    assert result.exit_code == 1
    assert "apt-get install" in result.stderr


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli.app, ["observe", "--port", str(port)])
    assert result.exit_code == 1
    assert "address already in use" in result.stderr
    assert result.stderr.count("\n") == 1


def test_it_reads_the_rules_on_loopback_and_ends_with_the_block() -> None:
    with observing("http://127.0.0.1:1", interval_s=1) as (url, process):
        assert url.startswith("http://127.0.0.1:")
        groups = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
        assert groups
    assert process.poll() is not None
    with pytest.raises(httpx.TransportError):
        httpx.get(url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_without_an_error(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy", "observe", "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = ""
    while "Ctrl-C" not in line:
        line = process.stdout.readline()
        assert line or process.poll() is None
    process.send_signal(number)
    assert process.wait(30) == 0
    process.stdout.close()
