"""OpenTelemetry's SDK behind our port; the only module that imports it."""

import os
from collections.abc import Sequence
from contextvars import ContextVar

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Tracer as OtelTracer

from bottega import __version__
from bottega.trace_context import Trace
from bottega.tracing.spans import ERROR, Attributes, Ids, Tracer

_wanted: ContextVar[Ids | None] = ContextVar("span_ids", default=None)
_KINDS = {kind.name: kind for kind in SpanKind}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _IdGenerator(RandomIdGenerator):
    """Takes the ids that are known, and makes the others."""

    def generate_span_id(self) -> int:
        ids = _wanted.get()
        return super().generate_span_id() if ids is None else ids.span

    def generate_trace_id(self) -> int:
        ids = _wanted.get()
        return super().generate_trace_id() if ids is None else ids.trace


class _Span:
    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        self.is_recorded = span.is_recording()
        context = span.get_span_context()
        ids = f"{context.trace_id:032x}-{context.span_id:016x}"
        state = context.trace_state.to_header() if context.trace_state else ""
        self.trace = Trace(f"00-{ids}-{context.trace_flags:02x}", state, is_local=True)

    def name(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes)

    def end(self, error: str | None) -> None:
        if error is not None:
            self._span.set_attribute(ERROR, error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class _Tracer:
    def __init__(self, tracer: OtelTracer, takes_texts: bool) -> None:
        self._tracer = tracer
        self.takes_texts = takes_texts

    def begin(
        self,
        name: str,
        kind: str,
        attributes: Attributes,
        parent: Trace | None,
        ids: Ids | None,
        link: Ids | None,
    ) -> _Span:
        # An empty context, as the library's own current span is not ours.
        context = Context() if parent is None else _context(parent)
        token = _wanted.set(ids)
        try:
            span = self._tracer.start_span(
                name, context, _KINDS[kind], attributes, _links(link), record_exception=False
            )
        finally:
            _wanted.reset(token)
        return _Span(span)


def _context(parent: Trace) -> Context:
    text = parent.traceparent
    state = TraceState.from_header([parent.tracestate]) if parent.tracestate else None
    place = SpanContext(
        int(text[3:35], 16),
        int(text[36:52], 16),
        is_remote=not parent.is_local,
        trace_flags=TraceFlags(int(text[53:55], 16)),
        trace_state=state,
    )
    return set_span_in_context(NonRecordingSpan(place), Context())


def _links(ids: Ids | None) -> Sequence[Link]:
    if ids is None:
        return ()
    return (Link(SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=_SAMPLED)),)


def opened(takes_texts: bool) -> tuple[TracerProvider, Tracer]:
    """Start a thread that sends spans by OTLP; return what ends it, and what makes spans.

    Spans wait in a queue of bounded length; those that find it full are dropped.
    """
    about = {"service.version": __version__}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        about["service.name"] = "bottega"
    provider = TracerProvider(
        resource=Resource.create(about),
        id_generator=_IdGenerator(),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider, _Tracer(provider.get_tracer("bottega", __version__), takes_texts)
