"""Tasks that a repeated run keeps from the run before it."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid5

from bottega.engine.replay import RestoredTasks, replay_run, replay_tasks
from bottega.events.types import Event, EventType
from bottega.runs.retry import carry_over

NOW = datetime(2026, 11, 21, tzinfo=UTC)
RUN = UUID("01a1fdb7-6ff4-7105-ba5d-4c99da8e1434")
USAGE: dict[str, Any] = {"input": 3, "output": 4}


class Log:
    """Writer of a run's log, an agent's step at a time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.parents: dict[UUID | None, UUID | None] = {None: None}
        self.calls: dict[UUID | None, int] = {}
        self.add(None, EventType.RUN_QUEUED)
        self.add(None, EventType.RUN_STARTED, attempt=1)

    def add(self, task: UUID | None, kind: EventType, **data: Any) -> None:
        seq = len(self.events) + 1
        event = Event(RUN, seq, kind, NOW, task, self.parents[task], "a", data)
        self.events.append(event)

    def says(self, task: UUID | None, *calls: str) -> None:
        """Add a model's answer."""
        call = self.calls[task] = self.calls.get(task, 0) + 1
        self.add(task, EventType.LLM_STARTED, call=call, attempt=1)
        made = [{"id": f"{call}-{i}", "name": name} for i, name in enumerate(calls)]
        message = {"content": "so", "tool_calls": made}
        usage = USAGE
        self.add(task, EventType.LLM_COMPLETED, call=call, attempt=1, message=message, usage=usage)

    def fails(self, task: UUID | None) -> None:
        """Add a model call that fails for good, and the agent's failure."""
        call = self.calls[task] = self.calls.get(task, 0) + 1
        error = {"code": "model", "message": "no"}
        self.add(task, EventType.LLM_STARTED, call=call, attempt=1)
        self.add(task, EventType.LLM_FAILED, call=call, attempt=1, error=error)
        self.add(task, EventType.AGENT_FAILED, error=error, usage=USAGE)

    def dispatches(self, parent: UUID | None, count: int = 1) -> list[UUID]:
        """Add tasks, dispatched by one message and running."""
        self.says(parent, *["dispatch_subagent"] * count)
        call = self.calls[parent]
        tasks = [uuid5(parent or RUN, f"{call}:{index}") for index in range(count)]
        for index, task in enumerate(tasks):
            self.parents[task] = parent
            about = {"call": call, "tool_call_id": f"{call}-{index}"}
            self.add(
                task,
                EventType.SUBAGENT_DISPATCHED,
                **about,
                agent=None,
                prompt="Go.",
                instructions=None,
                priority=5,
                timeout_ms=9000,
                token_budget=None,
                metadata={},
            )
            name = {"name": "dispatch_subagent", "status": "success", "error": None}
            self.add(parent, EventType.TOOL_STARTED, **about, **name, arguments={})
            self.add(parent, EventType.TOOL_COMPLETED, **about, **name, result={"task_id": 1})
            self.add(task, EventType.SUBAGENT_DEQUEUED, attempt=1, waited_ms=0, timeout_ms=9000)
            self.changes(task, "queued", "running")
            self.add(task, EventType.AGENT_STARTED, depth=1)
        return tasks

    def changes(self, task: UUID, old: str, new: str) -> None:
        data = {"attempt": 1, "from": old, "to": new}
        self.add(task, EventType.SUBAGENT_STATUS_CHANGED, **data)

    def ends(self, task: UUID, status: str) -> None:
        """End a task without completing it."""
        error = {"code": status, "message": status}
        if self.events[-1].type != EventType.AGENT_FAILED:
            self.add(task, EventType.AGENT_FAILED, error=error, usage=USAGE)
        self.changes(task, "running", status)
        spent = {"input": 3, "output": 4}
        kind = EventType(f"subagent.{status}")
        self.add(task, kind, duration_ms=7, token_usage=spent, error=error)

    def completes(self, task: UUID) -> None:
        self.says(task)
        self.add(task, EventType.AGENT_COMPLETED, output="so", usage=USAGE)
        answer = len(self.events)
        self.changes(task, "running", "completed")
        spent = {"input": 3, "output": 4}
        data = {"duration_ms": 7, "token_usage": spent, "answer_seq": answer}
        self.add(task, EventType.SUBAGENT_COMPLETED, **data)

    def looks(self, task: UUID | None, **seen: tuple[UUID, str]) -> None:
        """Add a message that polls, with its results."""
        self.says(task, "poll_subagent")
        call = self.calls[task]
        about = {"call": call, "tool_call_id": f"{call}-0", "name": "poll_subagent"}
        told = [{"task_id": str(who), "status": status} for who, status in seen.values()]
        result = {"tasks": told}
        self.add(task, EventType.TOOL_STARTED, **about, arguments={})
        self.add(
            task, EventType.TOOL_COMPLETED, **about, status="success", result=result, error=None
        )

    def over(self) -> None:
        self.add(None, EventType.RUN_FAILED, stop_reason=None, usage=USAGE)


class Repetition:
    """Run that repeats the run of a log."""

    def __init__(self, log: Log) -> None:
        log.over()
        carried = carry_over(log.events, RUN)
        self.rows = {row["id"]: row for row in carried.tasks}
        self.events = [
            Event(
                RUN,
                seq,
                row["type"],
                NOW,
                row["task_id"],
                row["parent_task_id"],
                row["agent"],
                row["data"],
            )
            for seq, row in enumerate(carried.events, start=2)
        ]
        self.memory: RestoredTasks = replay_tasks(replay_run(self.events), NOW)

    def goes_on_with(self) -> set[UUID]:
        """Return the tasks that are done again."""
        again = set(self.memory.unfinished())
        for task, past in self.memory.tasks.items():
            assert (past.outcome is None) == (task in again)
            status = self.rows[task]["status"]
            assert status == ("queued" if past.outcome is None else past.outcome.status)
            if task in again:
                assert past.remaining is None  # its time starts again
                assert not self.types(task) & {"subagent.status_changed", "agent.failed"}
        return again

    def types(self, task: UUID | None) -> set[str]:
        return {event.type for event in self.events if event.task_id == task}


def test_tasks_that_ended_beside_the_failure_are_kept_and_cut_ones_done_again() -> None:
    log = Log()
    good, cut = log.dispatches(None, 2)
    log.completes(good)
    log.fails(None)
    log.ends(cut, "cancelled")
    again = Repetition(log)
    assert again.goes_on_with() == {cut}
    kept = again.memory.tasks[good]
    assert kept.outcome is not None
    assert (kept.outcome.output, kept.duration_ms, kept.spent.total_tokens) == ("so", 7, 7)
    row = again.rows[good]
    assert (row["mode"], row["priority"], row["timeout_ms"], row["attempt"]) == (
        "async",
        5,
        9000,
        1,
    )
    answer = again.events[row["answer_seq"] - 2]
    assert (answer.type, answer.task_id) == (EventType.AGENT_COMPLETED, good)
    assert [event.type for event in again.events].count("tool.completed") == 2  # the dispatches


def test_failure_that_its_parent_read_and_answered_is_kept() -> None:
    log = Log()
    (bad,) = log.dispatches(None)
    log.fails(bad)
    log.ends(bad, "failed")
    log.looks(None, bad=(bad, "failed"))
    log.says(None, "calculator")
    log.fails(None)
    assert Repetition(log).goes_on_with() == set()


def test_failure_that_its_parent_did_not_act_on_is_done_again() -> None:
    """Cases: the parent ignored it, saw the task running, or read the failure and then failed."""
    for seen in (None, "running", "failed"):
        log = Log()
        (bad,) = log.dispatches(None)
        if seen == "running":
            log.looks(None, bad=(bad, seen))
        log.fails(bad)
        log.ends(bad, "failed")
        if seen == "failed":
            log.looks(None, bad=(bad, seen))
        else:
            log.says(None, "calculator")
        log.fails(None)
        again = Repetition(log)
        assert again.goes_on_with() == {bad}, seen
        polled = [e for e in again.events if e.data.get("name") == "poll_subagent"]
        assert len(polled) == (2 if seen == "running" else 0)


def test_tasks_that_were_cut_with_a_repeated_task_are_repeated_too() -> None:
    log = Log()
    (middle,) = log.dispatches(None)
    good, cut = log.dispatches(middle, 2)
    log.completes(good)
    log.ends(middle, "timeout")
    log.ends(cut, "cancelled")
    log.fails(None)
    assert Repetition(log).goes_on_with() == {middle, cut}


def test_tasks_below_a_handled_failure_are_not_done_again() -> None:
    log = Log()
    (middle,) = log.dispatches(None)
    (cut,) = log.dispatches(middle)
    log.ends(middle, "timeout")
    log.ends(cut, "cancelled")
    log.looks(None, middle=(middle, "timeout"))
    log.says(None, "calculator")
    log.fails(None)
    assert Repetition(log).goes_on_with() == set()


def test_unfinished_work_of_a_completed_task_stays_unfinished() -> None:
    log = Log()
    (middle,) = log.dispatches(None)
    (left,) = log.dispatches(middle)
    log.says(middle)
    log.ends(left, "cancelled")
    log.add(middle, EventType.AGENT_COMPLETED, output="so", usage=USAGE)
    spent = {"input": 3, "output": 4}
    log.add(middle, EventType.SUBAGENT_COMPLETED, duration_ms=7, token_usage=spent, output="so")
    log.fails(None)
    assert Repetition(log).goes_on_with() == set()


def test_time_of_unfinished_tasks_starts_again() -> None:
    # The run's worker died too often.
    log = Log()
    (lost,) = log.dispatches(None)
    log.says(lost, "calculator")
    again = Repetition(log)
    assert again.goes_on_with() == {lost}
    assert EventType.LLM_COMPLETED in again.types(lost)


def test_the_episodes_fate_is_not_carried_over() -> None:
    log = Log()
    log.says(None)
    log.add(None, EventType.EPISODE_STORED, episode_id=str(RUN), outcome="PARTIAL")
    log.add(None, EventType.WARNING, code="episode_not_stored", message="no")
    log.add(None, EventType.WARNING, code="memory_limit", message="full")
    warnings = [event for event in Repetition(log).events if event.type == EventType.WARNING]
    assert [event.data["code"] for event in warnings] == ["memory_limit"]
    assert EventType.EPISODE_STORED not in Repetition(log).types(None)
