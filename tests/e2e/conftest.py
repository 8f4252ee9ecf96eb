"""The real application, as a user starts it, with the demo models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "deploy" / "demo" / "models" / "sample.png"
READY_S = 120
STOP_S = 30
# Processes report once a second.
SETTLED_S = 1.5


@dataclass(frozen=True)
class Server:
    url: str
    # Set in the environment of all its processes.
    mark: str
    ready_s: float
    # The official client; safe to use from several threads.
    client: openai.OpenAI
    model: str

    def pids(self, name: str = "") -> list[int]:
        """Return its processes whose command line contains `name`."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _reads(entry / "environ", self.mark):
                found += [int(entry.name)] if _reads(entry / "cmdline", name) else []
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's sum over its series with these labels, as last reported."""
        return sum(self.values(name, **labels))

    def settled(self, name: str, **labels: str) -> float:
        """Return a metric as of now: once the workers have reported what was before."""
        time.sleep(SETTLED_S)
        return self.metric(name, **labels)

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of a metric's series with these labels."""
        found = []
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            match = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
            if match and match[1] == f"specserve_{name}":
                have = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
                if have.items() >= labels.items():
                    found.append(float(match[3]))
        return found

    def wait_replaced(self, since_s: float, timeout_s: float = 120) -> None:
        """Wait for a worker that is younger than `since_s`, seconds since the epoch."""
        deadline = time.monotonic() + timeout_s
        while not any(s > since_s for s in self.values("worker_start_time_seconds")):
            assert time.monotonic() < deadline, "the worker was not replaced"
            time.sleep(0.3)


def _reads(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:  # gone meanwhile
        return False


def start(log: Path, mark: str, config: Path, module: str) -> subprocess.Popen[bytes]:
    name, _, value = mark.partition("=")
    command = [sys.executable, "-m", module, "serve", "--port", "0"]
    command += ["--config", str(config)]
    environment = os.environ | {name: value}
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + READY_S
    while not (ready := re.search(r"ready in \d+ s at (\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return ready[1]


@contextmanager
def running(config: str | Path, log: Path, module: str = "deploy") -> Iterator[Server]:
    """Serve one of `configs/`, or a file, and see that it stops cleanly.

    Args:
        config: What is served.
        log: Takes the output.
        module: The command line; another one than the product's may put in faults.
    """
    file = config if isinstance(config, Path) else ROOT / "configs" / f"{config}.yaml"
    mark = f"SPECSERVE_TEST={uuid.uuid4().hex}"
    started = time.monotonic()
    process = start(log, mark, file, module)
    try:
        url = wait_ready(process, log)
        seconds = time.monotonic() - started
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            server = Server(url, mark, seconds, client, client.models.list().data[0].id)
            yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S)
        finally:
            process.kill()
    assert code == 0, log.read_text()
    assert "stopped" in log.read_text()
    time.sleep(0.5)
    assert server.pids() == [], "processes were left behind"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("demo", tmp_path_factory.mktemp("server") / "log") as server:
        yield server
