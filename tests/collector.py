"""A collector of spans: OTLP over HTTP on loopback, in a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.proto.trace.v1.trace_pb2 import Status

HAS_REMOTE, IS_REMOTE = 0x100, 0x200
"""Bits of a span's flags: whether its parent is in another process."""


@dataclass(frozen=True, slots=True)
class SentSpan:
    """A span as it was sent; ids are hexadecimal."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    state: str
    remote: bool
    failed: bool
    about: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    events: tuple[tuple[str, dict[str, Any]], ...]
    resource: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """Spans that were received.

    Attributes:
        endpoint: for ``OTEL_EXPORTER_OTLP_ENDPOINT``.
        answering: while it is not set, requests wait.
    """

    endpoint: str = ""
    spans: list[SentSpan] = field(default_factory=list)
    answering: threading.Event = field(default_factory=threading.Event)

    def of(self, trace: str) -> list[SentSpan]:
        """Return the spans of a trace."""
        return [each for each in list(self.spans) if each.trace == trace]

    def tree(self, trace: str) -> list[str]:
        """Return the names of a trace's spans in the order of their ends, indented by depth."""
        spans = self.of(trace)
        known = {each.id for each in spans}

        def below(parent: str, depth: int) -> list[str]:
            found = []
            for each in spans:
                if each.parent == parent or (depth == 0 and each.parent not in known):
                    found += ["  " * depth + each.name, *below(each.id, depth + 1)]
            return found

        return below("", 0)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(any_value: Any) -> Any:
    found = getattr(any_value, any_value.WhichOneof("value"))
    is_list = any_value.HasField("array_value")
    return [_value(each) for each in found.values] if is_list else found


def _sent(span: Any, resource: dict[str, Any]) -> SentSpan:
    return SentSpan(
        name=span.name,
        kind=Sent.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        state=span.trace_state,
        remote=bool(span.flags & IS_REMOTE),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        about=_values(span.attributes),
        links=tuple((each.trace_id.hex(), each.span_id.hex()) for each in span.links),
        events=tuple((each.name, _values(each.attributes)) for each in span.events),
        resource=resource,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """Receive spans during the block."""
    collector = Collector()
    collector.answering.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.answering.wait()
            body = self.rfile.read(int(self.headers["content-length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for each in request.resource_spans:
                resource = _values(each.resource.attributes)
                for scope in each.scope_spans:
                    collector.spans += [_sent(span, resource) for span in scope.spans]
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    try:
        yield collector
    finally:
        collector.answering.set()
        server.shutdown()
        server.server_close()
