"""Waits of a run: for people, tasks, messages, models or a time.

If all agents of a run wait, the worker suspends the run. A task that waits for people has no slot,
and the task's timeout is stopped. The task's row and the log have the status ``waiting``.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from uuid import UUID, uuid5

import asyncpg
from pydantic_core import from_json

from bottega.agents.approval import Interrupt, Resolution
from bottega.agents.messages import StandardMessage, ToolCall, Usage, user_message
from bottega.agents.provider import ModelTarget
from bottega.agents.query import CurrentCall, Path, Query, current_call
from bottega.agents.subagent import SubAgentWrapper
from bottega.agents.tools import ToolBase
from bottega.clock import monotonic
from bottega.db.failures import persist
from bottega.engine.journal import Tasks, name_of
from bottega.events.data import (
    AttemptData,
    InterruptCreatedData,
    InterruptResolvedData,
    LlmCancelledData,
    LlmFailedData,
    MessageDeliveredData,
    MessageReceivedData,
    ModelCallData,
)
from bottega.events.types import EventType
from bottega.subagents.handle import SubagentHandle, SubagentStatus, Waiter
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.swarm import QueryScope, TaskOfQuery

SUSPENDED_AFTER_S = 30.0
"""Seconds after which a run that only waits for models is suspended."""
AWAITED_HERE_S = 5.0
"""Seconds after which a run that only waits for child runs is suspended.

A run that pauses for longer before a retry is suspended at once.
"""


class Inbox:
    """The messages to the root agent of one run; see :class:`bottega.agents.query.InboxPort`.

    The API stores a message in a row. The worker writes an event when the message arrives, and a
    second event that names the model call before which the agent gets the message. A later attempt
    delivers the message before the same model call.

    Attributes:
        read: number of messages that the agent received.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._journal = tasks.journal
        self._known: int | None = None
        self._new: deque[tuple[str, Any]] = deque()
        self.read = 0

    def open(self) -> None:
        """Begin to accept messages. The journal must already have the replay."""
        self._known = self.read = self._journal.replay.messages_read

    @property
    def known(self) -> int | None:
        """Number of messages that the inbox has accepted; ``None``: the inbox is not open yet."""
        return self._known

    def take(self, number: int, message_id: UUID, content: Any) -> None:
        """Accept the message with this number. Ignore a message that the inbox already has."""
        if self._known is None or number != self._known + 1 or self._journal.finishing:
            return
        self._known = number
        self._journal.add(
            EventType.MESSAGE_RECEIVED, MessageReceivedData(message_id=str(message_id))
        )
        self._new.append((str(message_id), content))

    def due(self, query: Query, *, answered: bool) -> Sequence[StandardMessage]:
        """Return the messages that the root agent gets before its next model call."""
        replay = self._journal.replay
        delivered = replay.task(None).delivered
        if query.path or not (self._new or delivered):
            return ()
        call = query.model_calls + 1
        contents = [each["content"] for each in delivered.pop(call, ())]
        if not replay.model_call(None, call).is_known:
            while self._new:
                message_id, content = self._new.popleft()
                data = MessageDeliveredData(message_id=message_id, call=call, content=content)
                if answered:
                    data["answered"] = True
                self._tasks.add(query, EventType.MESSAGE_DELIVERED, data)
                replay.reopen()
                self.read += 1
                contents.append(content)
        return list(map(user_message, contents))


@dataclass(frozen=True, slots=True)
class SuspendReason:
    """The reason to suspend a run, because all agents of the run wait.

    Attributes:
        left_s: seconds until the worker suspends the run; 0 or less: at once.
        reason: ``person``, ``client`` (only client tools), ``children``, ``model`` or ``time``.
        until_s: seconds until a model is called again, a wait for tasks times out, or a pause ends;
            ``None``: the wait has no end time.
        groups: ids of open interrupts; the interrupts of one model message are a group. The run
            continues when people have decided all interrupts of one group.
        children: the run continues when at most this number of child runs is unfinished; ``None``:
            the run awaits no child runs.
    """

    left_s: float
    reason: str
    until_s: float | None = None
    groups: tuple[tuple[UUID, ...], ...] = ()
    children: int | None = None


CallEnd = TypeVar("CallEnd", LlmFailedData, LlmCancelledData)


@dataclass(slots=True)
class ModelCall:
    """A model call that has not ended.

    Attributes:
        target: the model and its server; ``None`` if the provider has no such data.
        goes_on_at: monotonic time at which the next try begins; a past time: a try is under way.
        failing_since: monotonic time of the call's first failed try, in any attempt of the run.
        lost: usage of an answer that broke off, if no event has reported this usage yet.
    """

    target: ModelTarget | None
    goes_on_at: float
    failed_tries: int = 0
    failing_since: float | None = None
    lost: Usage | None = None

    def with_lost(self, data: CallEnd) -> CallEnd:
        """Add the model to an event's data, and :attr:`lost` if it is not reported yet."""
        served_by(data, self.target)
        if self.lost is not None:
            data["usage"] = self.lost.to_dict()
            self.lost = None
        return data


def served_by(data: ModelCallData, target: ModelTarget | None) -> None:
    """Add a model call's provider and model to the data of the call's event, if known."""
    if target is not None:
        data["provider"], data["model"] = target


def _wait_for_models(calls: Collection[ModelCall], now: float) -> tuple[float, float] | None:
    """Return the seconds until the run is suspended, and until the next try of a call.

    The seconds until the suspension may be negative. Return ``None`` unless all calls wait.
    """
    goes_on_at = min((call.goes_on_at for call in calls), default=now)
    if goes_on_at <= now:
        return None
    since = [now if call.failing_since is None else call.failing_since for call in calls]
    return max(since) + SUSPENDED_AFTER_S - now, goes_on_at - now


@dataclass(slots=True)
class AwaitedRuns:
    """The child runs that a node of a graph awaits.

    Attributes:
        left: number of child runs that were not created yet.
        unstored: number of child runs that the database is storing.
        unended: number of stored child runs that have not ended.
        most: the node continues after this many ends of child runs, or when all have ended.
    """

    left: int
    most: int
    unstored: int = 0
    unended: int = 0

    @property
    def fewest_ends(self) -> int:
        """Number of child runs that must end before the node continues."""
        return 1 if self.left else min(self.most, self.unended)


class NodeClock:
    """The remaining time of a node's current try. The clock stops while the node needs people.

    Attributes:
        expired: event that is set when the time has run out.
    """

    def __init__(self, path: Path, left_s: float) -> None:
        self.path = path
        self.expired = asyncio.Event()
        self._left_s = left_s
        self._timer: tuple[float, asyncio.Handle] | None = None

    @property
    def left_s(self) -> float | None:
        """Remaining seconds; ``None``: the clock is stopped."""
        if self._timer is None:
            return None
        return self._timer[0] - asyncio.get_running_loop().time()

    def stand(self, is_still: bool) -> None:
        """Stop the node's clock, or let the clock run again."""
        if not is_still and self._timer is None:
            loop, left_s = asyncio.get_running_loop(), max(0.0, self._left_s)
            self._timer = loop.time() + left_s, loop.call_later(left_s, self.expired.set)
        elif is_still and self._timer is not None:
            ends_at, timer = self._timer
            timer.cancel()
            self._left_s, self._timer = ends_at - asyncio.get_running_loop().time(), None


class RunActivity:
    """Record of which agents of a run work, and which agents wait.

    Args:
        queries: queries under way.
        calls: open model calls.

    Attributes:
        between: returns true if a graph's node is about to begin or has just ended.
        tasks: returns the unfinished asynchronous tasks.
        child_runs: the child runs that a node awaits, by the node's query.
    """

    def __init__(self, queries: Mapping[Query, None], calls: Mapping[Query, ModelCall]) -> None:
        self.between: Callable[[], bool] = lambda: False
        self.tasks: Callable[[], Sequence[SubagentHandle]] = lambda: ()
        self.child_runs: dict[Query, AwaitedRuns] = {}
        self._queries = queries
        self._calls = calls
        self._admitted: Counter[Query] = Counter()
        self._busy: Counter[Query] = Counter()
        self._asking: dict[UUID, tuple[Query, str]] = {}
        self._askers: Counter[Query] = Counter()
        self._decided: set[tuple[Query, int]] = set()
        self._delegated: dict[tuple[Path, int], tuple[Path, SubAgentWrapper]] = {}
        self._pauses: dict[Query, float] = {}
        self._clocks: list[NodeClock] = []
        self._awaits_children_since: float | None = None

    @contextmanager
    def admission(self, query: Query) -> Iterator[Callable[[], None]]:
        """Record that a model call waits for budgets. Yield a function that ends this wait."""
        self._admitted[query] += 1
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                _count(self._admitted, query, -1)

        try:
            yield end
        finally:
            end()

    @contextmanager
    def tool_call(self, query: Query, tool: ToolBase | None, call: CurrentCall) -> Iterator[None]:
        self._decided.discard((query, call.index))
        if isinstance(tool, SubAgentWrapper):
            place = (query.model_calls, call.index)
            key = (query.path, call.index)
            self._delegated[key] = ((*query.path, place), tool)
            try:
                yield
            finally:
                del self._delegated[key]
            return
        _count(self._busy, query, 1)
        try:
            yield
        finally:
            _count(self._busy, query, -1)

    @contextmanager
    def asking(self, query: Query, interrupt_id: UUID, kind: str) -> Iterator[None]:
        """Record that a tool call waits for people during the block, and works after the block."""
        call = current_call.get()
        assert call is not None
        self._decided.discard((query, call.index))
        self._asking[interrupt_id] = query, kind
        _count(self._askers, query, 1)
        try:
            yield
            self._decided.add((query, call.index))
        finally:
            del self._asking[interrupt_id]
            _count(self._askers, query, -1)

    def is_pausing(self, query: Query) -> bool:
        return query in self._pauses

    @contextmanager
    def pausing(self, query: Query, seconds: float) -> Iterator[None]:
        """Record that a query pauses before its next try. A long pause may suspend the run."""
        self._pauses[query] = monotonic() + seconds
        try:
            yield
        finally:
            del self._pauses[query]

    @contextmanager
    def timed(self, path: Path, left_s: float) -> Iterator[NodeClock]:
        """Start the clock of a node's current try, and stop it at the end of the ``with`` block."""
        clock = NodeClock(path, left_s)
        clock.stand(False)
        self._clocks.append(clock)
        try:
            yield clock
        finally:
            self._clocks.remove(clock)
            clock.stand(True)

    def look_at_clocks(self) -> None:
        """Stop the clocks of nodes that need people to continue. Start all other clocks."""
        if not self._clocks:
            return
        needing = {query for query, needs in self.needing_people() if needs}
        for clock in self._clocks:
            below = [each for each in self._queries if each.path[: len(clock.path)] == clock.path]
            own = [each for each in below if each.path == clock.path] or below
            clock.stand(bool(own) and needing.issuperset(own))

    @property
    def needs_a_model(self) -> bool:
        """True if all open model calls wait and no tool works, so the run cannot end soon."""
        is_busy = any(self._has_tool_at_work(query) for query in self._queries)
        return not is_busy and _wait_for_models(self._calls.values(), monotonic()) is not None

    @property
    def wait(self) -> SuspendReason | None:
        """The reason to suspend the run; ``None``: an agent works."""
        wait, since = self._with_pauses(now := monotonic()), self._awaits_children_since
        times_left = [left_s for clock in self._clocks if (left_s := clock.left_s) is not None]
        if wait is not None and wait.reason not in ("person", "client") and times_left:
            until_s = min(times_left) if wait.until_s is None else min(*times_left, wait.until_s)
            wait = replace(wait, until_s=until_s)
        if wait is None or wait.children is None:
            self._awaits_children_since = None
            return wait
        self._awaits_children_since = now if since is None else since
        return replace(wait, left_s=self._awaits_children_since + AWAITED_HERE_S - now)

    def _with_pauses(self, now: float) -> SuspendReason | None:
        if not self._pauses:
            return self._wait_at(now) if self._queries else None
        wait = self._wait_at(now) if self._queries else SuspendReason(0.0, "time")
        if wait is None or self.between():
            return None
        until_s = min(self._pauses.values()) - now
        left_s = wait.left_s if until_s > AWAITED_HERE_S else until_s
        if wait.until_s is not None:
            until_s = min(until_s, wait.until_s)
        # Do not report a wait for people: it would stop the run's clock, which counts pauses.
        reason = "time" if wait.reason in ("person", "client") else wait.reason
        return replace(wait, left_s=left_s, reason=reason, until_s=until_s)

    def _wait_at(self, now: float) -> SuspendReason | None:
        if self.between():
            return None
        if not all(self._rests(query, now) for query in self._queries):
            return None
        if not all(self._task_rests(handle) for handle in self.tasks()):
            return None
        if self._calls:
            reason = _wait_for_models(self._calls.values(), now)
            return None if reason is None else SuspendReason(reason[0], "model", reason[1])
        children = sum(handle.is_remote for handle in self.tasks())
        children += sum(awaited.unended for awaited in self.child_runs.values())
        if self._admitted or not (self._asking or children):
            return None
        groups: dict[Query, tuple[UUID, ...]] = {}
        for interrupt_id, (query, _) in self._asking.items():
            groups[query] = (*groups.get(query, ()), interrupt_id)
        if children:
            return self._wait_for_children(children, tuple(groups.values()))
        of_client = all(kind == "client_tool" for _, kind in self._asking.values())
        return SuspendReason(
            0.0, "client" if of_client else "person", groups=tuple(groups.values())
        )

    def _wait_for_children(
        self, unended: int, groups: tuple[tuple[UUID, ...], ...]
    ) -> SuspendReason | None:
        waits = [wait for query in self._queries for wait in _waits_of(query)]
        ends = [wait.fewest_ends for wait in waits]
        ends += [awaited.fewest_ends for awaited in self.child_runs.values()]
        fewest = min(ends, default=unended)
        due = [at for wait in waits if (at := wait.limit.when()) is not None]
        until_s = min(due) - asyncio.get_running_loop().time() if due else None
        return SuspendReason(0.0, "children", until_s, groups, max(0, unended - fewest))

    @property
    def any_asks(self) -> bool:
        return bool(self._asking)

    def needing_people(self) -> Iterator[tuple[Query, bool]]:
        """Yield (query, true if the query needs people to continue).

        The deepest queries come first. The caller may change the state of a query's task before the
        caller reads the next query. A query that has just begun or ended is not yielded.
        """
        queries: set[Query] = set()
        for query in sorted(self._queries, key=lambda query: -query.depth):
            needs = self._needs_people(query, queries)
            if needs:
                queries.add(query)
            if needs is not None:
                yield query, needs

    def _rests(self, query: Query, now: float) -> bool:
        if call := self._calls.get(query):
            return call.goes_on_at > now
        if (awaited := self.child_runs.get(query)) is not None:
            return not awaited.unstored and awaited.unended > 0
        if query in self._admitted:
            return True
        if self._has_tool_at_work(query):
            return False
        delegated = self._delegated_by(query)
        if not all(self._is_open(*each) for each in delegated):
            return False
        return bool(delegated or _waits_of(query)) or query in self._askers

    def _task_rests(self, handle: SubagentHandle) -> bool:
        if any(query.path == handle.path for query in self._queries):
            return True
        if handle.is_remote:
            return handle.is_stored
        if handle.status is not SubagentStatus.QUEUED:
            return False
        # A queued task rests while model calls hold all slots and wait for a failing model.
        return bool(self._calls or handle.holds)

    def _needs_people(self, query: Query, queries: Collection[Query]) -> bool | None:
        """Return true if a query needs people to continue; ``None``: that is not known yet.

        Args:
            queries: the queries below this query that need people to continue.
        """
        if query in self._calls or query in self._admitted or self._has_tool_at_work(query):
            return False
        if query in self.child_runs:
            return False
        parts = [waiter.needs_people for waiter in _waits_of(query)]
        if query in self._askers:
            parts.append(True)
        for path, tool in self._delegated_by(query):
            below = [each for each in self._queries if each.path == path]
            if not below and not tool.stateless:  # the call waits for an older query of the agent
                below = [each for each in self._queries if each.agent is tool.agent]
            parts.append(bool(below) and all(each in queries for each in below))
        return all(parts) if parts else None

    def _has_tool_at_work(self, query: Query) -> bool:
        if any(each is query for each, _ in self._decided):
            return True
        return self._busy[query] > len(_waits_of(query))

    def _delegated_by(self, query: Query) -> list[tuple[Path, SubAgentWrapper]]:
        return [each for (path, _), each in self._delegated.items() if path == query.path]

    def _is_open(self, path: Path, tool: SubAgentWrapper) -> bool:
        """Check if a sub-agent's query has begun, or waits for an older query of the same agent."""
        if any(query.path == path for query in self._queries):
            return True
        return not tool.stateless and tool.agent.turn().locked()


def _waits_of(query: Query) -> list[Waiter]:
    scope = query.scope
    return [wait for wait in scope.waits if wait.is_open] if isinstance(scope, QueryScope) else []


def _count(counter: Counter[Query], query: Query, change: int) -> None:
    counter[query] += change
    if not counter[query]:
        del counter[query]


def pause(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    """Set a running task to ``waiting``, and release its slot."""
    if handle.status not in (SubagentStatus.RUNNING, SubagentStatus.STREAMING):
        return
    handle.pause(registry.scheduler.now())
    registry.transition(handle, SubagentStatus.WAITING)
    registry.scheduler.release(handle)
    handle.tell_waiters()


def resume(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    """Set a task to ``running`` after its sub-tasks waited for people. It gets no slot yet."""
    if handle.status is SubagentStatus.WAITING:
        _queue(registry, handle)
        _run(registry, handle)


async def hold_slot_again(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    """Called after people have decided. Wait until the task has a slot again."""
    if handle.status is SubagentStatus.WAITING:
        _queue(registry, handle)
    if handle.status is SubagentStatus.QUEUED:
        try:
            await registry.scheduler.begin_call(handle)
            registry.scheduler.end_call(handle)
        finally:  # even if this call is cancelled, because the task's other calls continue
            _run_if_queued(registry, handle)


def _queue(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    registry.transition(handle, SubagentStatus.QUEUED)
    handle.tell_waiters()


def _run_if_queued(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    if handle.status is SubagentStatus.QUEUED and not handle.suspended:
        _run(registry, handle)


def _run(registry: SubagentRegistry, handle: SubagentHandle) -> None:
    scheduler = registry.scheduler
    handle.resume(scheduler.now())
    assert handle.deadline is not None
    registry.transition(handle, SubagentStatus.RUNNING)
    loop = asyncio.get_running_loop()
    handle.timer = loop.call_at(handle.deadline, scheduler.time_out, handle)


class WaitingTasks:
    """Tasks that need people to continue: they ask people, or await a task that asks people."""

    def __init__(self, tasks: Tasks, loops: RunActivity) -> None:
        self._tasks = tasks
        self._loops = loops
        self._waiting: set[Query] = set()

    def show(self) -> None:
        """Write an event for each task that begins or ends a wait for people."""
        self._loops.look_at_clocks()
        if not (self._loops.any_asks or self._waiting):
            return
        self._waiting &= self._tasks.open.keys()
        for query, waits in self._loops.needing_people():
            if waits == (query in self._waiting):
                continue
            if waits:
                self._waiting.add(query)
            else:
                self._waiting.remove(query)
            self._show(query, waits)

    def _show(self, query: Query, waits: bool) -> None:
        if (task := task_of(query)) is not None:
            (pause if waits else resume)(task.swarm.registry, task.handle)
        elif query.path:
            attempt = AttemptData(attempt=self._tasks.journal.attempt)
            kind = EventType.AGENT_WAITING if waits else EventType.AGENT_RESUMED
            self._tasks.add(query, kind, attempt)


def task_of(query: Query) -> TaskOfQuery | None:
    """Return the asynchronous task that the query executes; ``None``: no such task."""
    task = query.task
    return task if isinstance(task, TaskOfQuery) and task.handle.path == query.path else None


class Debounced:
    """Function that runs once in the event loop's next pass, even after several calls."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._is_due = False

    def __call__(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._now)

    def _now(self) -> None:
        self._is_due = False
        self._act()


_SENT = "SELECT * FROM sent_to_runs($1, $2, $3)"
_PATIENCE_S = 3.0
MOST_OF_CALL, _MOST_OF_RUN = 10, 50
"""Maximum number of MCP servers' questions to people, for a tool call and for a run."""

Decided = Mapping[str, Any]
"""``status``, ``resolution`` and ``by`` of an interrupt."""


class OpenInterrupts:
    """The open interrupts of one run.

    A tool call that asks people waits in :meth:`decision`. If no agent of the run works meanwhile,
    the worker suspends the run. The next attempt repeats the tool call, and reads the decision from
    the log. While a worker executes the run, the API stores a decision only in the interrupt's row.
    The worker then writes the decision into the log.

    Args:
        waits: function that is called when a tool call begins to wait or continues.

    Attributes:
        tasks: writer of events about waiting tasks.
    """

    def __init__(
        self, tasks: Tasks, run_id: UUID, loops: RunActivity, waits: Callable[[], None]
    ) -> None:
        self._tasks = tasks
        self._journal = tasks.journal
        self._run_id = run_id
        self._loops = loops
        self._waits = waits
        self.tasks = WaitingTasks(tasks, loops)
        self._decided: dict[UUID, Decided] = {}
        self._waiting: dict[UUID, asyncio.Event] = {}
        self._questions: set[str] = set()

    def decide(self, interrupt_id: UUID, decided: Decided) -> None:
        """Accept a stored decision. Idempotent."""
        self._decided[interrupt_id] = decided
        if waiting := self._waiting.get(interrupt_id):
            waiting.set()

    async def decision(self, query: Query, tool_call: ToolCall, interrupt: Interrupt) -> Resolution:
        """Return people's decision on a tool call from the log, or ask people and wait.

        The resolution is empty if the run's MCP servers may not ask people more questions.
        """
        task_id = self._tasks.id_of(query)
        key = (task_id, query.model_calls, tool_call.id)
        kind = interrupt.kind
        number = (interrupt.number,) if interrupt.number else ()
        interrupt_id = uuid5(self._run_id, ":".join(map(str, (*key, kind, *number))))
        call = self._journal.replay.tool_call(*key)
        if (decided_before := call.decisions.get(kind)) is not None:
            question, resolution = decided_before
            # A decision that was copied from an earlier run is valid only if the call's result
            # was copied, too. Decisions of a graph's nodes are copied only with the nodes' answers.
            is_over = call.ended is not None or interrupt.node is not None
            if question == str(interrupt_id) or is_over:
                return Resolution(resolution)
        if interrupt.server is not None and self._is_too_many(str(interrupt_id)):
            return Resolution({})
        self._record_interrupt(query, tool_call, interrupt, interrupt_id)
        decided = await self._wait(query, interrupt_id, kind)
        data = InterruptResolvedData(
            interrupt_id=str(interrupt_id),
            kind=kind,
            call=query.model_calls,
            tool_call_id=tool_call.id,
            status=decided["status"],
            resolution=decided["resolution"],
            by=decided["by"],
        )
        self._tasks.add(query, EventType.INTERRUPT_RESOLVED, data)
        self._waits()
        if isinstance(query.task, TaskOfQuery):
            await hold_slot_again(query.task.swarm.registry, query.task.handle)
        return Resolution(decided["resolution"])

    def _is_too_many(self, interrupt_id: str) -> bool:
        """Count a question. Return true if the run's MCP servers have asked too many questions."""
        questions = self._journal.replay.questions | self._questions
        if interrupt_id in questions:
            return False
        if len(questions) >= _MOST_OF_RUN:
            return True
        self._questions.add(interrupt_id)
        return False

    def _record_interrupt(
        self, query: Query, tool_call: ToolCall, interrupt: Interrupt, interrupt_id: UUID
    ) -> None:
        data = InterruptCreatedData(
            interrupt_id=str(interrupt_id),
            kind=interrupt.kind,
            call=query.model_calls,
            tool_call_id=tool_call.id,
            tool=tool_call.name,
            arguments=tool_call.arguments,
            question=interrupt.question,
            schema=interrupt.schema,
            reason=interrupt.reason,
            server=interrupt.server,
            expires_s=interrupt.expires_s,
        )
        if interrupt.confirm_above is not None:
            data["confirm_above"] = interrupt.confirm_above
        if interrupt.node is not None:
            data["node"], data["who"] = interrupt.node, interrupt.who
        seq = self._tasks.add(query, EventType.INTERRUPT_CREATED, data)
        if self._journal.is_new(seq):
            task_id, agent = self._tasks.id_of(query), name_of(query.agent) or None
            fields = {key: each for key, each in data.items() if key != "interrupt_id"}
            self._journal.interrupt(id=interrupt_id, task_id=task_id, agent=agent, **fields)

    async def _wait(self, query: Query, interrupt_id: UUID, kind: str) -> Decided:
        if interrupt_id not in self._decided:
            waiting = self._waiting[interrupt_id] = asyncio.Event()
            try:
                with self._loops.asking(query, interrupt_id, kind):
                    self._waits()
                    await waiting.wait()
            finally:
                del self._waiting[interrupt_id]
        return self._decided[interrupt_id]


async def deliver(
    pool: asyncpg.Pool, runs: Mapping[UUID, tuple[UUID, Inbox, OpenInterrupts]]
) -> None:
    """Deliver new messages and people's decisions to runs. Wait while the database is away.

    Args:
        runs: the tenant, the open inbox and the open interrupts of each run, by run id.
    """
    if not runs:
        return
    inboxes = [(tenant, run_id, inbox.known) for run_id, (tenant, inbox, _) in runs.items()]
    columns = list(zip(*inboxes, strict=True))
    for row in await persist(lambda: pool.fetch(_SENT, *columns, timeout=_PATIENCE_S)):
        _, inbox, interrupts = runs[row["run_id"]]
        if row["number"] is None:
            interrupts.decide(row["id"], from_json(row["content"]))
        else:
            inbox.take(row["number"], row["id"], from_json(row["content"]))
