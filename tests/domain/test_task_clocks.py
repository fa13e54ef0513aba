"""The time of tasks and of waits for them, from a run's log."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from bottega.engine.replay import Clocks
from bottega.events.types import Event, EventType

BEGIN = datetime(2026, 11, 21, tzinfo=UTC)
A, B = uuid4(), uuid4()
CALL = (None, 1, "one")


class Log:
    """The log of a run, in which an event comes so many seconds after the beginning."""

    def __init__(self) -> None:
        self.clocks = Clocks()

    def add(self, at: float, kind: EventType, task_id: UUID | None = None, **data: Any) -> None:
        when = BEGIN + timedelta(seconds=at)
        self.clocks.observe(Event(uuid4(), 1, kind, when, task_id, None, "a", data))

    def begins(self, task_id: UUID, at: float = 0.0) -> None:
        self.add(at, EventType.SUBAGENT_DISPATCHED, task_id)
        self.add(at, EventType.SUBAGENT_DEQUEUED, task_id)
        self.moves(task_id, at, "running")

    def moves(self, task_id: UUID, at: float, to: str) -> None:
        self.add(at, EventType.SUBAGENT_STATUS_CHANGED, task_id, to=to)

    def awaits(self, at: float, **arguments: Any) -> None:
        about: dict[str, Any] = {"call": 1, "tool_call_id": "one", "name": "await_subagent"}
        ids = {"task_ids": [str(A), str(B)]}
        self.add(at, EventType.TOOL_STARTED, **about, arguments=ids | arguments)

    def ran(self, at: float) -> float | None:
        return self.clocks.ran(A, BEGIN + timedelta(seconds=at))

    def waited(self, at: float) -> float:
        return self.clocks.waits(BEGIN + timedelta(seconds=at))[CALL]


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_task_that_never_had_a_slot_has_no_time(log: Log) -> None:
    log.add(0, EventType.SUBAGENT_DISPATCHED, A)
    assert log.ran(5) is None


def test_time_does_not_pass_from_the_wait_until_the_task_runs_again(log: Log) -> None:
    log.begins(A, 2)
    log.moves(A, 5, "waiting")
    assert (log.ran(4), log.ran(100)) == (2, 3)
    log.moves(A, 100, "queued")
    assert log.ran(110) == 3
    log.moves(A, 110, "running")
    assert log.ran(114) == 7


def test_time_in_a_queue_after_a_crash_passes(log: Log) -> None:
    log.begins(A)
    log.add(5, EventType.SUBAGENT_RESUMED, A)
    assert log.ran(20) == 20


def test_a_task_that_waits_while_its_worker_dies_does_not_age(log: Log) -> None:
    log.begins(A)
    log.moves(A, 3, "waiting")
    log.add(500, EventType.RUN_RESUMED)
    log.add(500, EventType.SUBAGENT_RESUMED, A)
    log.add(510, EventType.SUBAGENT_DEQUEUED, A)
    log.moves(A, 510, "running")
    assert log.ran(514) == 7


def test_all_time_stands_still_while_the_run_waits(log: Log) -> None:
    log.begins(A)
    log.awaits(1, mode="any")
    log.add(4, EventType.RUN_WAITING, reason="person")
    assert (log.ran(100), log.waited(100)) == (4, 3)
    log.add(100, EventType.RUN_RESUMED)
    assert (log.ran(102), log.waited(102)) == (6, 5)


def test_no_time_stands_still_while_the_run_waits_for_a_model(log: Log) -> None:
    log.begins(A)
    log.awaits(1, mode="any")
    log.add(4, EventType.RUN_WAITING, reason="model")
    log.add(100, EventType.RUN_RESUMED)
    assert (log.ran(102), log.waited(102)) == (102, 101)


@pytest.mark.parametrize(
    ("arguments", "waited"),
    [
        ({}, 3),
        ({"mode": "any"}, 9),
        ({"mode": "quorum", "quorum": 2}, 3),
        ({"mode": "quorum", "quorum": 1}, 9),
        ({"task_ids": [str(B)]}, 9),
        ({"task_ids": [str(B)], "task_id": str(A)}, 3),
        ({"task_ids": "nonsense", "task_id": str(A), "mode": 7, "quorum": "x"}, 3),
        ({"task_ids": ["nonsense", str(uuid4())]}, 9),
    ],
)
def test_a_wait_stands_still_while_it_needs_people(
    log: Log, arguments: dict[str, Any], waited: float
) -> None:
    log.begins(A)
    log.begins(B)
    log.awaits(1, **arguments)
    log.moves(A, 4, "waiting")
    assert log.waited(10) == waited


def test_a_wait_goes_on_with_the_task_that_it_needs(log: Log) -> None:
    log.begins(A)
    log.begins(B)
    log.moves(A, 1, "waiting")
    log.awaits(2)
    assert log.waited(10) == 0
    log.moves(A, 10, "queued")
    assert log.waited(12) == 2
    log.moves(A, 12, "running")
    log.moves(A, 13, "waiting")
    log.moves(A, 20, "cancelled")
    assert log.waited(24) == 7


def test_a_wait_that_is_over_is_left_out(log: Log) -> None:
    log.begins(A)
    log.awaits(0)
    log.add(1, EventType.TOOL_COMPLETED, call=1, tool_call_id="one")
    assert log.clocks.waits(BEGIN) == {}
