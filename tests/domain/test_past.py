"""What a log says to a worker that goes on with a run."""

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from bottega.events.types import Event, EventType
from bottega.runs.past import remember

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def called(name: str, arguments: dict[str, Any], result: Any) -> list[Event]:
    """The events of a tool call."""
    about = {"call": 1, "tool_call_id": "one", "name": name}
    run = uuid4()
    answer = {"status": "success", "result": result, "error": None}
    return [
        Event(
            run, 1, EventType.TOOL_STARTED, NOW, None, None, "a", about | {"arguments": arguments}
        ),
        Event(run, 2, EventType.TOOL_COMPLETED, NOW, None, None, "a", about | answer),
    ]


def test_a_file_that_was_written_is_written_again() -> None:
    log = called("write_file", {"path": "a", "content": "b"}, {"written_chars": 1})
    assert remember(log, NOW).writes == [(None, "a", "b")]


def test_an_agent_may_have_a_tool_of_its_own_that_is_named_like_the_one_for_files() -> None:
    assert remember(called("write_file", {"target": "a"}, "stored"), NOW).writes == []
