"""Spans in the wire format of OTLP.

OpenTelemetry's own objects and their encoder cost ten times the CPU: they build a message of
protobuf for each attribute, of which most repeat from span to span. Here they are encoded once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct

from bottega.trace_context import Trace
from bottega.tracing.spans import Attributes, AttributeValue, Ids

KINDS = {"INTERNAL": 1, "SERVER": 2, "CLIENT": 3, "CONSUMER": 5}
"""Numbers of the kinds of spans."""

_LARGEST_REQUEST = 4 * 1024 * 1024
"""Bytes of spans in a request, unless one span has more; many collectors refuse 20 MiB."""
_LONGEST_KEPT = 64
"""Characters of a text whose encoded form is kept."""
_KEPT = 4096
_FAILED = b"\x7a\x02\x18\x02"
_HAS_REMOTE, _IS_REMOTE = 0x100, 0x200
_LINK_FLAGS = (_HAS_REMOTE | _IS_REMOTE).to_bytes(4, "little")
_TIMES = Struct("<BQBQ")
_TIME = Struct("<BQ")
_FLAGS = Struct("<BBI")
_INT64 = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class SpanData:
    """Data of a span.

    Attributes:
        trace: names the span.
        parent: names the span above it; ``None``: it is the first of its trace.
        kind: a value of :data:`KINDS`.
        began_ns, ended_ns: nanoseconds since 1970.
        link: a span that it continues.
        events: time, name and attributes of each.
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
    """Encodes the spans of one process.

    Args:
        resource, scope: messages of protobuf that describe who makes the spans.
        longest: characters of an attribute that are sent; ``None``: all.
    """

    def __init__(self, resource: bytes, scope: bytes, longest: int | None) -> None:
        self._resource = _bytes(0x0A, resource)
        self._scope = _bytes(0x0A, scope)
        self._longest = longest

    def requests(self, spans: Iterable[SpanData]) -> Iterator[bytes]:
        """Yield the bodies of requests that send the spans."""
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
        flags = _HAS_REMOTE
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
            trace, linked = span.link.trace.to_bytes(16, "big"), span.link.span.to_bytes(8, "big")
            link = (b"\x0a\x10", trace, b"\x12\x08", linked, b"\x35", _LINK_FLAGS)
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
                if len(value) > _LONGEST_KEPT:
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
    """Return a number of variable length."""
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
