"""Chunks that hold only text, which are read without decoding each as JSON."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.clock import utcnow
from bottega.errors import ModelError
from bottega.llm.dialects.chat import ChatAnswer
from bottega.llm.errors import ErrorMapper

TEXTS = st.lists(
    st.text(max_size=6)
    | st.sampled_from(["a", " word", '","role":"x', "\\", '"', "\u00a0", "\x01"]),
    max_size=30,
)


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "c1", "object": "chat.completion.chunk", "choices": [choice], **more}


def answer() -> ChatAnswer:
    return ChatAnswer(ErrorMapper("http://model", ""), False, origin="here")


def said(builder: ChatAnswer) -> str:
    return builder.finish(utcnow(), lambda: "id", lambda: 0).content


@given(
    TEXTS,
    st.booleans(),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.sampled_from([{}, {"role": "assistant"}, {"tool_calls": None}]),
    st.lists(st.integers(0, 40), max_size=5),
)
@pytest.mark.parametrize("more", [{}, {"usage": None, "echo": {"content": "a"}}])
def test_any_texts_in_any_pieces_are_read(
    more: dict[str, Any],
    texts: list[str],
    is_ascii: bool,
    separators: tuple[str, str],
    beside: dict[str, Any],
    cuts: list[int],
) -> None:
    def encode(event: dict[str, Any]) -> bytes:
        return json.dumps(event, ensure_ascii=is_ascii, separators=separators).encode()

    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    events = [encode(chunk({**beside, "content": text}, **more)) for text in texts]
    builder = answer()
    places = [0, *sorted(cuts), len(events)]
    heard = "".join(builder.add_events(events[start:end]) for start, end in pairwise(places))
    builder.add_events([encode(chunk({}, "stop")), b"[DONE]", b"not read"])
    assert builder.complete
    assert heard == said(builder) == "".join(texts)


@pytest.mark.parametrize(
    "broken",
    [
        b'{"id":"c1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"\x01',
        b"\xff",
        b'{"error":{"message":"overloaded"}}',
    ],
)
def test_a_broken_chunk_among_texts_fails(broken: bytes) -> None:
    events = [json.dumps(chunk({"content": "word"})).encode()] * 3
    with pytest.raises(ModelError):
        answer().add_events([*events, broken, *events])


def test_bytes_that_are_no_text_fail() -> None:
    before, after = json.dumps(chunk({"content": "word"})).encode().split(b"word")
    good, bad = before + b"word" + after, before + b"\xff" + after
    with pytest.raises(ModelError):
        answer().add_events([good, good, bad])


def test_a_reason_to_stop_is_seen_behind_a_text() -> None:
    events = [
        chunk({"content": "one"}),
        chunk({"content": "two"}),
        chunk({"content": "!"}, "length"),
    ]
    builder = answer()
    builder.add_events([json.dumps(event).encode() for event in events])
    message = builder.finish(utcnow(), lambda: "id", lambda: 0)
    assert (message.content, message.metadata) == ("onetwo!", {"finish_reason": "length"})


def test_tool_calls_between_texts_are_kept() -> None:
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"content":"word"}'}}
    deltas: list[dict[str, Any]] = [
        {"content": "word"},
        {"tool_calls": [call]},
        {"content": "word"},
    ]
    builder = answer()
    builder.add_events([json.dumps(chunk(delta)).encode() for delta in deltas])
    builder.add_events([json.dumps(chunk({}, "tool_calls")).encode()])
    message = builder.finish(utcnow(), lambda: "id", lambda: 0)
    assert message.content == "wordword"
    assert [each.arguments for each in message.tool_calls] == [{"content": "word"}]
