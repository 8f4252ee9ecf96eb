"""A collector of traces: takes what OpenTelemetry's exporter sends, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SpanRecord:
    """A span that came."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    attributes: dict[str, Any]


@dataclass
class Collector:
    """What came so far."""

    url: str = ""
    spans: list[SpanRecord] = field(default_factory=list)

    def of(self, trace_id: str) -> list[SpanRecord]:
        """Return the spans of a trace."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def take(self, body: bytes) -> None:
        """Keep the spans of a request of the exporter's."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        SpanRecord(
                            service, span.name, span.trace_id.hex(), span.span_id.hex(),
                            span.parent_span_id.hex(),
                            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                            _values(span.attributes),
                        )
                    )  # fmt: skip


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
