"""What the exporter keeps of processes that come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import serving.series
from deploy.metrics.ledger import GONE_S, MAX_FORMER, MISSED_S, Ledger
from deploy.metrics.store import load, save
from deploy.metrics.text import render
from workers.contracts import Report, Role
from workers.telemetry import series
from workers.telemetry.meter import Meter

BUILD = ("1.0", "3.11", "2.60")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class MemoryStore:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, name: str, value: bytes) -> None:
        self.kept[name] = value

    def items(self) -> dict[str, bytes]:
        return dict(self.kept)


class Process:
    """One that counts and reports."""

    def __init__(self, source: str, role: Role = Role.WORKER, model: str = "m") -> None:
        families = series.FAMILIES if role is Role.WORKER else serving.series.FAMILIES
        self.meter = Meter(families)
        self._last = Report(role, model, source, 0, {})

    def report(self, *, is_last: bool = False) -> Report:
        self._last = replace(
            self._last, number=self._last.number + 1, snapshot=self.meter.snapshot(),
            is_last=is_last,
        )  # fmt: skip
        return self._last

    def work(self, number: int = 1) -> Process:
        self.meter.add(series.ADMITTED, number)
        self.meter.observe(series.QUEUE_SECONDS, 0.02, times=number)
        self.meter.set(series.RUNNING, number)
        return self


def take(ledger: Ledger, report: Report, now_s: float) -> None:
    entry = ledger.plan(report, now_s)
    if entry is not None:
        ledger.commit(entry)


def samples(text: str) -> Samples:
    return {
        (sample.name.removeprefix("specserve_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(ledger: Ledger, now_s: float, name: str, **labels: str) -> float | None:
    found = samples(render(ledger, BUILD, now_s))
    return found.get((name, frozenset({"model": "m", **labels}.items())))


def test_workers_are_apart_and_histograms_are_summed() -> None:
    ledger = Ledger()
    take(ledger, Process("a").work(3).report(), 0)
    take(ledger, Process("b").work(4).report(), 0)
    assert value(ledger, 1, "requests_admitted_total", worker="0") == 3
    assert value(ledger, 1, "requests_admitted_total", worker="1") == 4
    assert value(ledger, 1, "queue_seconds_count") == 7
    assert value(ledger, 1, "queue_seconds_bucket", le="0.025") == 7
    assert value(ledger, 1, "queue_seconds_bucket", le="0.01") == 0
    assert value(ledger, 1, "queue_seconds_bucket", le="+Inf") == 7


def test_f8_a_replacement_goes_on_where_the_worker_that_it_replaces_ended() -> None:
    """F8: a dead worker's series ended, totals went back, and rates missed what it had done."""
    ledger = Ledger()
    take(ledger, Process("a").work(3).report(), 0)
    take(ledger, Process("b").work(4).report(), 8)
    late = GONE_S + 1
    assert value(ledger, late, "requests_running", worker="0") is None
    assert value(ledger, late, "requests_admitted_total", worker="0") == 3
    take(ledger, Process("c").work(5).report(), late)
    assert value(ledger, late, "requests_admitted_total", worker="0") == 8
    assert value(ledger, late, "requests_admitted_total", worker="1") == 4
    assert value(ledger, late, "requests_running", worker="0") == 5
    assert value(ledger, late, "queue_seconds_count") == 12


def test_a_worker_is_missed_until_it_is_replaced_or_said_goodbye() -> None:
    ledger = Ledger()
    a, b = Process("a"), Process("b")
    take(ledger, a.report(), 0)
    take(ledger, b.report(), 0)
    take(ledger, b.report(is_last=True), 1)
    assert value(ledger, 2, "worker_up", worker="0") == 1
    assert value(ledger, 2, "worker_up", worker="1") is None
    assert value(ledger, GONE_S, "worker_up", worker="0") == 0
    assert value(ledger, MISSED_S, "worker_up", worker="0") is None
    # The one that had said goodbye gives its place first come, first served.
    take(ledger, Process("c").report(), 5)
    assert value(ledger, 6, "worker_up", worker="1") == 1
    assert value(ledger, 6, "worker_up", worker="2") is None


def test_a_quick_replacement_leaves_nobody_missing() -> None:
    """A worker back before its predecessor's silence told: five minutes of a false alarm."""
    ledger, b = Ledger(), Process("b")
    take(ledger, Process("a").work(3).report(), 0)
    take(ledger, b.report(), 0)
    take(ledger, Process("c").report(), GONE_S - 2)
    take(ledger, b.report(), GONE_S - 1)
    late = GONE_S + 1
    assert value(ledger, late, "worker_up", worker="0") is None
    assert value(ledger, late, "worker_up", worker="2") == 1
    assert value(ledger, late, "requests_admitted_total", worker="0") == 3
    # One that came accounts for one that went.
    assert value(ledger, late + GONE_S, "worker_up", worker="1") == 0


def test_a_report_that_was_overtaken_changes_nothing() -> None:
    ledger, process = Ledger(), Process("a")
    first, second = process.work(1).report(), process.work(1).report()
    take(ledger, second, 0)
    take(ledger, first, 1)
    assert value(ledger, 1, "requests_admitted_total", worker="0") == 2


def test_a_worker_that_comes_back_is_not_counted_twice() -> None:
    """Its network was cut, and its place was given to another one."""
    ledger, a = Ledger(), Process("a")
    take(ledger, a.work(10).report(), 0)
    take(ledger, Process("b").work(1).report(), GONE_S)
    take(ledger, a.work(2).report(), GONE_S + 1)
    assert value(ledger, GONE_S + 1, "requests_admitted_total", worker="0") == 11
    assert value(ledger, GONE_S + 1, "requests_admitted_total", worker="1") == 2
    assert value(ledger, GONE_S + 1, "queue_seconds_count") == 13


def test_former_processes_are_forgotten_in_the_end() -> None:
    ledger = Ledger()
    for number in range(3 * MAX_FORMER):
        take(ledger, Process(str(number)).work().report(is_last=True), number)
    assert len(ledger._former) == MAX_FORMER
    assert value(ledger, 0, "requests_admitted_total", worker="0") == 3 * MAX_FORMER
    assert value(ledger, 0, "requests_admitted_total", worker="1") is None


def test_f12_models_are_apart_and_no_other_name_is_a_label() -> None:
    """F12: several models without a label; ids in labels, a series for each request."""
    ledger = Ledger()
    for source in ("a", "b"):
        take(ledger, Process(source, model=f"model-{source}").work().report(), 0)
        take(ledger, Process(f"i{source}", Role.INGRESS, f"model-{source}").report(), 0)
    found = samples(render(ledger, BUILD, 1))
    labels = {label for _, pairs in found for label in pairs}
    assert {value for name, value in labels if name == "model"} == {"model-a", "model-b"}
    assert {value for name, value in labels if name == "worker"} == {"0"}
    assert all("model" in dict(pairs) for name, pairs in found if name != "build_info")


def test_what_another_version_sent_is_left_out() -> None:
    """During an upgrade both report: an unknown series must not make the scrape invalid."""
    report = Process("a").work(3).report()
    snapshot = report.snapshot
    snapshot["unheard_of"] = {(): 1.0}
    snapshot[series.QUEUE_SECONDS.name] = {(): [1.0, 2.0]}
    snapshot[series.FINISHED.name] = {("stop", "more"): 1.0, ("stop",): 2.0}
    ledger = Ledger()
    take(ledger, report, 0)
    found = samples(render(ledger, BUILD, 0))
    assert value(ledger, 0, "requests_finished_total", worker="0", finish_reason="stop") == 2
    assert not any("unheard_of" in name or "more" in dict(pairs).values() for name, pairs in found)


def test_a_ledger_outlives_its_exporter() -> None:
    store, ledger, process = MemoryStore(), Ledger(), Process("a")
    for report in (process.work(3).report(), Process("i", Role.INGRESS).report()):
        entry = ledger.plan(report, 0)
        assert entry is not None
        save(store, entry)
        ledger.commit(entry)
    again = load(store, 1000)
    assert render(again, BUILD, 1001) == render(ledger, BUILD, 1)
    take(again, process.work(1).report(), 1002)
    assert value(again, 1002, "requests_admitted_total", worker="0") == 4


def test_what_cannot_be_read_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    entry = Ledger().plan(Process("a").work(3).report(), 0)
    assert entry is not None
    save(store, entry)
    store.put("worker/other/000000", b"{}")
    store.put("worker/third/000000", b"\xff")
    ledger = load(store, 0)
    assert value(ledger, 0, "requests_admitted_total", worker="0") == 3
    assert len([r for r in caplog.records if "cannot be read" in r.getMessage()]) == 2


# What may happen to a fleet: a process works and reports, its last report or not, an old report
# comes late, time passes, the exporter is replaced.
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["report", "report", "last", "late", "wait", "restart"]), st.integers(0, 4)
    ),
    max_size=40,
)


@given(EVENTS)
def test_f8_no_counter_ever_falls(events: list[tuple[str, int]]) -> None:
    """F8: whatever comes, goes, hangs or is replaced, scrapes are monotone, and sums are right."""
    store, ledger, now_s = MemoryStore(), Ledger(), 0.0
    processes: dict[int, Process] = {}
    reports: dict[int, Report] = {}
    generation, work, told, before = 0, 0, 0, Samples()
    for kind, number in events:
        now_s += 1
        report = None
        if kind == "wait":
            now_s += 6 * number
        elif kind == "restart":
            ledger = load(store, now_s)
        elif kind == "late":
            report = reports.get(number)
        else:
            if number not in processes:
                generation += 1
                processes[number] = Process(f"p{generation}")
            process = processes[number].work(number + 1)
            work += number + 1
            report = reports[number] = process.report(is_last=kind == "last")
            told = work
            if kind == "last":
                del processes[number], reports[number]
        if report is not None and (entry := ledger.plan(report, now_s)) is not None:
            save(store, entry)
            ledger.commit(entry)
        after = samples(render(ledger, BUILD, now_s))
        for key, value in before.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert after.get(key, -1.0) >= value, key
        before = after
    admitted = sum(v for (name, _), v in before.items() if name == "requests_admitted_total")
    has_restarted = any(kind == "restart" for kind, _ in events)
    # What a restarted exporter has forgotten: who gave up a place and may come back.
    assert admitted == told or (has_restarted and admitted > told)
