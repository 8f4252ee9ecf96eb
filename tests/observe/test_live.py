"""What is shown of a running application with faults, mixed traffic, and a worker killed."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.metrics.families import BUILD, UP, exported_name, labels_of
from serving import series as ingress
from tests.deploy.promql import FAMILIES, dashboards, label_values, panel_queries, rules, selectors
from tests.e2e.conftest import SETTLED_S
from tests.observe.conftest import LOG_INTERVAL_S, NUM_SCRAPES, Observed
from tests.observe.traffic import CHAT, COUNT, SHOWN, until
from workers.telemetry import series as worker
from workers.telemetry.meter import Family, Kind

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Sample = tuple[str, frozenset[tuple[str, str]]]


def samples(text: str) -> dict[Sample, float]:
    """Return the values of a scrape by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: dict[Sample, float], family: Family, **labels: str) -> float:
    """Return the sum over the series with these labels."""
    name = exported_name(family)
    return sum(v for (n, have), v in found.items() if n == name and have >= labels.items())


@pytest.mark.parametrize("name", ["serving", "speculation", "workers"])
def test_h3_every_panel_has_data(observed: Observed, name: str) -> None:
    """H3, H4: panels that ask for what is not exported; each query runs, and gives numbers."""
    (board,) = (board for path, board in dashboards().items() if path.stem == name)
    observed.prometheus.wait_all([query for _, query in panel_queries(board)])
    for selector, label in label_values(board):
        values = observed.prometheus.get(f"label/{label}/values", **{"match[]": selector})
        assert values, (selector, label)


def test_every_rule_is_evaluated_and_has_data(observed: Observed) -> None:
    recorded = [rule.name for rule in rules() if not rule.is_alert]
    observed.prometheus.wait_all(recorded)
    groups = observed.prometheus.get("rules")["groups"]
    found = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(found) == {rule.name for rule in rules()}
    until(
        lambda: all(
            rule["health"] == "ok"
            for group in observed.prometheus.get("rules")["groups"] for rule in group["rules"]
        ),
        "a look at every rule",
    )  # fmt: skip


def test_every_alert_sees_what_it_watches(observed: Observed) -> None:
    """An alert whose series do not exist never fires, and nobody notices."""
    needed = set()
    for rule in rules():
        if rule.is_alert:
            needed |= {name for name, _ in selectors(rule.expr)}
    observed.prometheus.wait_all(sorted(needed))


def test_f7_f6_every_documented_series_is_there(observed: Observed) -> None:
    """F7, F6: missing on the scraped port, or there as another type, without model or worker."""
    found = {family.name: family for family in text_string_to_metric_families(observed.scrape())}
    for family in FAMILIES:
        name = exported_name(family)
        shown = found.pop(name.removesuffix("_total"))
        assert (shown.type, shown.documentation) == (str(family.kind), family.help), name
        assert shown.samples, name
        for sample in shown.samples:
            expected = set(labels_of(family)) | (
                {"le"} if sample.name.endswith("_bucket") else set()
            )
            assert set(sample.labels) == expected, name
            assert family.kind is not Kind.COUNTER or sample.name == name
    assert not found, "series that are not documented"
    metadata = observed.prometheus.get("metadata")
    for family in FAMILIES:
        (entry,) = metadata[exported_name(family)]
        assert entry["type"] == str(family.kind)


def test_f6_prometheus_own_check_finds_nothing(observed: Observed) -> None:
    """F6: names and types as Prometheus wants them."""
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=observed.scrape(), capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout + done.stderr


def test_f8_scrapes_are_monotone(observed: Observed) -> None:
    """F8: each scrape hit another process, and counters went up and down; a dead worker's fell."""
    assert len(observed.scrapes) >= NUM_SCRAPES
    before: dict[Sample, float] = {}
    for text in observed.scrapes:
        after = samples(text)
        for key, value in before.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert after.get(key, -1) >= value, key
        before = after
    first, last = samples(observed.scrapes[0]), samples(observed.scrapes[-1])
    for family in (worker.GENERATED_TOKENS, worker.DRAFT_TOKENS):
        for place in "01":
            assert total(last, family, worker=place) > total(first, family, worker=place)
    # Which worker the few faults came to is chance.
    assert total(last, worker.FAILURES) > total(first, worker.FAILURES)
    assert total(last, ingress.INTERRUPTED) > 0
    assert total(last, ingress.RESUMED) == total(last, ingress.INTERRUPTED)
    assert total(last, ingress.LOST) == 0


def test_a_worker_that_was_killed_is_missed_until_it_is_replaced(observed: Observed) -> None:
    found = samples(observed.scrape())
    # Replaced within the time that makes a silence a death, it keeps its number for itself.
    assert [n for (name, _), n in found.items() if name == exported_name(UP)] == [1, 1]
    assert total(found, BUILD) == 1


def test_f4_what_was_admitted_is_finished_or_there(observed: Observed) -> None:
    """F4: reasons that never counted; busy or idle, each request is in one place."""
    with observed.idle():
        start = samples(observed.scrape())
    observed.traffic.wait(5)
    busy = [samples(observed.scrape()) for _ in range(5)]
    observed.traffic.wait(20)
    busy.append(samples(observed.scrape()))
    with observed.idle():
        end = samples(observed.scrape())
    assert total(start, worker.RUNNING) == total(start, worker.WAITING) == 0
    assert any(total(found, worker.RUNNING) for found in busy)
    for found in (*busy, end):
        new = Counter({
            family.name: total(found, family) - total(start, family)
            for family in (worker.ADMITTED, worker.FINISHED, ingress.STARTED, ingress.FINISHED)
        })  # fmt: skip
        there = total(found, worker.RUNNING) + total(found, worker.WAITING)
        assert new[worker.ADMITTED.name] == new[worker.FINISHED.name] + there
        assert new[ingress.STARTED.name] == new[ingress.FINISHED.name] + total(found, ingress.OPEN)
    # Since the first moment: the ingress has not died.
    assert total(end, ingress.STARTED) == total(end, ingress.FINISHED)
    assert total(end, ingress.FINISHED, outcome="abort") > 0
    assert total(end, ingress.FINISHED, outcome="refused") > 0


def test_f1_what_was_emitted_was_accepted_or_a_bonus(observed: Observed) -> None:
    """F1: rates above 1; tokens that no counter knows of."""
    with observed.idle():
        found = samples(observed.scrape())
    accepted = total(found, worker.ACCEPTED_TOKENS)
    assert 0 < accepted <= total(found, worker.DRAFT_TOKENS)
    assert total(found, worker.GENERATED_TOKENS) == (
        accepted + total(found, worker.SEQUENCE_STEPS) - total(found, worker.TRIMMED_TOKENS)
    )
    assert total(found, worker.EMITTED_TOKENS) == (
        accepted + total(found, worker.DRAFTS) - total(found, worker.SPEC_TRIMMED_TOKENS)
    )
    for modality in worker.MODALITIES:
        at = [
            total(found, worker.ACCEPTED_AT, modality=modality, position=str(i)) for i in range(4)
        ]
        assert sum(at) == total(found, worker.ACCEPTED_TOKENS, modality=modality) > 0
        assert at == sorted(at, reverse=True)


def test_f5_one_first_token_for_each_answer_that_has_one(observed: Observed) -> None:
    """F5: the count of first tokens was not that of answers."""
    with observed.idle():
        found = samples(observed.scrape())
    name = exported_name(ingress.FIRST_TOKEN_SECONDS)
    firsts = sum(v for (n, _), v in found.items() if n == f"{name}_count")
    ended = [total(found, ingress.FINISHED, outcome=o) for o in ("stop", "length", "tool_calls")]
    assert sum(ended) <= firsts <= total(found, ingress.STARTED)
    assert firsts <= sum(ended) + total(found, ingress.FINISHED, outcome="abort")


def ask(observed: Observed, content: Any, request_id: str = "") -> dict[str, int]:
    """Ask once; return what the answer says of its drafts."""
    body = {
        "model": observed.server.model, "max_tokens": 80, "temperature": 0, "ignore_eos": True,
        "messages": [{"role": "user", "content": content}], "speculation": {"report": True},
    }  # fmt: skip
    headers = {"x-request-id": request_id} if request_id else {}
    reply = httpx.post(f"{observed.server.url}{CHAT}", json=body, headers=headers, timeout=60)
    found: dict[str, int] = reply.json()["usage"]["speculation"]
    return found


def test_f2_answer_log_and_metrics_say_the_same(observed: Observed) -> None:
    """F2: the log said 0.80 and the answer 0.0."""
    names = {"draft_tokens": worker.DRAFT_TOKENS, "accepted_tokens": worker.ACCEPTED_TOKENS}

    def told() -> dict[str, tuple[float, float]]:
        lines, found = observed.lines(), samples(observed.scrape())
        return {
            name: (sum(line.get(f"new_{name}", 0) for line in lines), total(found, family))
            for name, family in names.items()
        }

    def settled() -> dict[str, tuple[float, float]]:
        before, after = {}, told()
        while before != after:
            time.sleep(SETTLED_S + LOG_INTERVAL_S)
            before, after = after, told()
        return after

    with observed.idle():
        start, reports = settled(), list[dict[str, int]]()

        def has_drafted() -> bool:
            reports.extend(ask(observed, content) for content in (COUNT, SHOWN))
            return len(reports) >= 4 and any(report["accepted_tokens"] for report in reports)

        # Breakers may be open at first.
        until(has_drafted, "drafts")
        end = settled()
    for name in names:
        said = sum(report[name] for report in reports)
        assert tuple(b - a for a, b in zip(start[name], end[name], strict=True)) == (said, said)


def test_f12_series_do_not_grow_with_requests(observed: Observed) -> None:
    """F12: ids, users and prompts in labels; 200 requests later there is not one series more."""
    names = iter(range(1000))

    def wander(times: int) -> None:
        with httpx.Client(base_url=observed.server.url) as client:
            for number in itertools.islice(names, times):
                for path in (f"/v1/models/made-up-{number}", f"/nowhere/{number}"):
                    assert client.get(path).status_code == 404

    wander(1)
    with observed.idle():
        before = set(samples(observed.scrape()))
    observed.traffic.wait(60)
    wander(70)
    with observed.idle():
        after = set(samples(observed.scrape()))
    assert after == before
    text = observed.scrape()
    assert "user-" not in text
    assert "request-" not in text
    assert "made-up" not in text


def test_logs_are_objects_with_the_request_s_id(observed: Observed) -> None:
    ask(observed, COUNT, "the-one-to-find")
    until(
        lambda: any(line["request_id"] == "the-one-to-find" for line in observed.lines()), "a line"
    )
    (line,) = (x for x in observed.lines() if x["request_id"] == "the-one-to-find")
    assert line["message"].startswith(f"POST {CHAT} 200 ")
    assert set(line) >= {"time", "level", "logger", "message", "request_id"}
    assert any("lost its worker" in line["message"] for line in observed.lines())
    assert any("a made-up one" in line["message"] for line in observed.lines())


def test_a_trace_goes_from_the_ingress_to_the_phases(observed: Observed) -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": observed.server.model, "max_tokens": 30, "ignore_eos": True,
            "messages": [{"role": "user", "content": COUNT}]}  # fmt: skip
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    httpx.post(f"{observed.server.url}{CHAT}", json=body, headers=headers, timeout=60)
    until(lambda: len(observed.collector.of(trace_id)) >= 5, "spans")
    spans = {span.name: span for span in observed.collector.of(trace_id)}
    assert set(spans) == {f"POST {CHAT}", "generate", "queue", "prefill", "decode"}
    root, tried = spans[f"POST {CHAT}"], spans["generate"]
    assert (root.parent_id, tried.parent_id) == (span_id, root.span_id)
    assert root.service == tried.service == "specserve-ingress"
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_id for span in phases} == {tried.span_id}
    assert {span.service for span in phases} == {"specserve-worker"}
    assert sum(span.seconds for span in phases) <= tried.seconds <= root.seconds
    assert spans["decode"].attributes["specserve.tokens"] == 30
    assert root.attributes["http.response.status_code"] == 200


def test_nobody_noticed_anything(observed: Observed) -> None:
    """Every answer came as it should, with drafting that failed and a worker that was killed."""
    with observed.idle():
        found = samples(observed.scrape())
    assert observed.traffic.problems == []
    assert total(found, worker.BREAKER_OPENED) > 0
    assert total(found, worker.FAILURES, stage="propose", reason="id_out_of_range") > 0
