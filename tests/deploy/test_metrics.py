"""The exporter: names, labels, and what a scrape holds."""

from __future__ import annotations

import dataclasses
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deploy.metrics import (
    COUNTERS,
    GAUGES,
    LABELLED,
    MAX_INGRESSES,
    STREAMS,
    MetricsExporter,
    render,
)
from serving.counters import StreamCounters
from workers.contracts import EngineStats, WorkerInfo, WorkerReport


def report(worker_id: str, stats: EngineStats | None = None) -> WorkerReport:
    info = WorkerInfo(
        worker_id=worker_id, model_id="m", target="t", draft=None, method="none",
        attention_backend="sdpa", max_sequence_len=10, num_blocks=4, block_size=16, device="cpu",
        dtype="float32",
    )  # fmt: skip
    return WorkerReport(info, stats or EngineStats())


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    wanted = {"model": "m", "worker": "a", **labels}
    return samples(text)[f"specserve_{name}", frozenset(wanted.items())]


def test_values_and_labels() -> None:
    stats = EngineStats(
        admitted=5, finished={"stop": 2, "error": 1}, refused={"too_long": 4}, num_running=2,
        accepted_tokens=7, draft_tokens=9, accepted_per_position=(4, 3), num_blocks=8,
        num_free_blocks=6, spec_failures={"draft:nan": 3}, target_time_s=1.5,
    )  # fmt: skip
    text = render([report("a", stats), report("b")])
    assert value(text, "requests_admitted_total") == 5
    assert value(text, "requests_admitted_total", worker="b") == 0
    assert value(text, "requests_finished_total", finish_reason="stop") == 2
    assert value(text, "requests_refused_total", reason="too_long") == 4
    assert value(text, "spec_accepted_tokens_per_position_total", position="1") == 3
    assert value(text, "spec_failures_total", stage="draft", reason="nan") == 3
    assert value(text, "kv_blocks_free") == 6
    assert value(text, "target_seconds_total") == 1.5


def test_every_counter_is_exported() -> None:
    """A field that the engine fills and nobody shows is a field that nobody misses."""
    exported = {row[0] for row in (*COUNTERS, *GAUGES, *LABELLED)}
    exported |= {"accepted_per_position", "spec_failures", "breaker_state"}
    assert exported == {field.name for field in dataclasses.fields(EngineStats)}


async def test_counters_of_ingresses_outlive_them_and_never_fall() -> None:
    """F8: each scrape met another ingress, and counters went up and down."""
    exporter = MetricsExporter(_NoWorkers())  # type: ignore[arg-type]
    await exporter.take("m", "a", {"interrupted": 3, "lost": 1})
    await exporter.take("m", "a", {"interrupted": 2, "lost": 1})  # overtaken on its way
    text = await exporter.render("m", "b", {"interrupted": 5})
    wanted = {("a", "streams_interrupted"): 3, ("a", "streams_lost"): 1,
              ("b", "streams_interrupted"): 5, ("b", "requests_timed_out"): 0}  # fmt: skip
    for (ingress, name), count in wanted.items():
        labels = frozenset({"model": "m", "ingress": ingress}.items())
        assert samples(text)[f"specserve_{name}_total", labels] == count
    for i in range(1000):
        await exporter.take("m", str(i), {})
    assert len(exporter._ingresses) == MAX_INGRESSES


class _NoWorkers:
    def broadcast(self, _: str) -> Any:
        class Response:
            async def results_async(self, **_: Any) -> list[object]:
                return []

        return Response()


def test_every_counter_of_streams_is_exported() -> None:
    assert {row[0] for row in STREAMS} == {f.name for f in dataclasses.fields(StreamCounters)}


def test_finish_reasons_exist_before_they_happen() -> None:
    """`increase()` cannot see the first event of a series that did not exist."""
    text = render([report("a")])
    for reason in ("stop", "length", "abort", "error"):
        assert value(text, "requests_finished_total", finish_reason=reason) == 0


def test_a_dead_worker_s_series_end() -> None:
    assert 'worker="b"' in render([report("a"), report("b")])
    assert 'worker="b"' not in render([report("a")])


def test_the_info_tells_what_runs() -> None:
    text = render([report("a")])
    assert "specserve_worker_info{" in text
    assert 'draft=""' in text
    assert 'method="none"' in text


def test_no_workers_is_still_a_valid_scrape() -> None:
    assert samples(render([])) == {}


def test_no_series_appears_twice() -> None:
    """A family listed twice made the scrape invalid."""
    lines = render([report("a"), report("b")]).splitlines()
    names = [line.split(" ")[2] for line in lines if line.startswith("# TYPE")]
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))
    assert len(series) == len(set(series))
