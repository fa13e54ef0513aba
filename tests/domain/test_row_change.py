"""Task rows as they follow from the tasks' events."""

from typing import Any

import pytest

from bottega.engine.journal import CANCELLED, row_change
from bottega.events.types import EventType

BROKEN = {"code": "agent_failed", "message": "no"}
USAGE = {"model_calls": 1}
DISPATCHED: dict[str, Any] = {
    "agent": None,
    "prompt": "Look.",
    "instructions": None,
    "priority": 3,
    "timeout_ms": 500,
    "token_budget": None,
    "metadata": {},
}


@pytest.mark.parametrize(
    ("event_type", "data", "change"),
    [
        (EventType.AGENT_STARTED, {"depth": 1}, {"status": "running", "began": True}),
        (
            EventType.AGENT_COMPLETED,
            {"output": "x", "usage": USAGE},
            {"status": "completed", "answer_seq": 9},
        ),
        (
            EventType.AGENT_FAILED,
            {"error": BROKEN, "usage": USAGE},
            {"status": "failed", "error": BROKEN, "usage": USAGE},
        ),
        (
            EventType.AGENT_FAILED,
            {"error": CANCELLED, "usage": USAGE},
            {"status": "cancelled", "error": CANCELLED, "usage": USAGE},
        ),
        (
            EventType.SUBAGENT_DISPATCHED,
            DISPATCHED,
            {"status": "queued", "mode": "async", "attempt": 1}
            | {"priority": 3, "timeout_ms": 500, "metadata": None, "dispatch_seq": 9},
        ),
        (EventType.SUBAGENT_RESUMED, {"attempt": 2}, {"status": "queued", "attempt": 2}),
        (
            EventType.SUBAGENT_STATUS_CHANGED,
            {"to": "running"},
            {"status": "running", "began": True},
        ),
        (EventType.SUBAGENT_STATUS_CHANGED, {"to": "streaming"}, {"status": "streaming"}),
        (
            EventType.SUBAGENT_COMPLETED,
            {"output": "x", "duration_ms": 5, "token_usage": {}},
            {"status": "completed", "answer_seq": 9, "duration_ms": 5},
        ),
        (
            EventType.SUBAGENT_COMPLETED,
            {"answer_seq": 7, "duration_ms": 5, "token_usage": {}},
            {"status": "completed", "answer_seq": 7, "duration_ms": 5},
        ),
        (
            EventType.SUBAGENT_TIMEOUT,
            {"error": BROKEN, "duration_ms": 5, "token_usage": {}},
            {"status": "timeout", "error": BROKEN, "duration_ms": 5},
        ),
        (
            EventType.SUBAGENT_DEQUEUED,
            {"attempt": 1, "waited_ms": 2, "timeout_ms": 5},
            {"status": "queued", "attempt": 1, "timeout_ms": 5},
        ),
        (
            EventType.SUBAGENT_DEQUEUED,
            {"attempt": 2, "waited_ms": 2, "timeout_ms": 3},
            {"status": "queued", "attempt": 2},
        ),
        (EventType.LLM_COMPLETED, {"call": 1}, {}),
        (EventType.WARNING, {"code": "a", "message": "b"}, {}),
    ],
)
def test_an_event_changes_its_tasks_row(
    event_type: EventType, data: dict[str, Any], change: dict[str, Any]
) -> None:
    assert row_change(event_type, data, 9) == change
