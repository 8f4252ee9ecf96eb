"""What a scrape of many workers costs the exporter; run by hand.

    python -m tests.perf.scrape

Every worker has every series, with values of a busy one. Nothing here depends on Ray: the ledger
and the text are the exporter's own, and a report's way into the store is timed apart.
"""

from __future__ import annotations

import statistics
import time

import serving.series
from deploy.metrics.ledger import Ledger
from deploy.metrics.store import save
from deploy.metrics.text import render
from tests.deploy.test_ledger import BUILD, MemoryStore, Process
from workers.contracts import Role
from workers.stats import StatsRecorder
from workers.telemetry import series
from workers.telemetry.meter import Kind, Snapshot

NUM_WORKERS, NUM_INGRESSES, NUM_DRAFTS, NUM_SCRAPES = 100, 4, 8, 30


def busy_worker() -> Snapshot:
    """Return every series of a worker, each with a number that takes space."""
    meter = StatsRecorder("nextn", NUM_DRAFTS).meter
    meter.set(series.WORKER_INFO, 1, "x" * 8, "/models/target", "/models/draft", "nextn", "flash",
              "cuda:0", "bfloat16")  # fmt: skip
    for state in series.BREAKER_STATES:
        meter.set(series.BREAKER_STATE, 0, state)
    snapshot = meter.snapshot()
    for family in series.FAMILIES:
        for labels in snapshot[family.name]:
            is_histogram = family.kind is Kind.HISTOGRAM
            cells = [1234567.0] * (len(family.buckets) + 2)
            snapshot[family.name][labels] = cells if is_histogram else 1234567.25
    return snapshot


def main() -> None:
    """Print medians and worst cases, in milliseconds."""
    ledger, store, takes_s, scrapes_s = Ledger(), MemoryStore(), [], []
    snapshot = busy_worker()
    processes = [Process(f"w{i}") for i in range(NUM_WORKERS)]
    processes += [Process(f"i{i}", Role.INGRESS) for i in range(NUM_INGRESSES)]
    for process in processes:
        report = process.report()
        if report.role is Role.WORKER:
            report.snapshot.update(snapshot)
        start_s = time.perf_counter()
        entry = ledger.plan(report, 0)
        assert entry is not None
        save(store, entry)
        ledger.commit(entry)
        takes_s.append(time.perf_counter() - start_s)
    for _ in range(NUM_SCRAPES):
        start_s = time.perf_counter()
        text = render(ledger, BUILD, 1)
        scrapes_s.append(time.perf_counter() - start_s)
    num_families = len(series.FAMILIES) + len(serving.series.FAMILIES)
    print(f"{NUM_WORKERS} workers, {NUM_INGRESSES} ingresses, {num_families} families")
    print(f"a scrape: {text.count(chr(10))} lines, {len(text) / 1e6:.2f} MB,"
          f" {_milliseconds(scrapes_s)}")  # fmt: skip
    print(f"a report taken and written: {_milliseconds(takes_s)}")


def _milliseconds(seconds: list[float]) -> str:
    return f"median {1000 * statistics.median(seconds):.2f} ms, most {1000 * max(seconds):.2f} ms"


if __name__ == "__main__":
    main()
