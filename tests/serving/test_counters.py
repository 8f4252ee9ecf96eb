"""What an ingress counts of the answers that it gives."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from serving import series
from serving.api import COUNTED, Services, build_api
from serving.counters import IngressCounters
from serving.textstream import TextDelta, TextUsage
from serving.tracing import TracedWorkers
from tests.serving.doubles import ScriptedWorkers, deltas_of, encode, make_app, make_services
from workers.contracts import FinishReason
from workers.errors import GenerationFailed, QueueFull, WorkerLost
from workers.telemetry.meter import Labels, Snapshot, Value
from workers.telemetry.tracing import Tracing

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
DELTAS = deltas_of(encode("hello there<|im_end|>"), (2,))
USAGE = TextUsage(1, 1, 0)
TRACE = "0af7651916cd43dd8448eb211c80319c"


def client_of(services: Services) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=build_api(services))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def ends(
    outcome: FinishReason | Exception | None, *, is_late: bool = False, num_deltas: int = 2
) -> IngressCounters:
    """Count one answer of text that ends like this; None: its reader goes."""
    counters = IngressCounters(COUNTED)

    async def answer() -> AsyncGenerator[TextDelta, None]:
        for number in range(num_deltas):
            yield TextDelta("x", USAGE, token_ids=(number,))
        if isinstance(outcome, Exception):
            raise outcome
        yield TextDelta("", USAGE, outcome)

    stream = counters.timed(answer(), "text", 0.0, lambda: is_late)
    try:
        async for _ in stream:
            if outcome is None:
                break
    except Exception as error:  # noqa: BLE001
        assert error is outcome  # noqa: PT017
    await stream.aclose()
    return counters


@pytest.mark.parametrize(
    ("outcome", "is_late", "name"),
    [
        (FinishReason.STOP, False, "stop"),
        (FinishReason.LENGTH, False, "length"),
        (FinishReason.LENGTH, True, "length"),
        (None, False, "abort"),
        (None, True, "timeout"),
        (QueueFull("full"), False, "refused"),
        (GenerationFailed("NaN"), False, "error"),
        (RuntimeError("a bug"), False, "error"),
        (WorkerLost("gone"), False, "lost"),
    ],
)
async def test_f4_every_answer_ends_in_one_way(
    outcome: FinishReason | Exception | None, is_late: bool, name: str
) -> None:
    """F4: aborted requests were counted as begun, and never as ended."""
    counters = await ends(outcome, is_late=is_late)
    snapshot = await counters.snapshot()
    finished = {key[0]: value for key, value in snapshot[series.FINISHED.name].items()}
    assert finished == {**dict.fromkeys(series.OUTCOMES, 0.0), name: 1.0}
    assert snapshot[series.STARTED.name][("text",)] == 1
    assert snapshot[series.OPEN.name][()] == 0


@pytest.mark.parametrize(("num_deltas", "wanted"), [(0, 0), (1, 1), (5, 1)])
async def test_f5_a_time_to_first_token_for_each_answer_that_has_one(
    num_deltas: int, wanted: int
) -> None:
    """F5: their number was neither that of the answers nor any other documented one."""
    counters = await ends(FinishReason.STOP, num_deltas=num_deltas)
    snapshot = await counters.snapshot()
    assert count(snapshot[series.FIRST_TOKEN_SECONDS.name][("text",)]) == wanted
    assert count(snapshot[series.STREAM_SECONDS.name][("text",)]) == 1
    assert count(snapshot[series.TOKEN_SECONDS_BETWEEN.name][()]) == max(0, num_deltas - 1)


def count(value: Value) -> float:
    assert isinstance(value, list)
    return sum(value[:-1])


def label_sets(snapshot: Snapshot) -> set[tuple[str, Labels]]:
    return {(name, labels) for name, found in snapshot.items() for labels in found}


async def test_f12_a_thousand_requests_make_no_new_series() -> None:
    """F12: ids, users and paths in labels, a series for each of them."""
    services = make_services(ScriptedWorkers([list(DELTAS)]))
    counters: IngressCounters = services.counters

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        unique = uuid.uuid4().hex
        await client.post(
            CHAT,
            json={**BODY, "user": unique, "messages": [{"role": "user", "content": unique}]},
            headers={"x-request-id": unique},
        )
        await client.request(("GET", "BREW")[number % 2], f"/{unique}")
        await client.get(f"/v1/models/{unique}")

    async with client_of(services) as client:
        await ask(client, 0)
        await ask(client, 1)
        before = label_sets(await counters.snapshot())
        for first in range(0, 1000, 50):
            await asyncio.gather(*(ask(client, first + i) for i in range(50)))
    assert label_sets(await counters.snapshot()) == before
    assert counters.value(series.HTTP_REQUESTS, route=CHAT) == 1002
    assert counters.value(series.HTTP_REQUESTS, route="other") == 1002
    assert counters.value(series.HTTP_REQUESTS, route="/v1/models/{model_id:path}") == 1002
    assert counters.value(series.HTTP_OPEN) == 0


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider.get_tracer("test"))


def traced(workers: ScriptedWorkers, tracing: Tracing) -> Services:
    client: Any = TracedWorkers(workers, tracing)
    return make_services(client, tracing=tracing)


def name_and_kind(span: ReadableSpan) -> tuple[str, str]:
    return span.name, span.kind.name


async def test_a_request_is_a_span_with_one_for_each_worker_it_came_to(
    exporter: InMemorySpanExporter, tracing: Tracing
) -> None:
    workers = ScriptedWorkers([[DELTAS[0], WorkerLost("died")], list(DELTAS)])
    async with client_of(traced(workers, tracing)) as client:
        headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        await client.post(CHAT, json=BODY, headers=headers)
        await client.get("/health")
    first, second, whole = exporter.get_finished_spans()
    assert [name_and_kind(span) for span in (first, second, whole)] == [
        ("generate", "CLIENT"), ("generate", "CLIENT"), (f"POST {CHAT}", "SERVER"),
    ]  # fmt: skip
    for span in (first, second):
        assert span.parent is not None
        assert whole.context is not None
        assert span.parent.span_id == whole.context.span_id
        assert f"{span.parent.trace_id:032x}" == TRACE
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "WorkerLost"
    assert second.status.status_code is not StatusCode.ERROR
    assert whole.attributes is not None
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["specserve.request_id"] == "mine"
    # A worker hangs its own spans under that of its try.
    for request, span in zip(workers.requests, (first, second), strict=True):
        assert span.context is not None
        assert request.traceparent == f"00-{TRACE}-{span.context.span_id:016x}-01"


async def test_a_span_holds_nothing_that_a_client_wrote(
    exporter: InMemorySpanExporter, tracing: Tracing
) -> None:
    async with client_of(traced(ScriptedWorkers([list(DELTAS)]), tracing)) as client:
        await client.get("/secret?secret=1", headers={"authorization": "Bearer secret"})
        await client.post(CHAT, json={**BODY, "user": "secret", "top_p": "secret"})
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["GET", f"POST {CHAT}"]
    assert "secret" not in "".join(span.to_json() for span in spans)


async def test_traces_are_off_unless_asked_for() -> None:
    workers = ScriptedWorkers([list(DELTAS)])
    transport = httpx.ASGITransport(app=make_app(workers))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        await client.post(CHAT, json=BODY, headers=headers)
    assert workers.requests[0].traceparent == ""
