"""Tasks of asynchronous sub-agents: states, parents, counts of tasks, and waits for tasks."""

import asyncio
import contextvars
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self
from uuid import UUID

from bottega.agents.messages import AgentUsage, Usage
from bottega.agents.query import Path
from bottega.errors import IllegalTransition
from bottega.graph.shared_memory import Publication
from bottega.subagents.budget import Account
from bottega.subagents.limits import SubagentLimits


class SubagentStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    STREAMING = "streaming"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    def __init__(self, value: str) -> None:
        self.is_final = value in ("completed", "failed", "timeout", "cancelled")
        self.is_active = value in ("running", "streaming")


_FINAL = tuple(status for status in SubagentStatus if status.is_final)
_MOVES: dict[SubagentStatus, frozenset[SubagentStatus]] = {
    SubagentStatus.QUEUED: frozenset((SubagentStatus.RUNNING, SubagentStatus.CANCELLED)),
    SubagentStatus.RUNNING: frozenset((SubagentStatus.STREAMING, SubagentStatus.WAITING, *_FINAL)),
    SubagentStatus.STREAMING: frozenset((SubagentStatus.WAITING, *_FINAL)),
    SubagentStatus.WAITING: frozenset((SubagentStatus.QUEUED, *_FINAL)),
    **{final: frozenset() for final in _FINAL},
}


def check_move(old: SubagentStatus, new: SubagentStatus) -> None:
    """Check that a task's status may change from ``old`` to ``new``.

    Raises:
        IllegalTransition: the change is not allowed; a final status never changes.
    """
    if new not in _MOVES[old]:
        legal = ", ".join(sorted(_MOVES[old])) or "none, because it is final"
        raise IllegalTransition(f"{old} cannot change to {new}; {old} can change to: {legal}")


def stands_still(statuses: Iterable[SubagentStatus], missing: int) -> bool:
    """Return true if fewer than ``missing`` tasks can end without a decision of people."""
    at_work = (status for status in statuses if not status.is_final)
    return sum(status is not SubagentStatus.WAITING for status in at_work) < missing


@dataclass(slots=True)
class Mailbox:
    """Messages from a parent to a task, by id.

    Attributes:
        unread: texts of messages that the task has not read, oldest first.
        known: ids of all sent messages.
        heard: texts that the current try has read.
        recorded: texts that an earlier attempt read, by the number of the model call.
        calls: number of the last model call whose result an earlier attempt stored.
    """

    unread: dict[str, str] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    heard: dict[str, str] = field(default_factory=dict)
    recorded: dict[int, dict[str, str]] = field(default_factory=dict)
    calls: int = 0

    def put(self, message_id: str, text: str) -> None:
        self.known.add(message_id)
        self.unread[message_id] = text

    def due(self, call: int) -> dict[str, str]:
        """Return the messages that the task reads before its model call with this number."""
        messages = self.recorded.pop(call, {})
        for message_id in messages:
            self.unread.pop(message_id, None)
        if call > self.calls:
            messages, self.unread = messages | self.unread, {}
        self.heard |= messages
        return messages

    def again(self) -> None:
        """Let the next try read the messages that this try has read."""
        self.unread, self.heard = self.heard | self.unread, {}


class BreakerKey(NamedTuple):
    """Key of a breaker; all tasks of one agent in one run have the same key."""

    tenant_id: UUID | None
    run_id: UUID
    agent: str


ANONYMOUS = "subagent"
"""Name of an anonymous sub-agent, which the parent's definition does not list."""


@dataclass(slots=True)
class DispatchParams:
    """Parameters with which a parent dispatches a task.

    Attributes:
        agent: name of one of the parent's sub-agents, or ``None`` for an anonymous sub-agent.
        priority: 1 (first) to 10.
        metadata: a JSON object for plugins and the task's agent (see ``shared_keys``).
        timeout: timeout in seconds, or ``None`` for the default.
        shared_keys: keys of the metadata that the task's agent can read.
        retries: maximum number of further tries after a failure.
        is_remote: true if a child run, on any worker, executes the task. The task then needs no
            slot, and the timeout applies to the child run.
    """

    prompt: str
    instructions: str | None = None
    agent: str | None = None
    priority: int = 5
    metadata: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    token_budget: int | None = None
    shared_keys: tuple[str, ...] = ()
    retries: int = 0
    is_remote: bool = False

    @property
    def agent_name(self) -> str:
        return self.agent or ANONYMOUS


@dataclass(frozen=True, slots=True)
class SubagentOutcome:
    """Outcome of a task that has ended.

    Attributes:
        status: a final status.
        error_code: stable code of the error, whose text is in ``error``.
    """

    status: SubagentStatus
    output: str | None = None
    error: str | None = None
    error_code: str | None = None
    stop_reason: str | None = None

    @classmethod
    def failed(cls, code: str, text: str) -> Self:
        return cls(SubagentStatus.FAILED, error=text, error_code=code)


@dataclass(frozen=True, slots=True)
class RestoredTask:
    """Stored state of a task from before a crash. Times are seconds of the wall clock.

    Attributes:
        attempt: number of the attempt that begins now.
        waited: seconds since the task's dispatch.
        remaining: seconds until the task's timeout, or ``None`` if the task never ran.
        outcome: the outcome, or ``None`` if the task had not ended.
        spent: tokens that the task used, without its descendants.
        usage: usage of the task and its descendants, if the task had ended.
        publications: publications of the task and its descendants to the run's graph.
        mailbox: messages to the task, or ``None`` without messages.
        received: true if the parent has read the task's outcome.
    """

    params: DispatchParams
    attempt: int
    waited: float
    remaining: float | None = None
    outcome: SubagentOutcome | None = None
    duration_ms: int | None = None
    spent: Usage = Usage()
    usage: AgentUsage = AgentUsage()
    publications: tuple[Publication, ...] = ()
    mailbox: Mailbox | None = None
    received: bool = False


class Listener:
    """Listener that ignores all events of tasks. Methods of subclasses must not block or raise."""

    def on_event(self, handle: "SubagentHandle", event: str, data: dict[str, Any]) -> None:
        """Receive an event; ``event`` is the type without the prefix ``subagent.``."""

    def refused(self, parent: "Parent", data: dict[str, Any]) -> None:
        """Receive data about a refused dispatch."""


Place = tuple[float, int]
"""Time at which a task was added to the queue, and a number that increases with each task."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Parent:
    """A query of an agent that dispatches tasks.

    Attributes:
        agent: the agent's name.
        path: the query's position in the run's tree; the paths of the query's tasks begin with this
            path.
        limits: limits of the query's tasks.
        account: token budget of all the query's tasks together.
        accounts: accounts that pay for the tasks' model calls; the first is ``account``.
        owner: the task to which the query belongs, or ``None`` for a query outside of tasks.
        remaining: returns the seconds until the run's deadline, or ``None`` without a deadline.
            The function is used only if ``owner`` is ``None``.
        ancestors: returns an agent's ancestors in the run's graph, or ``None`` without a graph.
        waiting: number of the query's queued tasks in this process, by agent.
        lines: the query's queued tasks by base priority; each list is sorted by age and not empty.
        in_line: number of the tasks in ``lines``.
        ready: number of the tasks in ``lines`` that could start if slots were free; 0 if the query
            has reached its limit. The number ignores the tenant's limit, because a task that
            releases a slot also makes room within the tenant's limit.
        holders: the query's tasks that hold a slot, with the time at which each task got the slot.
        durations: seconds for which the latest tasks held their slots, by agent; infinite for a
            task that released its slot before its end.
        here: number of the query's unfinished tasks in this process.
        remote: number of the query's unfinished tasks that are child runs.
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
    ancestors: Callable[[str], frozenset[str]] | None = None
    children: dict[UUID, "SubagentHandle"] = field(default_factory=dict)
    waiting: Counter[str] = field(default_factory=Counter)
    lines: "dict[int, list[SubagentHandle]]" = field(default_factory=dict)
    in_line: int = 0
    ready: int = 0
    holders: "dict[SubagentHandle, float]" = field(default_factory=dict)
    durations: dict[str, deque[float]] = field(default_factory=dict)
    here: int = 0
    remote: int = 0
    ended: bool = False

    @property
    def depth(self) -> int:
        return len(self.path)

    @property
    def queued(self) -> int:
        return self.waiting.total()

    @property
    def is_over(self) -> bool:
        """True if the query can dispatch no more tasks, because it or its task has ended."""
        return self.ended or (self.owner is not None and self.owner.status.is_final)

    def time_for(self, timeout: float | None, now: float) -> float:
        """Return a task's timeout in seconds, limited by the parent's remaining time.

        Args:
            timeout: requested timeout, or ``None`` for the default.
        """
        limits = self.limits
        seconds_left = self.remaining() if self.owner is None else self.owner.left(now)
        timeout = min(timeout or limits.default_timeout, limits.max_timeout)
        return timeout if seconds_left is None else max(0.0, min(timeout, seconds_left))


@dataclass(slots=True, eq=False, kw_only=True)
class SubagentHandle(DispatchParams):
    """A task. Times are seconds on the event loop's clock; the API's durations are milliseconds.

    Attributes:
        timeout: timeout in seconds, limited by the parent's remaining time.
        is_stored: true if the task has a child run, and the child run is stored.
        mailbox: messages from the parent.
        has_answered: true if the task has answered. It then reads no more messages.
        work: coroutine function that executes the task; called by the scheduler.
        attempt: number of the task's attempt: 1, plus 1 for each restoration after a crash.
        queue_position: at the dispatch, the number of the tenant's tasks that would start before
            this task (see :meth:`TakeQueue.position`).
        deadline: time at which the task times out; set when the task first runs.
        paused_at: time at which the task's clock stopped, because the task waits for people.
        partial_output: the last 10,000 characters of the model's text.
        text_length: number of characters of the model's whole text.
        polled: number of characters of the model's text that the parent has read.
        token_usage: usage of the task, even if the task failed.
        was_limited: true if a model call failed because of limits of the model's server.
        received: true if the parent has read the task's outcome.
        scopes: this task's queries that may dispatch further tasks.
        holds: the tasks that must end before this task may run.
        breaker: key of the task's breaker, or ``None`` without a breaker.
        context: context variables at the dispatch; ``None`` after the task's start.
        running: the task's coroutine, or ``None`` before its start and after its outcome.
        place: the task's position in the queue, or ``None`` outside of the queue.
        line: base priority of the task's line in the queue.
        suspended: true if this process stopped the task before its end; another process then
            restores the task.
        waiting_below: number of descendants that could run if they had a slot.
    """

    task_id: UUID
    parent: Parent
    path: Path
    timeout: float
    created_at: float
    status_changed_at: float
    work: Callable[["SubagentHandle"], Awaitable[SubagentOutcome]]
    account: Account
    context: contextvars.Context | None
    is_stored: bool = False
    mailbox: Mailbox | None = None
    has_answered: bool = False
    status: SubagentStatus = SubagentStatus.QUEUED
    attempt: int = 1
    queue_position: int = 0
    started_at: float | None = None
    deadline: float | None = None
    paused_at: float | None = None
    partial_output: str = ""
    text_length: int = 0
    polled: int = 0
    final_output: str | None = None
    error: str | None = None
    error_code: str | None = None
    stop_reason: str | None = None
    token_usage: Usage = Usage()
    fixed_duration_ms: int | None = None
    was_limited: bool = False
    received: bool = False
    scopes: list[Parent] = field(default_factory=list)
    waiters: "set[Waiter] | None" = None
    holds: "frozenset[SubagentHandle]" = frozenset()
    breaker: BreakerKey | None = None
    suspended: bool = False
    # Only the queue and the scheduler set the fields below.
    place: Place | None = None
    line: int = 0
    timer: asyncio.TimerHandle | None = None
    running: "asyncio.Task[None] | None" = None
    slot: "asyncio.Future[None] | None" = None
    awaits: int = 0
    calls: int = 0
    polling: bool = False
    waiting_below: int = 0

    __eq__ = object.__eq__
    __hash__ = object.__hash__

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
        """Level of the task in the tree of tasks: 0 for the root's tasks."""
        return len(self.path) - 1

    @property
    def holds_slot(self) -> bool:
        return self in self.parent.holders

    @property
    def shared(self) -> Mapping[str, Any]:
        return {key: self.metadata[key] for key in self.shared_keys if key in self.metadata}

    def duration_ms(self, now: float) -> int:
        """Return the milliseconds from the task's dispatch to its end, or to ``now``."""
        if self.fixed_duration_ms is not None:
            return self.fixed_duration_ms
        return max(0, round((now - self.created_at) * 1000))

    def left(self, now: float) -> float | None:
        """Return the seconds until the task's deadline, or ``None`` if the task never ran."""
        if self.deadline is None:
            return None
        return self.deadline - (now if self.paused_at is None else self.paused_at)

    def spend(self, usage: Usage) -> None:
        """Charge a usage to the task's account and to the accounts of its ancestors."""
        self.account.spend(usage)
        self.parent.account.spend(usage)
        if self.parent.owner is not None:
            self.parent.owner.spend(usage)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def pause(self, now: float) -> None:
        """Stop the task's clock and timer."""
        self.paused_at = now
        self.stop_timer()

    def resume(self, now: float) -> None:
        """Start the task's clock again; the caller sets the timer."""
        if self.paused_at is not None and self.started_at is not None and self.deadline is not None:
            self.started_at += now - self.paused_at
            self.deadline += now - self.paused_at
        self.paused_at = None

    def tell_waiters(self) -> None:
        for waiter in self.waiters or ():
            waiter.look()

    def add_text(self, text: str) -> None:
        self.text_length += len(text)
        self.partial_output = (self.partial_output + text)[-10_000:]


class TaskCounts:
    """Numbers of tasks in this process, except child runs; updated at each change of a task.

    Attributes:
        queued_of, queued_of_run: queued tasks by tenant and by run.
        active_of: running and streaming tasks by tenant.
    """

    def __init__(self) -> None:
        self.queued_of: Counter[UUID | None] = Counter()
        self.queued_of_run: Counter[UUID] = Counter()
        self.active_of: Counter[UUID | None] = Counter()

    @property
    def active(self) -> int:
        return self.active_of.total()

    @property
    def queued(self) -> int:
        return self.queued_of.total()

    def add(self, handle: "SubagentHandle", by: int = 1) -> None:
        """Add a task to the counts for its current state; ``by`` -1: subtract the task.

        A task that is a child run changes only the parent's ``remote``.
        """
        parent, status = handle.parent, handle.status
        if status.is_final:
            return
        if handle.is_remote:
            parent.remote += by
            return
        parent.here += by
        if status is SubagentStatus.QUEUED:
            _add(parent.waiting, handle.agent_name, by)
            _add(self.queued_of, parent.tenant_id, by)
            _add(self.queued_of_run, parent.run_id, by)
        elif status.is_active:
            _add(self.active_of, parent.tenant_id, by)


def _add(counter: Counter[Any], key: Any, by: int) -> None:
    if total := counter.get(key, 0) + by:
        counter[key] = total
    else:
        del counter[key]


@dataclass(slots=True, eq=False)
class Waiter:
    """A wait for tasks. The wait ends when ``missing`` more tasks have ended.

    Attributes:
        for_success: true if the first success also ends the wait.
        left: remaining seconds of the timeout while the timeout is paused.
    """

    future: "asyncio.Future[None]"
    handles: Sequence[SubagentHandle]
    missing: int
    limit: asyncio.Timeout
    for_success: bool = False
    left: float | None = None

    @property
    def is_open(self) -> bool:
        """True if the wait goes on: too few tasks have ended, and the timeout is not over."""
        return not self.future.done() and not self.limit.expired()

    @property
    def needs_people(self) -> bool:
        """True if the wait cannot end without a decision of people."""
        statuses = [handle.status for handle in self.handles]
        return SubagentStatus.WAITING in statuses and stands_still(statuses, self.fewest_ends)

    @property
    def fewest_ends(self) -> int:
        """Minimum number of further tasks that must end before the wait can end."""
        return min(1, self.missing) if self.for_success else self.missing

    def ended(self, handle: SubagentHandle) -> None:
        """Count a task's end; end the wait if enough tasks have ended."""
        won = self.for_success and handle.status is SubagentStatus.COMPLETED
        self.missing = 0 if won else self.missing - 1
        if self.missing <= 0 and not self.future.done():
            self.future.set_result(None)
        self.look()

    def look(self) -> None:
        """Pause the timeout if the wait needs people; otherwise let the timeout continue."""
        due = self.limit.when()
        if not self.is_open or self.needs_people == (due is None):
            return
        now = asyncio.get_running_loop().time()
        if due is not None:
            self.left = due - now
            self.limit.reschedule(None)
        elif self.left is not None:
            self.limit.reschedule(now + self.left)


Mode = Literal["all", "any", "quorum", "any_success"]
"""The condition of a wait. ``any_success`` means one success, or the end of all tasks."""


def missing(statuses: Sequence[SubagentStatus], mode: Mode, quorum: int | None) -> int:
    """Return the number of tasks that must still end before a wait ends; 0 or less: none.

    For ``any_success``, the function assumes that no further task succeeds.
    """
    if mode == "any_success" and SubagentStatus.COMPLETED in statuses:
        return 0
    total = len(statuses)
    least = {"any": 1, "quorum": quorum or total}.get(mode, total)
    return min(least, total) - sum(status.is_final for status in statuses)


def ends_of(handles: Iterable[SubagentHandle], gone: int) -> list[SubagentStatus]:
    """Return the statuses of ``handles`` and of ``gone`` further tasks, which count as failed."""
    return [*(handle.status for handle in handles), *[SubagentStatus.FAILED] * gone]


async def wait_for(
    handles: Sequence[SubagentHandle],
    mode: Mode,
    quorum: int | None,
    timeout: float,
    waits: set[Waiter] | None = None,
    gone: int = 0,
) -> bool:
    """Wait for the ends of tasks, as ``mode`` requires; return false after the timeout.

    A timeout does not end the tasks. The timeout is paused while the wait cannot end without a
    decision of people.

    Args:
        waits: set that contains the wait until the wait ends.
        gone: number of awaited tasks that have ended and that the registry has removed.
    """
    count = missing(ends_of(handles, gone), mode, quorum)
    if count <= 0:
        return True
    under_way = [handle for handle in handles if not handle.status.is_final]
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    limit = asyncio.timeout(timeout)
    waiter = Waiter(future, under_way, count, limit, mode == "any_success")
    of_all = [] if waits is None else [waits]
    for handle in under_way:
        handle.waiters = handle.waiters or set()
        of_all.append(handle.waiters)
    for waiting in of_all:
        waiting.add(waiter)
    try:
        async with limit:
            waiter.look()
            await future
        return True
    except TimeoutError:
        return waiter.missing <= 0
    finally:
        for waiting in of_all:
            waiting.discard(waiter)
        for handle in under_way:
            handle.waiters = handle.waiters or None


async def all_done(tasks: Collection["asyncio.Task[None]"]) -> None:
    """Wait until all tasks are done; if the caller is cancelled, raise CancelledError only then."""
    cancelled = False
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def as_id(text: str) -> UUID | None:
    """Return a task's id from a model's text, or ``None`` if the text is not a UUID."""
    try:
        return UUID(text)
    except ValueError:
        return None
