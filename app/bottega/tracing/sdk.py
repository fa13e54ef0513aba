"""Our spans with OpenTelemetry's sampling, queue and sending; the only module that imports it.

Spans are plain data here, and encoded by :mod:`bottega.tracing.otlp`.
"""

import os
from collections.abc import Sequence
from random import getrandbits
from typing import Any, ClassVar

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from bottega import __version__, clock
from bottega.trace_context import Trace
from bottega.tracing.otlp import KINDS, Encoder, SpanData
from bottega.tracing.spans import ERROR, Attributes, Ids, Tracer

_KINDS = {kind.name: kind for kind in SpanKind}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_MOST_EVENTS = 128
"""Of a span; OpenTelemetry's default."""


class _Span(SpanData):
    """A span; sent when it ends, if its trace is sampled."""

    __slots__ = ("_processor", "is_recorded")

    context: ClassVar[SpanContext] = SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)
    """Context of all spans for the queue, which gets only sampled ones."""

    def __init__(self, processor: BatchSpanProcessor, is_recorded: bool, *data: Any) -> None:
        super().__init__(*data)
        self._processor = processor
        self.is_recorded = is_recorded

    def name(self, name: str) -> None:
        self.title = name

    def set(self, attributes: Attributes) -> None:
        self.about.update(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append((clock.now_ns(), name, attributes))

    def end(self, error: str | None) -> None:
        if not self.is_recorded:
            return
        if error is not None:
            self.about[ERROR] = error
            self.failed = True
        self.ended_ns = clock.now_ns()
        self._processor.on_end(self)  # type: ignore[arg-type]  # it only reads the context


class _Tracer:
    def __init__(self, sampler: Sampler, processor: BatchSpanProcessor, takes_texts: bool) -> None:
        self._sampler, self._processor = sampler, processor
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
        span = f"{(getrandbits(64) or 1) if ids is None else ids.span:016x}"
        if parent is not None and parent.is_local:
            # The first span of this process decided whether its trace is sampled.
            above = parent.traceparent
            trace = Trace(f"{above[:36]}{span}{above[52:]}", parent.tracestate, is_local=True)
            sampled, about = above[54] in "13579bdf", dict(attributes)
        else:
            trace, sampled, about = self._first(span, name, kind, attributes, parent, ids, link)
        data = (trace, parent, name, KINDS[kind], clock.now_ns(), about, link)
        return _Span(self._processor, sampled, *data)

    def _first(
        self,
        span: str,
        name: str,
        kind: str,
        attributes: Attributes,
        parent: Trace | None,
        ids: Ids | None,
        link: Ids | None,
    ) -> tuple[Trace, bool, dict[str, Any]]:
        """Ask the sampler about a span that has nothing above it in this process."""
        # An empty context, as the library's own current span is not ours.
        context, flags = Context(), 0
        if parent is not None:
            number, flags = int(parent.traceparent[3:35], 16), int(parent.traceparent[53:55], 16)
            context = _context(parent)
        elif ids is not None:
            number = ids.trace
        else:
            number, flags = getrandbits(128) or 1, TraceFlags.RANDOM_TRACE_ID
        answer = self._sampler.should_sample(
            context, number, name, _KINDS[kind], attributes, _links(link)
        )
        sampled = answer.decision is Decision.RECORD_AND_SAMPLE
        kept = flags & TraceFlags.RANDOM_TRACE_ID | (TraceFlags.SAMPLED if sampled else 0)
        state = answer.trace_state.to_header() if answer.trace_state else ""
        trace = Trace(f"00-{number:032x}-{span}-{kept:02x}", state, is_local=True)
        return trace, sampled, dict(answer.attributes or {})


def _context(parent: Trace) -> Context:
    text = parent.traceparent
    state = TraceState.from_header([parent.tracestate]) if parent.tracestate else None
    place = SpanContext(
        int(text[3:35], 16),
        int(text[36:52], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(text[53:55], 16)),
        trace_state=state,
    )
    return set_span_in_context(NonRecordingSpan(place), Context())


def _links(ids: Ids | None) -> Sequence[Link]:
    if ids is None:
        return ()
    return (Link(SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=_SAMPLED)),)


class _Exporter(SpanExporter):
    """Sends our spans as OpenTelemetry's exporter sends its own: where to, retries, TLS."""

    def __init__(self, resource: Resource) -> None:
        self._sending = OTLPSpanExporter()
        scope = InstrumentationScope("bottega", __version__)
        about = ReadableSpan("", _Span.context, resource=resource, instrumentation_scope=scope)
        (of_resource,) = encode_spans([about]).resource_spans
        self._encoder = Encoder(
            of_resource.resource.SerializeToString(),
            of_resource.scope_spans[0].scope.SerializeToString(),
            SpanLimits().max_span_attribute_length,
        )

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        # The exporter's public method encodes. pyproject.toml bounds its version for this.
        bodies = self._encoder.requests(spans)
        sent = [self._sending._client.export(body).success for body in bodies]
        return SpanExportResult.SUCCESS if all(sent) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._sending.shutdown()  # type: ignore[no-untyped-call]


def opened(takes_texts: bool) -> tuple[BatchSpanProcessor, Tracer]:
    """Start a thread that sends spans by OTLP; return what ends it, and what makes spans.

    Spans wait in a queue of bounded length; those that find it full are dropped.
    """
    about = {"service.version": __version__}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        about["service.name"] = "bottega"
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    processor = BatchSpanProcessor(_Exporter(provider.resource))
    return processor, _Tracer(provider.sampler, processor, takes_texts)
