"""Server-sent events in pieces of any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.llm.dialects.answer import SSESplitter

LINE = st.text(alphabet='ab: {}"é\u2028\x0b\x1c', max_size=12).map(str.encode)
FIELD = st.sampled_from([b"data: ", b"data:", b"event: ", b": ", b"id: ", b"retry: ", b"data", b""])
END = st.sampled_from([b"\n", b"\r\n", b"\r"])


def split(stream: bytes, cuts: list[int]) -> list[bytes]:
    splitter = SSESplitter()
    places = sorted({cut % (len(stream) + 1) for cut in cuts})
    events = []
    for start, end in zip([0, *places], [*places, len(stream)], strict=True):
        events += splitter.feed(stream[start:end])
    return events + splitter.finish()


def by_the_book(stream: bytes) -> list[bytes]:
    """Parse the whole stream at once, line by line."""
    events, data = [], []
    for line in stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        name, _, value = line.partition(b":")
        if line and name == b"data":
            data.append(value.removeprefix(b" "))
        elif not line and data:
            events.append(b"\n".join(data))
            data = []
    return [event for event in [*events, b"\n".join(data)] if event]


@given(
    st.lists(st.tuples(FIELD, LINE, END), max_size=12),
    st.lists(st.integers(min_value=0, max_value=400), max_size=20),
)
def test_any_split_gives_the_same_events(
    lines: list[tuple[bytes, bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(field + line + end for field, line, end in lines)
    assert split(stream, cuts) == split(stream, []) == by_the_book(stream)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_split_into_single_bytes(end: bytes) -> None:
    lines = [b": hi", b"event: x", b"data: one", b"data:two", b"", b"id: 1", b"data: three", b""]
    stream = b"".join(line + end for line in lines)
    splitter = SSESplitter()
    events = [event for byte in stream for event in splitter.feed(bytes([byte]))]
    assert events + splitter.finish() == [b"one\ntwo", b"three"]


def test_events_arrive_as_soon_as_they_are_complete() -> None:
    splitter = SSESplitter()
    assert splitter.feed(b"data: one\n") == []
    assert splitter.feed(b"\ndata: tw") == [b"one"]
    assert splitter.feed(b"o\n\n") == [b"two"]
