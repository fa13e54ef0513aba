"""A run's log, as read by the worker that resumes the run."""

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from bottega.events.types import Event, EventType
from bottega.execution.replay_tasks import remember

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def called(name: str, arguments: dict[str, Any], result: Any) -> list[Event]:
    """Build the events of a tool call."""
    about = {"call": 1, "tool_call_id": "one", "name": name}
    run = uuid4()
    answer = {"status": "success", "result": result, "error": None}
    return [
        Event(
            run, 1, EventType.TOOL_STARTED, NOW, None, None, "a", about | {"arguments": arguments}
        ),
        Event(run, 2, EventType.TOOL_COMPLETED, NOW, None, None, "a", about | answer),
    ]


def test_stored_file_is_written_again() -> None:
    log = called("write_file", {"path": "a", "content": "b"}, {"written_chars": 1})
    assert remember(log, NOW).writes == [(None, "a", "b")]


def test_own_tool_with_the_name_of_the_file_tool_writes_no_file() -> None:
    assert remember(called("write_file", {"target": "a"}, "stored"), NOW).writes == []
