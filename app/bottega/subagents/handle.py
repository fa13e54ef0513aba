"""A task of an asynchronous sub-agent, and the parent that dispatched it (spec page 3, S1)."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from bottega.agents.messages import AgentUsage, Usage
from bottega.agents.recording import Path
from bottega.graph.shared_memory import Publication
from bottega.subagents.breaker import BreakerKey
from bottega.subagents.ledger import Account
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.queue import Entry
from bottega.subagents.states import SubagentStatus

MAX_PARTIAL_OUTPUT = 10_000


@dataclass(frozen=True, slots=True)
class DispatchParams:
    """What a task is to do.

    Attributes:
        agent: who does it; ``named``: one that its parent has under this name.
        timeout: in seconds; ``None`` is the default.
        model: that its agent asks, with its provider.
    """

    prompt: str
    agent: str
    named: bool = False
    instructions: str | None = None
    priority: int = 5
    timeout: float | None = None
    token_budget: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task's work ended.

    Attributes:
        status: a final one.
        error_code: stable; the text is in ``error``.
    """

    status: SubagentStatus
    output: str | None = None
    error: str | None = None
    error_code: str | None = None
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a task from before a crash. Times in seconds, wall time.

    Attributes:
        outcome: if it had ended.
        waited: since its dispatch.
        remaining: of its timeout, if it ever ran.
        attempt: the one that begins now.
        spent: tokens that it used itself.
        usage: of a finished task and all below it, which do not run again.
        publications: what those published to the run's graph.
    """

    params: DispatchParams
    attempt: int
    waited: float
    remaining: float | None = None
    outcome: Outcome | None = None
    duration_ms: int | None = None
    spent: Usage = Usage()
    usage: AgentUsage = AgentUsage()
    publications: tuple[Publication, ...] = ()


class Listener(Protocol):
    """Is told what happens to tasks. Must not block, nor raise."""

    def happened(self, handle: "SubagentHandle", event: str, data: dict[str, Any]) -> None:
        """``event`` is the part of its type behind ``subagent.`` (spec page 3, S20)."""

    def refused(self, parent: "Parent", data: dict[str, Any]) -> None:
        """A dispatch was refused."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Parent:
    """One that dispatches tasks: a query of an agent.

    Attributes:
        agent: its name.
        path: its place in the run's tree; its tasks' begin with it.
        limits: that its tasks are kept to.
        account: what all its tasks may spend together.
        accounts: that pay for its tasks' model calls, that one first.
        owner: the task that it is part of, if it is.
        remaining: seconds that it has left; ``None``: no end is set.
        alive: whether it can still ask for anything; ``None``: as long as it is not ended.
        ancestors: of an agent, in the run's graph.
        active: of its tasks, by agent; only where there is a graph.
    """

    parent_id: UUID
    agent: str
    run_id: UUID
    tenant_id: UUID | None
    path: Path
    limits: SubagentLimits
    account: Account
    accounts: tuple[Account, ...]
    listener: Listener
    owner: "SubagentHandle | None" = None
    remaining: Callable[[], float | None] = lambda: None
    alive: Callable[[], bool] = lambda: True
    ancestors: Callable[[str], frozenset[str]] | None = None
    children: dict[UUID, "SubagentHandle"] = field(default_factory=dict)
    active: dict[str, set["SubagentHandle"]] = field(default_factory=dict)
    queued: int = 0
    ended: bool = False

    @property
    def depth(self) -> int:
        return len(self.path)

    @property
    def is_over(self) -> bool:
        """It dispatches nothing any more, be it only that it did not notice yet."""
        return self.ended or not self.alive()

    def paying(self) -> Iterator[Account]:
        """Of its accounts those that are charged here; what is outside the run is charged there."""
        yield self.account
        if self.owner is not None:
            yield self.owner.account
            yield from self.owner.parent.paying()


@dataclass(slots=True, eq=False)
class SubagentHandle:
    """A task. Times are seconds on the event loop's clock, durations of the API milliseconds.

    Attributes:
        named: its agent is one of its parent's; else it is nobody in particular.
        kind: tasks of one kind share a circuit breaker.
        work: does what the task is there for; run by the scheduler.
        attempt: 1, and one more each time it is rebuilt after a crash.
        queue_position: at its dispatch, how many of its tenant's ready tasks were to go before it:
            the better ones of its run, and as many of each other run, as runs take turns.
        deadline: set when it first runs.
        partial_output: the last 10,000 characters of what its model said.
        token_usage: also of tasks that failed.
        rate_limited: its agent's model call failed since its server answered 429 to the last try.
        received: its parent has read how it ended.
        scopes: parents within it.
        holds: other tasks that must be over before it may run.
        blocks: tasks that it holds back.
        breakers: keys of those that may hold it back.
        held_by: keys of those that do.
        suspended: given up without an end, to be rebuilt by another process.
        waiting_below: descendants that wait for a slot that they could take.
    """

    task_id: UUID
    parent: Parent
    path: Path
    agent: str
    named: bool
    prompt: str
    instructions: str | None
    priority: int
    timeout: float
    token_budget: int | None
    metadata: Mapping[str, Any]
    kind: str
    created_at: float
    status_changed_at: float
    work: Callable[["SubagentHandle"], Awaitable[Outcome]]
    account: Account
    context: contextvars.Context
    status: SubagentStatus = SubagentStatus.QUEUED
    attempt: int = 1
    queue_position: int = 0
    started_at: float | None = None
    deadline: float | None = None
    partial_output: str = ""
    final_output: str | None = None
    error: str | None = None
    error_code: str | None = None
    stop_reason: str | None = None
    token_usage: Usage = Usage()
    fixed_duration_ms: int | None = None
    rate_limited: bool = False
    received: bool = False
    scopes: list[Parent] = field(default_factory=list)
    waiters: "set[Waiter] | None" = None
    holds: "set[SubagentHandle] | None" = None
    blocks: "list[SubagentHandle] | None" = None
    breakers: tuple[BreakerKey, ...] = ()
    held_by: set[BreakerKey] = field(default_factory=set)
    suspended: bool = False
    # The scheduler's
    entry: Entry | None = None
    timer: asyncio.TimerHandle | None = None
    running: "asyncio.Task[None] | None" = None
    holds_slot: bool = False
    slot: "asyncio.Future[None] | None" = None
    awaits: int = 0
    calls: int = 0
    polling: bool = False
    waiting_below: int = 0

    @property
    def parent_id(self) -> UUID:
        return self.parent.parent_id

    @property
    def run_id(self) -> UUID:
        return self.parent.run_id

    @property
    def tenant_id(self) -> UUID | None:
        return self.parent.tenant_id

    @property
    def depth(self) -> int:
        """0 for the root's tasks."""
        return len(self.path) - 1

    def duration_ms(self, now: float) -> int:
        """Since its dispatch, or between that and its end."""
        if self.fixed_duration_ms is not None:
            return self.fixed_duration_ms
        return max(0, round((now - self.created_at) * 1000))

    def hear(self, text: str) -> None:
        """Add to what its model said so far."""
        self.partial_output = (self.partial_output + text)[-MAX_PARTIAL_OUTPUT:]


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who waits until ``missing`` more of some tasks are over."""

    future: "asyncio.Future[None]"
    missing: int

    def one_more(self) -> None:
        self.missing -= 1
        if self.missing <= 0 and not self.future.done():
            self.future.set_result(None)
