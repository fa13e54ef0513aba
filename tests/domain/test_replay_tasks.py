"""A run's log, as read by the worker that resumes the run."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from bottega.agents.messages import AgentUsage
from bottega.engine.replay import replay_run, replay_tasks
from bottega.events.types import Event, EventType

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
    assert replay_run(log).writes == [(None, "a", "b")]


def test_own_tool_with_the_name_of_the_file_tool_writes_no_file() -> None:
    assert replay_run(called("write_file", {"target": "a"}, "stored")).writes == []


def a_task(log: list[Event], *, ended: bool, of: UUID | None = None) -> UUID:
    """Add a task and perhaps its end to the front of a log."""
    task = uuid4()
    kinds = [EventType.SUBAGENT_DISPATCHED, *([EventType.SUBAGENT_COMPLETED] if ended else [])]
    asked: dict[str, Any] = {
        "agent": None,
        "prompt": "p",
        "instructions": None,
        "priority": 5,
        "timeout_ms": 9,
    }
    asked |= {"token_budget": None, "metadata": {}, "share_metadata": []}
    end = {"duration_ms": 1, "token_usage": {"input": 0, "output": 0}, "output": "x"}
    data = asked | end | {"stop_reason": "final_answer"}
    log[:0] = [Event(log[0].run_id, 1, kind, NOW, task, of, "a", data) for kind in kinds]
    return task


@pytest.mark.parametrize("tool", ["poll_subagent", "await_subagent"])
def test_outcomes_that_the_parent_has_read_are_known_as_read(tool: str) -> None:
    tasks: list[Any] = []
    log = called(tool, {}, {"tasks": tasks})
    read, unread, early = (a_task(log, ended=True) for _ in range(3))
    of_another = a_task(log, ended=True, of=read)
    for task, status in ((read, "completed"), (early, "running"), (of_another, "completed")):
        tasks.append({"task_id": str(task), "status": status})
    tasks += [{"task_id": "no id", "status": "failed"}, "no task"]

    restored = replay_tasks(replay_run(log), NOW).tasks
    assert [each for each in restored if restored[each].received] == [read]
    assert unread in restored


def cancelled_task(run: UUID, task: UUID, child_run: UUID, end: int) -> list[Event]:
    """Return the events of a task that was cancelled before its child run was over."""
    log = called("poll_subagent", {}, {"tasks": []})
    a_task(log, ended=False)
    dispatched = {**log[0].data, "child_run_id": str(child_run)}
    told: dict[str, Any] = {"duration_ms": 1, "token_usage": {"input": 0, "output": 0}}
    told["error"] = {"code": "cancelled", "message": "x"}
    kinds: list[tuple[EventType, int, dict[str, Any]]] = [
        (EventType.SUBAGENT_DISPATCHED, 1, dispatched),
        (EventType.SUBAGENT_CANCELLED, end, told),
    ]
    return [Event(run, seq, kind, NOW, task, None, "a", data) for kind, seq, data in kinds]


@pytest.mark.parametrize("carried", [False, True])
def test_the_usage_of_a_child_run_that_ended_after_its_task_counts(carried: bool) -> None:
    run, task, child_run = uuid4(), uuid4(), uuid4()
    log = cancelled_task(run, task, child_run, end=5)
    carried_seq = 5 if carried else 4
    # This run gives the task a child run of its own, unless the task had ended before.
    replay = replay_run(log, carried_seq)
    assert replay.child_runs() == {task: child_run if carried else None}
    used = AgentUsage(7, 3, model_calls=1)
    restored = replay_tasks(replay, NOW, {task: used})
    assert restored.usage == used
    assert restored.paid.total_tokens == (0 if carried else 10)
    assert replay_tasks(replay, NOW).usage == AgentUsage()
