"""What an engine counts is what its requests were told, for every method."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.workers.conftest import Checkpoints
from tests.workers.engines import Outcome, make_engine, run
from tests.workers.scripted import script
from tests.workers.tiny import mixed_requests, prompt, request
from workers.activity import ActivityLog
from workers.contracts import TokenDelta
from workers.engine import Engine
from workers.phases import PhaseSpans
from workers.stats import EngineStats
from workers.telemetry import series
from workers.telemetry.meter import total
from workers.telemetry.tracing import Tracing, traceparent_of

FAMILY, HYBRID = "qwen2_5_vl", "qwen3_5"
Drafts = Callable[[str], str]


class Told(Outcome):
    """Also what the last delta of each request said about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, TokenDelta] = {}


def run_and_keep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Told:
    told, step = Told(), engine.step

    def kept() -> Any:
        result = step()
        told.last |= {delta.request_id: delta for delta in result.deltas}
        return result

    monkeypatch.setattr(engine, "step", kept)
    told.token_ids = run(engine, mixed_requests(8), per_step=2).token_ids
    return told


@pytest.mark.parametrize("method", ["draft_model", "ngram", "nextn", "none"])
def test_f2_log_answers_and_counters_say_the_same(
    checkpoints: Checkpoints, noisy_draft: Drafts, method: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """F2: with n-grams the log said 0.80 and the answer 0.0, as each method counted its own way."""
    caplog.set_level(logging.INFO)
    family = HYBRID if method == "nextn" else FAMILY
    draft = noisy_draft(family) if method == "draft_model" else None
    options = {} if method == "draft_model" else {"method": method}
    options |= {"ngram_min": 1} if method == "ngram" else {}
    engine = make_engine(checkpoints(family), draft, num_draft_tokens=3, **options)
    log = ActivityLog(1)
    log.show(engine.stats().snapshot, 0)
    told = run_and_keep(engine, monkeypatch)
    stats = engine.stats()
    log.show(stats.snapshot, 5)

    ends = told.last.values()
    drafts = sum(delta.num_draft_tokens for delta in ends)
    accepted = sum(delta.num_accepted_tokens for delta in ends)
    tokens = sum(map(len, told.token_ids.values()))
    assert (stats.draft_tokens, stats.accepted_tokens) == (drafts, accepted)
    assert (stats.generated_tokens, stats.sampled_rows) == (tokens, sum(d.num_steps for d in ends))
    (line,) = (record for record in caplog.records if record.name == "workers.activity")
    new = vars(line)
    assert (new["new_draft_tokens"], new["new_accepted_tokens"]) == (drafts, accepted)
    assert new["new_tokens"] == tokens
    assert 0 <= accepted <= drafts
    assert bool(drafts) == (method != "none")
    check_identities(stats)


def check_identities(stats: EngineStats) -> None:
    """Check those that `workers.telemetry.series` promises."""
    in_work = stats.num_running + stats.num_waiting
    assert stats.admitted == sum(stats.finished.values()) + in_work
    gained = stats.accepted_tokens + stats.sampled_rows
    assert stats.generated_tokens == gained - stats.trimmed_tokens
    emitted = stats.total(series.EMITTED_TOKENS)
    trimmed = stats.total(series.SPEC_TRIMMED_TOKENS)
    assert emitted == stats.accepted_tokens + stats.draft_rounds - trimmed
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)


@pytest.mark.parametrize(("num_right", "rate"), [(0, 0.0), (1, 1 / 3), (3, 1.0)])
def test_f1_acceptance_is_accepted_of_proposed(
    checkpoints: Checkpoints, num_right: int, rate: float
) -> None:
    """F1: (accepted + 1) / (proposed + 1), which is never 0 and, with the bonus, passed 1."""
    path = checkpoints(FAMILY)
    ids, _ = prompt(0, [9])
    wanted = request("r", ids, max_tokens=24, ignore_eos=True)
    answers = run(make_engine(path), [wanted]).token_ids
    engine = make_engine(path)

    def whole_drafts(_: str, num_emitted: int) -> tuple[int, int]:
        # No shorter draft at the end of the answer.
        return (3, num_right) if num_emitted <= 20 else (0, 0)

    script(engine, whole_drafts, answers)
    assert run(engine, [wanted]).token_ids == answers
    stats = engine.stats()
    rounds = stats.draft_rounds
    assert stats.draft_tokens == 3 * rounds > 0
    assert stats.accepted_tokens / stats.draft_tokens == pytest.approx(rate)
    assert stats.accepted_per_position[:3] == tuple(
        rounds if position < num_right else 0 for position in range(3)
    )
    # The bonus counts in the length, and nowhere else.
    lengths = stats.snapshot[series.ACCEPTANCE_LENGTH.name].values()
    assert sum(cells[-1] for cells in lengths if isinstance(cells, list)) == rounds * (
        num_right + 1
    )
    check_identities(stats)


def test_f11_an_idle_engine_s_gauges_are_zero(checkpoints: Checkpoints) -> None:
    """F11: gauges kept what they were in the last step."""
    engine = make_engine(checkpoints(FAMILY))
    for wanted in mixed_requests():
        engine.add(wanted)
    engine.step()
    busy = engine.stats()
    assert busy.num_running + busy.num_waiting == 6
    assert busy.num_free_blocks < busy.num_blocks
    for wanted in mixed_requests():
        engine.abort(wanted.request_id)
    while engine.has_work:
        engine.step()
    idle = engine.stats()
    assert (idle.num_running, idle.num_waiting) == (0, 0)
    assert idle.num_free_blocks == idle.num_blocks
    assert idle.finished["abort"] == 6
    check_identities(idle)


def test_h8_memory_of_the_process_is_a_gauge_of_ours(checkpoints: Checkpoints) -> None:
    """H8: with several processes behind one scrape the built-in process series vanish."""
    snapshot = make_engine(checkpoints(FAMILY)).stats().snapshot
    assert total(snapshot, series.MEMORY_BYTES, memory="host") > 50e6


def test_the_speed_up_compares_with_measured_plain_steps(checkpoints: Checkpoints) -> None:
    path = checkpoints(FAMILY)
    answers = run(make_engine(path), mixed_requests()).token_ids
    engine = make_engine(path)
    run(engine, mixed_requests())  # what a plain step costs
    script(engine, lambda *_: (3, 3), answers)
    run(engine, mixed_requests())
    stats = engine.stats()
    spent = total(stats.snapshot, series.SPEC_SECONDS)
    plain = total(stats.snapshot, series.PLAIN_SECONDS)
    assert spent > 0
    assert plain > 0


def test_a_request_s_phases_are_spans_under_its_own(checkpoints: Checkpoints) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"))
    engine = make_engine(checkpoints(FAMILY), num_draft_tokens=3, method="ngram", ngram_min=1)
    engine.on_end = PhaseSpans(tracing).ended
    parent = tracing.start("generate")
    ids, images = prompt(1, [5, (2, 3), 4])
    traced = request("r", ids, images, ignore_eos=True)
    object.__setattr__(traced, "traceparent", traceparent_of(parent))
    run(engine, [traced, request("other", ids, images, ignore_eos=True)])
    parent.end()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert Counter(span.name for span in exporter.get_finished_spans()) == Counter(
        ("queue", "prefill", "decode", "generate")
    )
    for name in ("queue", "prefill", "decode"):
        span_parent = spans[name].parent
        assert span_parent is not None
        assert span_parent.span_id == spans["generate"].context.span_id
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert queue.end_time == prefill.start_time or abs(queue.end_time - prefill.start_time) < 1e6
    assert queue.attributes["specserve.modality"] == "image"
    assert decode.attributes["specserve.tokens"] == 12
    assert decode.attributes["specserve.finish_reason"] == "length"
    assert (
        decode.attributes["specserve.draft_tokens"]
        >= (decode.attributes["specserve.accepted_tokens"])
    )


def test_without_a_tracer_nothing_is_recorded(checkpoints: Checkpoints) -> None:
    tracing = Tracing()
    assert traceparent_of(tracing.start("x")) == ""
    engine = make_engine(checkpoints(FAMILY))
    engine.on_end = PhaseSpans(tracing).ended
    assert run(engine, mixed_requests(2)).failures == {}
