"""Spans of OpenTelemetry: of requests, of their tries on workers, and of a try's phases.

Owns where spans go and how a trace crosses processes, which is W3C's `traceparent` in a string.
Knows no HTTP and no engine. Invariants: while traces are off no span is made, kept or sent; a
collector that is slow or gone costs its spans and nothing else: they are sent in the background.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from workers.telemetry.config import TelemetryConfig

TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
Attributes = Mapping[str, str | int | float | bool]


class Tracing:
    """Makes spans; while they are off, spans that do nothing."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """Prepare.

        Args:
            tracer: Of OpenTelemetry; None = off.
        """
        self.is_on = tracer is not None
        self._tracer = NoOpTracer() if tracer is None else tracer

    def start(
        self,
        name: str,
        traceparent: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
    ) -> Span:
        """Begin a span under another one, which may be in another process."""
        if not self.is_on:
            return INVALID_SPAN
        return self._tracer.start_span(name, _parent(traceparent), kind, attributes)

    def record(
        self,
        name: str,
        traceparent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
    ) -> None:
        """Add a span that is over; its times are on the clock of `time.perf_counter`."""
        if not self.is_on:
            return
        offset_s = time.time() - time.perf_counter()
        span = self._tracer.start_span(
            name, _parent(traceparent), attributes=attributes,
            start_time=int((start_s + offset_s) * 1e9),
        )  # fmt: skip
        span.end(int((end_s + offset_s) * 1e9))


def _parent(traceparent: str):  # type: ignore[no-untyped-def]  # the API's own alias is private
    return _PROPAGATOR.extract({TRACEPARENT: traceparent} if traceparent else {})


def traceparent_of(span: Span) -> str:
    """Return what names a span to another process; empty for one that does nothing."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span))
    return carrier.get(TRACEPARENT, "")


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed, by the error's name: its text may hold what a client wrote."""
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))


def load_tracing(config: TelemetryConfig, service: str, instance: str) -> Tracing:
    """Return what the settings ask for.

    Args:
        config: The settings.
        service: What the process is.
        instance: Its name.
    """
    if not config.trace_endpoint:
        return Tracing()
    # Here: they import more than a process without traces needs.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create(
        {"service.name": f"specserve-{service}", "service.instance.id": instance}
    )
    provider = TracerProvider(ParentBased(TraceIdRatioBased(config.trace_ratio)), resource=resource)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=config.trace_endpoint))
    )
    return Tracing(provider.get_tracer("specserve"))
