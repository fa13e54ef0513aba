"""The loops of a run: at work, or waiting for people, models and each other."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from bottega.agents.query import CurrentCall, Path, Query, Recorder, current_call
from bottega.agents.subagent import SubAgentWrapper
from bottega.clock import monotonic
from bottega.engine.waiting import ModelCall, RunActivity
from bottega.subagents.handle import SubagentStatus as S
from bottega.subagents.handle import Waiter
from bottega.subagents.swarm import QueryScope


class Team:
    """Queries of a run, whose calls a test makes."""

    def __init__(self) -> None:
        self.queries: dict[Query, None] = {}
        self.calls: dict[Query, ModelCall] = {}
        self.loops = RunActivity(self.queries, self.calls)
        self.tasks: list[Any] = []
        self.loops.tasks = lambda: self.tasks

    def begins(self, *path: tuple[int, int]) -> Query:
        agent: Any = SimpleNamespace(turn=asyncio.Lock)
        query = Query(agent=agent, messages=(), recorder=Recorder(), path=path)
        self.queries[query] = None
        return query

    def task(self, status: S, path: Path, holds: Any = None) -> Any:
        handle = SimpleNamespace(status=status, path=path, holds=holds, is_remote=False)
        self.tasks.append(handle)
        return handle

    def waits(self) -> bool:
        return self.loops.wait is not None

    def needs(self) -> dict[Query, bool]:
        return dict(self.loops.needing_people())

    @contextmanager
    def asking(self, query: Query, index: int = 0, kind: str = "approval") -> Iterator[None]:
        token = current_call.set(CurrentCall(query, index))
        try:
            with self.loops.asking(query, uuid4(), kind):
                yield
        finally:
            current_call.reset(token)


@pytest.fixture
def team() -> Team:
    return Team()


def awaiting(query: Query, *handles: Any, missing: int = 1) -> Waiter:
    """Let a query await tasks; its call must be under way, too."""
    scope: Any = object.__new__(QueryScope)
    future: Any = SimpleNamespace(done=lambda: False)
    limit: Any = SimpleNamespace(expired=lambda: False)
    waiter = Waiter(future, handles, missing, limit)
    scope.waits = {waiter}
    query.scope = scope
    return waiter


def test_a_run_waits_for_people_if_its_only_loop_asks(team: Team) -> None:
    root = team.begins()
    assert not team.waits()
    with team.asking(root):
        wait = team.loops.wait
        assert wait is not None
        assert (wait.reason, [len(group) for group in wait.groups]) == ("person", [1])
        assert team.needs() == {root: True}


def test_a_run_that_only_needs_its_client_s_tools_waits_for_the_client(team: Team) -> None:
    root, other = team.begins(), team.begins((1, 0))
    with team.asking(root, kind="client_tool"), team.asking(other, kind="client_tool"):
        assert team.loops.wait is not None
        assert (team.loops.wait.reason, len(team.loops.wait.groups)) == ("client", 2)


def test_a_loop_is_at_work_from_the_decision_on(team: Team) -> None:
    root = team.begins()
    with team.asking(root, 1):
        with team.asking(root, 0):
            pass
        assert (team.waits(), team.needs()) == (False, {root: False})
        with team.loops.tool_call(root, None, CurrentCall(root, 0)):
            assert (team.waits(), team.needs()) == (False, {root: False})
        assert team.waits()
        assert team.needs() == {root: True}


def test_a_cancelled_call_is_not_at_work(team: Team) -> None:
    root = team.begins()
    with pytest.raises(asyncio.CancelledError), team.asking(root):
        raise asyncio.CancelledError
    assert team.needs() == {}


def test_a_loop_that_waits_for_a_slot_can_go_on(team: Team) -> None:
    root, other = team.begins(), team.begins((1, 0))
    with team.asking(root), team.loops.admission(other):
        assert (team.waits(), team.needs()) == (False, {root: True, other: False})


@pytest.mark.parametrize(
    ("status", "holds", "waits"),
    [(S.QUEUED, None, False), (S.QUEUED, {1}, True), (S.RUNNING, {1}, False)],
)
def test_a_run_works_on_while_a_task_may_begin(
    team: Team, status: S, holds: Any, waits: bool
) -> None:
    root = team.begins()
    team.task(status, ((1, 0),), holds)
    with team.asking(root):
        assert team.waits() == waits


def test_a_queued_task_keeps_no_run_from_waiting_for_a_model(team: Team) -> None:
    root = team.begins()
    team.task(S.QUEUED, ((1, 0),))
    team.calls[root] = ModelCall(None, monotonic() + 100, 1, 0.0)
    assert team.waits()
    team.task(S.RUNNING, ((1, 1),))
    assert not team.waits()


def test_a_loop_that_awaits_tasks_rests_until_they_end(team: Team) -> None:
    root, task = team.begins(), team.begins((1, 0))
    handle = team.task(S.WAITING, task.path)
    waiter = awaiting(root, handle)
    with team.asking(task), team.loops.tool_call(root, None, CurrentCall(root, 1)):
        assert team.waits()
        assert team.needs() == {task: True, root: True}
        handle.status = S.RUNNING
        assert team.needs() == {task: True, root: False}
        with team.loops.tool_call(root, None, CurrentCall(root, 2)):  # another tool is at work
            assert not team.waits()
        over: Any = SimpleNamespace(done=lambda: True)
        waiter.future = over
        assert not team.waits()
        assert team.needs()[root] is False


def test_a_caller_waits_with_the_sub_agent_that_it_called(team: Team) -> None:
    root = team.begins()
    root.model_calls = 1
    below = team.begins((1, 0))
    tool: Any = object.__new__(SubAgentWrapper)
    tool.agent, tool.stateless = below.agent, True
    with team.loops.tool_call(root, tool, CurrentCall(root, 0)):
        assert team.needs() == {root: False}
        with team.asking(below):
            assert list(team.needs().items()) == [(below, True), (root, True)]
            team.calls[below] = ModelCall(None, 0.0)
            assert team.needs() == {below: False, root: False}
