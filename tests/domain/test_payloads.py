"""Typed access to the data of events: optional fields and their defaults."""

from typing import Any

import pytest

from bottega.events.types import (
    ContextReceived,
    EventError,
    LlmCompleted,
    LlmStarted,
    MemoryPublished,
    PatternReceived,
    SubagentDispatched,
    SubagentEnded,
    ToolEnded,
    is_repeated,
)

NO_ERROR = EventError(None, None)
TOOL = {"call": 1, "tool_call_id": "c", "name": "a", "status": "success", "error": None}
TASK: dict[str, Any] = {
    "agent": None,
    "prompt": "Go.",
    "instructions": None,
    "priority": 5,
    "timeout_ms": 9000,
    "token_budget": None,
}


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (LlmStarted.of({"call": 1, "attempt": 2}), (1, 2, False)),
        (LlmStarted.of({"call": 1, "attempt": 2, "beside": True}), (1, 2, True)),
        (LlmCompleted.of({"call": 1, "message": {}, "usage": {}}), (1, {}, {}, None, None, None)),
        (LlmCompleted.of({"call": 1, "message": {}, "usage": {}}).tool_calls, ()),
        (ToolEnded.of(TOOL | {"result": 1}), (1, "c", "a", "success", 1, None, None, (), {})),
        (ToolEnded.of(TOOL | {"result": None, "answer_seq": 7}).answer_seq, 7),
        (MemoryPublished.of({"version": 1, "answer_seq": 7}), (1, None, {})),
        (MemoryPublished.of({"version": 1, "content": ""}), (1, "", {})),
        (ContextReceived.of({"source": "a", "version": 1}), ("a", 1, None, None, None, None)),
        (PatternReceived.of({"version": 1}), (1, None, "", (), ())),
    ],
)
def test_absent_fields_have_defaults(read: Any, expected: Any) -> None:
    assert read == expected


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({}, NO_ERROR),
        ({"error": None}, NO_ERROR),
        ({"error": {"code": None, "message": None}}, NO_ERROR),
        ({"error": {"code": "timeout"}}, EventError("timeout", None)),
        ({"error": {"code": "x", "message": "no"}}, EventError("x", "no")),
        ({"error": "parent-cancelled"}, EventError(None, "parent-cancelled")),
    ],
)
def test_error_may_be_an_object_a_text_or_absent(data: dict[str, Any], error: EventError) -> None:
    assert EventError.of(data) == error
    ended = SubagentEnded.of(data | {"duration_ms": 1, "token_usage": {}})
    assert ended == (1, {}, None, None, None, error, None)


@pytest.mark.parametrize("metadata", [{}, None])
def test_dispatched_task_without_metadata_or_position(metadata: Any) -> None:
    task = SubagentDispatched.of(TASK | {"metadata": metadata})
    assert (task.metadata, task.queue_position) == ({}, 0)


def test_model_call_is_repeated_if_the_failure_names_its_try() -> None:
    failed = {"call": 1, "attempt": 1, "error": {"code": "x", "message": "no"}}
    assert not is_repeated(failed)
    assert is_repeated(failed | {"try": 1, "retry_in_ms": 0})
