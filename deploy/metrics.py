"""The one place that turns the workers' counters into Prometheus text.

Owns metric names, and the deployment that renders them. Knows no engine: it pulls a plain
`WorkerReport` from every worker when asked. Invariants: one process renders all of it, so a
scrape never sees counters of another process; a registry of its own per scrape holds exactly
the workers that answered, so a dead worker's series end, and a new one's start at its own zero.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from ray.serve.handle import DeploymentHandle

from workers.contracts import FinishReason, WorkerReport
from workers.errors import WorkerLost

logger = logging.getLogger(__name__)

PREFIX = "specserve_"
LABELS = ("model", "worker")

# Fields of `EngineStats` that are counters of their own: field, name without `_total`, help.
COUNTERS = (
    ("admitted", "requests_admitted", "Requests accepted by the engine."),
    ("preemptions", "preemptions", "Sequences preempted and computed again."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
    ("cached_tokens", "cached_tokens", "Prompt tokens found in the prefix cache."),
    ("generated_tokens", "generated_tokens", "Tokens emitted."),
    ("target_steps", "target_steps", "Forward steps of the target model."),
    ("sampled_rows", "sampled_rows", "Rows of one sequence in one step that emitted tokens."),
    ("trimmed_tokens", "trimmed_tokens", "Accepted tokens cut off by a stop in mid-block."),
    ("draft_rounds", "spec_drafts", "Verify rounds of one sequence that had drafts."),
    ("draft_tokens", "spec_draft_tokens", "Draft tokens verified."),
    ("accepted_tokens", "spec_accepted_tokens", "Draft tokens accepted; bonus not counted."),
    ("breaker_opened", "spec_breaker_opened", "Times that drafting was left off for a while."),
    ("target_failures", "target_failures", "Target steps that failed."),
    ("target_time_s", "target_seconds", "Seconds in the target model."),
    ("draft_time_s", "draft_seconds", "Seconds in the draft model."),
)
GAUGES = (
    ("num_running", "requests_running", "Requests that hold blocks."),
    ("num_waiting", "requests_waiting", "Requests in the queue."),
    ("num_blocks", "kv_blocks", "K/V blocks in all."),
    ("num_free_blocks", "kv_blocks_free", "K/V blocks that no request holds."),
)
# Fields of `EngineStats` that are dictionaries: field, name, label, labels that always exist.
LABELLED = (
    (
        "finished", "requests_finished", "finish_reason", "Requests ended.",
        (*map(str, FinishReason), "error"),
    ),
    ("refused", "requests_refused", "reason", "Requests not admitted.", ()),
)  # fmt: skip
BREAKER_STATES = ("closed", "open", "half_open")
# Fields of `StreamCounters`: field, name without `_total`, help.
STREAMS = (
    ("interrupted", "streams_interrupted", "Times a stream lost its worker."),
    ("resumed", "streams_resumed", "Replays that went on with a stream."),
    ("lost", "streams_lost", "Streams that no worker could finish."),
    ("replayed_tokens", "replayed_tokens", "Tokens sent along with replays."),
    ("timed_out", "requests_timed_out", "Requests that were not finished in their time."),
)
# Ingress processes whose counters are kept, the latest; each restart makes a new one.
MAX_INGRESSES = 256
INFO = ("target", "draft", "method", "attention_backend", "device", "dtype")

Totals = dict[str, int]
PlainFamily = CounterMetricFamily | GaugeMetricFamily


class _Reports:
    """A collector over reports, in the shape `prometheus_client` asks for."""

    def __init__(
        self, reports: Sequence[WorkerReport], ingresses: Mapping[tuple[str, str], Totals]
    ) -> None:
        self._reports = reports
        self._ingresses = ingresses

    def collect(self) -> Iterable[Metric]:
        """Yield every family."""
        for field, name, text in COUNTERS:
            yield self._family(CounterMetricFamily(PREFIX + name, text, labels=LABELS), field)
        for field, name, text in GAUGES:
            yield self._family(GaugeMetricFamily(PREFIX + name, text, labels=LABELS), field)
        for field, name, label, text, known in LABELLED:
            counter = CounterMetricFamily(PREFIX + name, text, labels=(*LABELS, label))
            for report in self._reports:
                # A counter that never fired must exist, or its first event is invisible to rates.
                values = dict.fromkeys(known, 0) | getattr(report.stats, field)
                for value, count in values.items():
                    counter.add_metric([*_labels(report), value], count)
            yield counter
        yield self._positions()
        yield self._failures()
        yield self._breaker()
        yield self._info()
        for field, name, text in STREAMS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=("model", "ingress"))
            for labels, totals in self._ingresses.items():
                counter.add_metric(labels, totals.get(field, 0))
            yield counter

    def _family(self, family: PlainFamily, field: str) -> Metric:
        for report in self._reports:
            family.add_metric(_labels(report), getattr(report.stats, field))
        return family

    def _positions(self) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "spec_accepted_tokens_per_position",
            "Draft tokens accepted at a position of the draft, from 0.",
            labels=(*LABELS, "position"),
        )
        for report in self._reports:
            for position, count in enumerate(report.stats.accepted_per_position):
                family.add_metric([*_labels(report), str(position)], count)
        return family

    def _failures(self) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "spec_failures",
            "Failures that cost a step its drafts; the requests went on.",
            labels=(*LABELS, "stage", "reason"),
        )
        for report in self._reports:
            for key, count in report.stats.spec_failures.items():
                stage, _, reason = key.partition(":")
                family.add_metric([*_labels(report), stage, reason], count)
        return family

    def _breaker(self) -> Metric:
        family = GaugeMetricFamily(
            PREFIX + "spec_breaker_state",
            "1 for the state that the drafter's circuit breaker is in.",
            labels=(*LABELS, "state"),
        )
        for report in self._reports:
            if present := report.stats.breaker_state:
                for state in BREAKER_STATES:
                    family.add_metric([*_labels(report), state], state == present)
        return family

    def _info(self) -> Metric:
        family = GaugeMetricFamily(
            PREFIX + "worker_info", "1 for every worker that answers.", labels=(*LABELS, *INFO)
        )
        for report in self._reports:
            values = (str(getattr(report.info, name) or "") for name in INFO)
            family.add_metric([*_labels(report), *values], 1)
        return family


def _labels(report: WorkerReport) -> list[str]:
    return [report.info.model_id, report.info.worker_id]


def render(
    reports: Sequence[WorkerReport], ingresses: Mapping[tuple[str, str], Totals] | None = None
) -> str:
    """Return the workers' reports and the ingresses' counters as Prometheus text."""
    registry = CollectorRegistry()
    reports = sorted(reports, key=lambda r: r.info.worker_id)
    registry.register(_Reports(reports, ingresses or {}))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


class MetricsExporter:
    """Asks every worker and renders the answers; deployed as a single replica."""

    def __init__(self, workers: DeploymentHandle, timeout_s: float = 5.0) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        # (model, ingress) -> its latest totals, the latest last.
        self._ingresses: dict[tuple[str, str], Totals] = {}

    async def take(self, model: str, ingress: str, totals: Totals) -> None:
        """Keep an ingress's counters, which outlive it here."""
        known = self._ingresses.pop((model, ingress), {})
        # Two messages may have passed each other: none lets a counter fall.
        self._ingresses[model, ingress] = {
            name: max(count, known.get(name, 0)) for name, count in totals.items()
        }
        while len(self._ingresses) > MAX_INGRESSES:
            del self._ingresses[next(iter(self._ingresses))]

    async def render(self, model: str, ingress: str, totals: Totals) -> str:
        """Return the metrics of all workers that are alive, and of the ingress that asks.

        Raises:
            WorkerLost: One hangs; a failed scrape shows that, a part of the workers would not.
        """
        response = self._workers.broadcast("report")
        try:
            results = await response.results_async(
                timeout_s=self._timeout_s, return_exceptions=True
            )
        except TimeoutError as error:
            raise WorkerLost(f"a worker gave no report in {self._timeout_s:g} s") from error
        reports = [result for result in results if isinstance(result, WorkerReport)]
        if len(reports) < len(results):
            logger.warning(
                "%d of %d workers gave no report", len(results) - len(reports), len(results)
            )
        await self.take(model, ingress, totals)
        return render(reports, self._ingresses)
