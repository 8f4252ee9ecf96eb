"""The application with faults, its traffic, a Prometheus, and a collector of traces."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.observe import observing
from tests.e2e.conftest import ROOT, SETTLED_S, Server, running
from tests.observe.collector import Collector, collecting
from tests.observe.traffic import Traffic, until

WORKER = "ServeReplica:specserve:worker"
LOG_INTERVAL_S = 0.5
NUM_SCRAPES = 20


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    url: str

    def get(self, path: str, **params: str) -> Any:
        """Return an answer of its API."""
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=10).json()
        assert reply["status"] == "success", reply
        return reply["data"]

    def values(self, expr: str) -> list[float]:
        """Return the values that a query gives now."""
        found = self.get("query", query=expr)
        samples = [found] if found["resultType"] == "scalar" else found["result"]
        return [float(s["value"][1] if isinstance(s, dict) else s[1]) for s in samples]

    def wait_all(self, exprs: list[str], timeout_s: float = 90) -> None:
        """Wait until each query gives data, and none of it is no number."""
        missing, deadline = list(exprs), time.monotonic() + timeout_s
        while missing:
            found = {expr: self.values(expr) for expr in missing}
            missing = [expr for expr, values in found.items() if not values or values != values]
            nan = [expr for expr, values in found.items() if any(v != v for v in values)]
            assert not nan
            if missing:
                assert time.monotonic() < deadline, "no data:\n" + "\n".join(missing)
                time.sleep(1)


@dataclass(frozen=True)
class Observed:
    """All that runs."""

    server: Server
    prometheus: Prometheus
    traffic: Traffic
    collector: Collector
    # Of all processes of the application.
    logs: Path
    # Taken one after the other, before, while and after a worker was killed.
    scrapes: list[str]

    def scrape(self) -> str:
        """Return what Prometheus would get."""
        return httpx.get(f"{self.server.url}/metrics", timeout=10).text

    def lines(self) -> list[dict[str, Any]]:
        """Return the log lines of all processes."""
        found = []
        for path in sorted(self.logs.glob("worker-*.err")):
            for line in path.read_text(errors="replace").splitlines():
                found += [json.loads(line)] if line.startswith("{") else []
        return found

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Have nothing run, and everything told."""
        with self.traffic.paused():
            time.sleep(SETTLED_S + LOG_INTERVAL_S)
            yield


@contextmanager
def repeating(work: Callable[[], object], every_s: float) -> Iterator[None]:
    """Do something again and again."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            work()
            is_over.wait(every_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    if shutil.which("prometheus") is None and "CI" not in os.environ:
        pytest.skip("needs `prometheus`")
    folder = tmp_path_factory.mktemp("observed")
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
        config["speculation"]["breaker"] = {"open_s": 0.3, "max_open_s": 0.3}
        config["observability"] = {
            "log_format": "json", "log_interval_s": LOG_INTERVAL_S,
            "trace_endpoint": collector.url,
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        log = folder / "log"
        server = stack.enter_context(
            running(folder / "config.yaml", log, module="tests.observe.faults")
        )
        logs = re.search(r"logs are (\S+)/worker-", log.read_text())
        assert logs
        url, _ = stack.enter_context(observing(server.url, interval_s=1.0))
        traffic = Traffic(server)
        stack.callback(traffic.stop)
        traffic.start()
        observed = Observed(server, Prometheus(url), traffic, collector, Path(logs[1]), [])
        _kill_a_worker(observed)
        yield observed


def _kill_a_worker(observed: Observed) -> None:
    """Kill one under streams, and wait for another in its place; scrape all along."""
    server, scrapes = observed.server, observed.scrapes
    until(lambda: min(server.values("requests_running"), default=0) > 0, "work for both workers")
    with repeating(lambda: scrapes.append(observed.scrape()), 0.3):
        until(lambda: len(scrapes) >= 3, "a scrape")
        killed_s = time.time()
        os.kill(server.pids(WORKER)[0], signal.SIGKILL)
        server.wait_replaced(killed_s)
        wanted = max(NUM_SCRAPES, len(scrapes) + 5)
        until(lambda: len(scrapes) >= wanted, "more scrapes")
