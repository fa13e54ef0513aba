"""Our encoder of spans, read by OpenTelemetry's generated classes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from bottega.trace_context import Trace
from bottega.tracing.otlp import KINDS, Encoder, SpanData
from bottega.tracing.spans import Ids

PLACE = "00-{:032x}-{:016x}-01"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
times = st.integers(0, 2**64 - 1)
lists = st.lists(texts, min_size=1, max_size=3).map(tuple)
about = st.dictionaries(texts, texts | st.integers(-(2**63), 2**63 - 1) | lists, max_size=6)
ids = st.builds(Ids, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
traces = st.builds(
    lambda ids, state, is_local: Trace(PLACE.format(*ids), state, is_local),
    *(ids, texts, st.booleans()),
)
recorded = st.builds(
    SpanData,
    *(traces, st.none() | traces, texts, st.sampled_from(sorted(KINDS.values())), times, about),
    *(st.none() | ids, times, st.booleans()),
    st.lists(st.tuples(times, texts, about), max_size=3),
)
SCOPE = InstrumentationScope(name="bottega", version="1").SerializeToString()


def decoded(bodies: list[bytes]) -> list[Span]:
    found = []
    for body in bodies:
        (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        assert of_resource.resource == Resource()
        (of_scope,) = of_resource.scope_spans
        assert (of_scope.scope.name, of_scope.scope.version) == ("bottega", "1")
        found += of_scope.spans
    return found


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in attributes}


def value_of(any_value: Any) -> Any:
    found = getattr(any_value, any_value.WhichOneof("value"))
    is_list = any_value.HasField("array_value")
    return tuple(map(value_of, found.values)) if is_list else found


@given(st.lists(recorded, min_size=1, max_size=4))
def test_what_is_recorded_is_what_is_read(spans: list[SpanData]) -> None:
    sent = decoded(list(Encoder(b"", SCOPE, None).requests(spans)))
    assert len(sent) == len(spans)
    for span, read in zip(spans, sent, strict=True):
        place = span.trace.traceparent
        assert (read.trace_id.hex(), read.span_id.hex()) == (place[3:35], place[36:52])
        assert (read.trace_state, read.name) == (span.trace.tracestate, span.title)
        assert (read.kind, read.start_time_unix_nano) == (span.kind, span.began_ns)
        assert (read.end_time_unix_nano, values(read.attributes)) == (span.ended_ns, span.about)
        above = span.parent.traceparent[36:52] if span.parent else ""
        is_remote = span.parent is not None and not span.parent.is_local
        assert (read.parent_span_id.hex(), read.flags) == (above, 0x300 if is_remote else 0x100)
        assert (read.status.code == Status.STATUS_CODE_ERROR) is span.failed
        assert span.events == [
            (each.time_unix_nano, each.name, values(each.attributes)) for each in read.events
        ]
        earlier = [Ids(*(int(x.hex(), 16) for x in (e.trace_id, e.span_id))) for e in read.links]
        assert earlier == ([] if span.link is None else [span.link])


def a_span(text: str) -> SpanData:
    return SpanData(Trace(PLACE.format(1, 2)), None, "chat", 2, 1, {"text": text}, None, 2)


def test_requests_are_bounded_and_what_is_wrong_harms_nothing() -> None:
    long = [a_span("x" * 1024 * 1024) for _ in range(6)]
    bodies = list(Encoder(b"", SCOPE, None).requests(long))
    assert [len(decoded([body])) for body in bodies] == [3, 3]
    assert max(map(len, bodies)) < 4 * 1024 * 1024
    (half,) = decoded(list(Encoder(b"", SCOPE, None).requests([a_span("a\ud800")])))
    assert values(half.attributes) == {"text": "a?"}, "half a character is no text"
    (huge,) = long[:1]
    huge.about = {"tokens": 2**80 + 7}
    (read,) = decoded(list(Encoder(b"", SCOPE, None).requests([huge])))
    assert values(read.attributes) == {"tokens": 7}
    (short,) = decoded(list(Encoder(b"", SCOPE, 5).requests([a_span("0123456789")])))
    assert values(short.attributes) == {"text": "01234"}, "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"
