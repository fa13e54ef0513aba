"""Export of spans by OTLP. Only this module imports OpenTelemetry, which samples and sends spans.

This module's classes and its encoder need 11 µs of CPU time per span. OpenTelemetry's classes and
encoder need 75 µs, because they build a protobuf message for each attribute. If many spans have the
same attribute, this module encodes it only once.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import getrandbits
from struct import Struct
from typing import Any, ClassVar

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags
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
from bottega.tracing.spans import ERROR, Attributes, AttributeValue, Ids, Tracer

KINDS = {"INTERNAL": 1, "SERVER": 2, "CLIENT": 3, "CONSUMER": 5}
"""OTLP's numbers of the kinds of spans."""

_LARGEST_REQUEST = 4 * 1024 * 1024
"""Maximum size in bytes of the spans in a request, unless a single span is larger. Collectors
refuse 20 MiB."""
_KEPT = 4096
_FAILED = b"\x7a\x02\x18\x02"
_HAS_REMOTE = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_IS_REMOTE = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_LINK_FLAGS = (_HAS_REMOTE | _IS_REMOTE).to_bytes(4, "little")
_TIMES = Struct("<BQBQ")
_TIME = Struct("<BQ")
_FLAGS = Struct("<BBI")
_INT64 = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class SpanData:
    """The data of one span.

    Attributes:
        trace: trace context that contains the span's id.
        parent: trace context of the parent span; ``None``: the span is the first of its trace.
        kind: a value of :data:`KINDS`.
        began_ns, ended_ns: start and end in nanoseconds since 1970.
        link: ids of an earlier span that this span continues.
        events: time, name and attributes of each event.
    """

    trace: Trace
    parent: Trace | None
    title: str
    kind: int
    began_ns: int
    about: dict[str, AttributeValue]
    link: Ids | None
    ended_ns: int = 0
    failed: bool = False
    events: list[tuple[int, str, Attributes]] = field(default_factory=list)


class Encoder:
    """Encoder of the spans of one process.

    Args:
        resource, scope: protobuf messages that describe this program.
        longest: maximum number of characters of an attribute's value; ``None``: no limit.
    """

    def __init__(self, resource: bytes, scope: bytes, longest: int | None) -> None:
        self._resource = _bytes(0x0A, resource)
        self._scope = _bytes(0x0A, scope)
        self._longest = longest

    def requests(self, spans: Iterable[SpanData]) -> Iterator[bytes]:
        """Yield request bodies that contain the spans."""
        parts: list[bytes] = []
        size = 0
        for span in spans:
            part = _bytes(0x12, self._span(span))
            if parts and size + len(part) > _LARGEST_REQUEST:
                yield self._request(parts)
                parts, size = [], 0
            parts.append(part)
            size += len(part)
        if parts:
            yield self._request(parts)

    def _request(self, spans: list[bytes]) -> bytes:
        of_scope = _bytes(0x12, b"".join((self._scope, *spans)))
        return _bytes(0x0A, self._resource + of_scope)

    def _span(self, span: SpanData) -> bytes:
        place, parent = span.trace.traceparent, span.parent
        flags: int = _HAS_REMOTE
        parts = [b"\x0a\x10", bytes.fromhex(place[3:35]), b"\x12\x08", bytes.fromhex(place[36:52])]
        if span.trace.tracestate:
            parts.append(_utf8(0x1A, span.trace.tracestate))
        if parent is not None:
            parts += b"\x22\x08", bytes.fromhex(parent.traceparent[36:52])
            flags |= 0 if parent.is_local else _IS_REMOTE
        parts += _text(0x2A, span.title), b"\x30", _number(span.kind)
        parts.append(_TIMES.pack(0x39, span.began_ns, 0x41, span.ended_ns))
        parts += self._attributes(0x4A, span.about)
        for at_ns, name, about in span.events:
            event = [_TIME.pack(0x09, at_ns), _text(0x12, name), *self._attributes(0x1A, about)]
            parts.append(_bytes(0x5A, b"".join(event)))
        if span.link is not None:
            trace, earlier = span.link.trace.to_bytes(16, "big"), span.link.span.to_bytes(8, "big")
            link = (b"\x0a\x10", trace, b"\x12\x08", earlier, b"\x35", _LINK_FLAGS)
            parts.append(_bytes(0x6A, b"".join(link)))
        if span.failed:
            parts.append(_FAILED)
        parts.append(_FLAGS.pack(0x85, 0x01, flags))
        return b"".join(parts)

    def _attributes(self, tag: int, about: Attributes) -> Iterator[bytes]:
        longest = self._longest
        for key, value in about.items():
            if isinstance(value, tuple):
                kept = tuple(each[:longest] for each in value)
                yield _encoded(tag, key, kept)
                continue
            if isinstance(value, str):
                if longest is not None:
                    value = value[:longest]
                if len(value) > 64:  # do not cache long texts
                    yield _encoded(tag, key, value)
                    continue
            yield _attribute(tag, key, value)


def _encoded(tag: int, key: str, value: AttributeValue) -> bytes:
    return _bytes(tag, _text(0x0A, key) + _bytes(0x12, _value(value)))


def _value(value: AttributeValue) -> bytes:
    if isinstance(value, tuple):
        return _bytes(0x2A, b"".join(_bytes(0x0A, _value(each)) for each in value))
    return b"\x18" + _number(value & _INT64) if isinstance(value, int) else _utf8(0x0A, value)


_attribute = lru_cache(_KEPT)(_encoded)


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _bytes(tag: int, content: bytes) -> bytes:
    return b"%c%b%b" % (tag, _number(len(content)), content)


def _utf8(tag: int, text: str) -> bytes:
    return _bytes(tag, text.encode("utf-8", "replace"))


_text = lru_cache(_KEPT)(_utf8)


_KINDS = {kind.name: kind for kind in SpanKind}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Span(SpanData):
    __slots__ = ("_processor", "is_recorded")

    context: ClassVar[SpanContext] = SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)
    """Context of every span in the queue: only sampled spans are queued."""

    def __init__(self, processor: BatchSpanProcessor, is_recorded: bool, *data: Any) -> None:
        super().__init__(*data)
        self._processor = processor
        self.is_recorded = is_recorded

    def name(self, name: str) -> None:
        self.title = name

    def set(self, attributes: Attributes) -> None:
        self.about.update(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        if len(self.events) < 128:  # the limit is OpenTelemetry's default
            self.events.append((clock.now_ns(), name, attributes))

    def end(self, error: str | None) -> None:
        if not self.is_recorded:
            return
        if error is not None:
            self.about[ERROR] = error
            self.failed = True
        self.ended_ns = clock.now_ns()
        self._processor.on_end(self)  # type: ignore[arg-type] # on_end reads only `context`


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
            # The trace's first span in this process decides for all its spans; see _first.
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
        # An empty context: otherwise the library would use its current span as the parent.
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
    """Exporter that encodes spans itself, and sends them by OpenTelemetry's exporter."""

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
        # Call a private method of the library, because the public method would encode the spans
        # again. Therefore pyproject.toml limits the library's version.
        bodies = self._encoder.requests(spans)
        sent = [self._sending._client.export(body).success for body in bodies]
        return SpanExportResult.SUCCESS if all(sent) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._sending.shutdown()  # type: ignore[no-untyped-call]


def opened(takes_texts: bool) -> tuple[BatchSpanProcessor, Tracer]:
    """Start a thread that sends spans; return a processor, which ends the thread, and a tracer.

    The processor has a queue of limited length. While the queue is full, new spans are dropped.
    """
    about = {"service.version": __version__}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        about["service.name"] = "bottega"
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    processor = BatchSpanProcessor(_Exporter(provider.resource))
    return processor, _Tracer(provider.sampler, processor, takes_texts)
