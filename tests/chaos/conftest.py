"""One server for the suite, and the report of what was done to it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import ROOT, SETTLED_S, Server, running

REPORT = ROOT / "out" / "chaos-report.json"
CONFIG = Path(__file__).with_name("chaos.yaml")
NUM_WORKERS = 2
WORKER = "ServeReplica:specserve:worker"
# `full` takes minutes, `short` is what CI runs.
IS_FULL = os.environ.get("CHAOS", "short") == "full"


def scaled(short: int, full: int) -> int:
    """Return how much of something is done."""
    return full if IS_FULL else short


@dataclass
class Report:
    """What the suite did, and what came of it."""

    faults_injected: dict[str, int] = field(default_factory=dict)
    streams_run: int = 0
    # Of those that were compared with an undisturbed run.
    streams_equal: int = 0
    streams_different: int = 0
    differences: list[str] = field(default_factory=list)
    aborts: int = 0
    refused_429: int = 0
    status_5xx: int = 0
    leaked_blocks: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    memory_mib: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0

    def fault(self, kind: str) -> None:
        """Count a fault."""
        self.faults_injected[kind] = self.faults_injected.get(kind, 0) + 1

    def compared(self, name: str, difference: str | None) -> None:
        """Count a stream that has an undisturbed twin."""
        self.streams_equal += difference is None
        if difference is not None:
            self.streams_different += 1
            self.differences.append(f"{name}: {difference}")


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    made, started_s = Report(), time.monotonic()
    yield made
    made.seconds = round(time.monotonic() - started_s, 1)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(asdict(made), indent=1) + "\n")
    print(f"\n{json.dumps(asdict(made), indent=1)}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, report: Report) -> Iterator[Server]:
    with running(CONFIG, tmp_path_factory.mktemp("chaos") / "log") as server:
        yield server
        names = ("interrupted", "resumed", "lost")
        for name in names:
            key = f"streams_{name}_total"
            report.counters[key] = int(server.metric(key))
        report.counters["replayed_tokens_total"] = int(server.metric("replayed_tokens_total"))


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=180, limits=limits) as client:
        yield client


def kill_worker(server: Server, place: int, report: Report) -> float:
    """Kill one worker's process as the system would, without a word; return when."""
    pids, killed_s = sorted(server.pids(WORKER)), time.time()
    os.kill(pids[place % len(pids)], signal.SIGKILL)
    report.fault("kill -9 of a worker")
    return killed_s


def leaked_blocks(server: Server, timeout_s: float = 15) -> int:
    """Return the blocks that are held although nothing runs."""
    time.sleep(SETTLED_S)
    deadline = time.monotonic() + timeout_s
    while True:
        held = server.metric("kv_blocks") - server.metric("kv_blocks_free")
        busy = server.metric("requests_running") + server.metric("requests_waiting")
        if (held == 0 and busy == 0) or time.monotonic() > deadline:
            return int(held)
        time.sleep(0.2)


def memory_mib(server: Server) -> float:
    """Return what all processes of the server hold, shared pages counted once."""
    total = 0
    for pid in server.pids():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # gone meanwhile
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return round(total / 1024, 1)
