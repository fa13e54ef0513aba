"""Live text, assembled from the pieces that arrive."""

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pydantic_core import from_json, to_json

from bottega.events.stream import MAX_CHARACTERS, PartialCompletions

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def event(kind: str, **data: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "task_id": None,
        "parent_task_id": None,
        "agent": "a",
        "depth": None,
        "data": to_json(data).decode(),
    }


def piece(at: int, text: str, *, call: int = 1, attempt: int = 1, **more: object) -> dict[str, Any]:
    place = {"task_id": None, "call": call, "attempt": attempt}
    return {**place, "at": at, "text": text, "now": NOW, **more}


def texts(calls: PartialCompletions) -> list[str]:
    return [call.text for call in calls.open()]


def one_call() -> PartialCompletions:
    calls = PartialCompletions(uuid4())
    calls.see(event("llm.started", call=1, attempt=1))
    return calls


def test_text_is_assembled_and_a_lower_offset_replaces_the_rest() -> None:
    calls = one_call()
    assert texts(calls) == []
    calls.add_rows([piece(0, "one "), piece(4, "two")])
    assert texts(calls) == ["one two"]
    (first,) = calls.open()
    calls.add_rows([piece(4, "three")])
    assert texts(calls) == ["one three"]
    (second,) = calls.open()
    assert second is not first
    assert second.same_call(first)
    calls.add_rows([piece(0, "")])
    assert texts(calls) == [""]


def test_text_after_a_gap_is_ignored() -> None:
    calls = one_call()
    calls.add_rows([piece(0, "one"), piece(9, "lost before")])
    assert texts(calls) == ["one"]


def test_text_belongs_to_one_call_of_one_attempt() -> None:
    calls = one_call()
    strangers = [piece(0, "x", call=2), piece(0, "x", attempt=2)]
    for stranger in strangers:
        assert not calls.covers([stranger])
    calls.add_rows(strangers)
    assert texts(calls) == []
    calls.add_rows([piece(0, "one")])
    calls.see(event("run.resumed", attempt=2))
    assert texts(calls) == []
    calls.see(event("llm.started", call=1, attempt=2))
    calls.add_rows([piece(3, "of the old one"), piece(0, "new", attempt=2)])
    assert texts(calls) == ["new"]


def test_call_is_over_with_its_answer_and_not_with_a_failed_try() -> None:
    for over in (
        event("llm.completed", call=1, attempt=1),
        event("llm.failed", call=1, attempt=1, error={}),
        event("agent.failed", error={}),
    ):
        calls = one_call()
        calls.add_rows([piece(0, "one")])
        calls.see(event("llm.failed", **{"call": 1, "try": 1, "retry_in_ms": 5}))
        assert texts(calls) == ["one"]
        calls.see(over)
        assert not calls.covers([piece(3, " two")])
        calls.add_rows([piece(3, " two")])
        assert texts(calls) == []


def test_kept_text_is_bounded() -> None:
    calls = one_call()
    calls.add_rows([piece(0, "x" * MAX_CHARACTERS), piece(MAX_CHARACTERS, "y")])
    assert texts(calls) == ["x" * MAX_CHARACTERS]
    calls.add_rows([piece(MAX_CHARACTERS + 1, "z")])
    assert texts(calls) == ["x" * MAX_CHARACTERS]
    assert not calls.has_gap, "text without room is not asked for again"


def test_repeated_text_fills_a_gap_and_shows_nothing_twice() -> None:
    calls = one_call()
    calls.add_rows([piece(0, "one "), piece(8, "three")])
    assert calls.has_gap
    (first,) = calls.open()
    calls.add_rows(piece(at, "one two three"[at : at + 5], is_repeated=True) for at in (0, 5, 10))
    assert texts(calls) == ["one two three"]
    assert [*calls.open()] == [first]
    calls.add_rows([piece(0, "one ", is_repeated=True)])  # older than what is known
    assert texts(calls) == ["one two three"]
    calls.add_rows([piece(0, "other", is_repeated=True)])
    assert texts(calls) == ["other"]


def test_subscribers_at_the_same_offset_share_one_frame() -> None:
    calls = one_call()
    calls.add_rows([piece(0, "one two")])
    (call,) = calls.open()
    frame = call.frame(4)
    assert from_json(frame.body)["data"] == {
        "call": 1, "attempt": 1, "offset": 4, "text": "two",
    }  # fmt: skip
    assert call.frame(4) is frame
    assert call.frame(0) is not frame
