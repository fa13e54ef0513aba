"""The journal of a run. No external action may depend on an event that is not stored.

A step consists of all events since the last commit. One SQL statement stores a step. A commit
happens

- before a model call, if the step has an event that a resumed run would not write again, such as an
  answer or a tool's result (see ``_STARTS``); therefore the first model call needs no commit,
- before a tool call, except calls of sub-agents and ``local`` tools (no effects outside the run),
- at the end of the run,
- and at most ``COMMIT_AFTER_S`` seconds after an event, so that subscribers see the event.

This module also makes the ids of the run's tasks, writes the tasks' events and rows, and ends
stopped tasks.
"""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import UUID

import asyncpg

from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    AssistantResponse,
    ToolCall,
    ToolResult,
    Usage,
)
from bottega.agents.provider import ModelTarget
from bottega.agents.query import CurrentCall, Path, Query, QueryObserver, task_id_at
from bottega.agents.tools import AgentState, ToolBase
from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.engine.claim import ClaimedRun
from bottega.engine.replay import ENDS, RunReplay, key_of
from bottega.errors import PendingRequestError
from bottega.events.data import (
    AgentFailedData,
    EpisodeStoredData,
    Failure,
    RunEndedData,
    SubagentCompletedData,
    SubagentDispatchedData,
    WarningData,
)
from bottega.events.log import Step, StepWriter
from bottega.events.types import FINAL_EVENT, Data, Event, EventError, EventType, RunStatus
from bottega.logger import Logger
from bottega.memory.learning.episode_recorder import EpisodeRecorder
from bottega.redaction import Redactor
from bottega.subagents.handle import SubagentStatus

logger = Logger(__name__)

EPISODE_NOT_STORED = "episode_not_stored"
"""Code of the warning that replaces ``episode.stored`` if the episode was not stored."""

_STARTS = frozenset(
    (
        EventType.AGENT_STARTED,
        EventType.LLM_STARTED,
        EventType.MEMORY_INJECTED,
        EventType.CONTEXT_RECALLED,
        EventType.ANSWER_REJECTED,
        EventType.WARNING,
        EventType.NODE_STARTED,
    )
)
"""Types of events that need no early commit, because a resumed run writes these events again."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run.

    Attributes:
        output: the answer, complete or not.
        output_json: the parsed answer, if the answer has a schema.
        answer_seq: ``seq`` of the event that has the answer.
        turn: data of the conversation's turn; ``None``: the run belongs to no conversation.
        messages: number of users' messages that the run's agent received during the run.
        files: texts of the files that a child run wrote, by path.
    """

    status: RunStatus
    output: Any = None
    output_json: Any = None
    stop_reason: str | None = None
    error: Failure | None = None
    usage: AgentUsage | None = None
    answer_seq: int | None = None
    turn: dict[str, Any] | None = None
    messages: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


class RunObserver(QueryObserver):
    """Observer of one attempt of a run. This base class does nothing.

    No method may block or raise. Replayed events, model calls and tool results are not reported
    again. :meth:`earlier_events` receives the events of earlier attempts.
    """

    def began(self) -> None:
        """Called when the attempt begins."""

    def earlier_events(self, events: Sequence[Event]) -> None:
        """Called before the first new event, with the events of earlier attempts."""

    def event(self, event_type: str, task_id: UUID | None, agent: str | None, data: Data) -> None:
        """Called for each new event of the log."""

    def model_call_began(self, query: Query, target: ModelTarget | None, started: int) -> None:
        """Called when a model call starts. ``started``: ``seq`` of the event ``llm.started``."""

    def model_call_ended(self, query: Query, outcome: AssistantMessage | BaseException) -> None:
        """Called with the answer of a model call, or with the exception that ended the call."""

    def tool_call_began(self, call: CurrentCall, made: ToolCall, tool: ToolBase | None) -> None:
        """Called when a tool call starts. ``tool``: ``None`` if the agent has no such tool."""

    def tool_call_ended(
        self, call: CurrentCall, tool: ToolBase | None, outcome: ToolResult | BaseException
    ) -> None:
        """Called with the result of a tool call, or with the exception that ended the call."""

    def ended(self, end: End) -> None:
        """Called after the run's end was stored."""

    def closed(self) -> None:
        """Called when the attempt ends. The run may continue in a later attempt."""


class RunEpisode(RunObserver):
    """Observer that builds the run's episode from all events of the log."""

    def __init__(self, recorder: EpisodeRecorder) -> None:
        self.recorder = recorder

    def earlier_events(self, events: Sequence[Event]) -> None:
        for event in events:
            self.recorder.observe(event.type, event.task_id, event.agent, event.data)

    def event(self, event_type: str, task_id: UUID | None, agent: str | None, data: Data) -> None:
        self.recorder.observe(event_type, task_id, agent, data)


@dataclass(slots=True)
class _OpenStep:
    """The open step: all events and rows since the last commit.

    Attributes:
        binding: true if an external action may depend on the step's events.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    tasks: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    interrupts: list[dict[str, Any]] = field(default_factory=list)
    publications: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    binding: bool = False

    def before(self, end: tuple[int, int]) -> "_OpenStep":
        events, publications = self.events[: end[0]], self.publications[: end[1]]
        return replace(self, events=events, publications=publications, outcome=None)

    def after(self, end: tuple[int, int]) -> "_OpenStep":
        return _OpenStep(self.events[end[0] :], publications=self.publications[end[1] :])

    def without_episode(self, why: str) -> "_OpenStep":
        """Return the step that ends the run, with a warning instead of the episode."""
        data = WarningData(code=EPISODE_NOT_STORED, message=f"its episode was not stored: {why}")
        warning = {"type": EventType.WARNING, "data": data}
        events = [e | warning if e["type"] is EventType.EPISODE_STORED else e for e in self.events]
        return replace(self, events=events, outcome={**(self.outcome or {}), "episode": None})


class Journal:
    """Writer of a run's log during one attempt. Only the worker of this attempt may write.

    Args:
        episode: builds the run's episode at the run's end; ``None``: no episode is stored.
        writer: stores the steps of all runs of this worker.
        wake: function that is called after each commit.
        known: removes secrets from texts before they are stored.

    Attributes:
        replay: what earlier attempts recorded.
        observers: observers of the run, including the episode.
        is_replayed: true if ``replay`` contains all events of earlier attempts.
        spent: usage of this attempt, by (agent, model, is_own). ``is_own``: the model's server is
            the tenant's own.
        first_token_ms: milliseconds from a call to the answer's first token, of the last 1,000
            answers, by the same keys.
        finishing: true if the run's end is stored, or is being stored.
        others_due: false if the tenant had no more due runs when this run ended.
    """

    def __init__(
        self,
        writer: StepWriter,
        run: ClaimedRun,
        *,
        episode: RunEpisode | None = None,
        wake: Callable[[UUID], None],
        known: Redactor = Redactor(()),
    ) -> None:
        self.run_id = run.run_id
        self.attempt = run.attempt
        self.replay = RunReplay()
        self.spent: dict[tuple[str, str, bool], Usage] = {}
        self.first_token_ms: defaultdict[tuple[str, str, bool], deque[int]] = defaultdict(
            lambda: deque(maxlen=1000)
        )
        self._writer = writer
        self.tenant_id = run.tenant_id
        self._wake = wake
        self._session = run.session_id
        self._has_checks = run.has_checks
        self.is_judged = False  # set at the run's end: true if checks judge the run or its parts
        self.known = known
        self._began = monotonic() - run.elapsed_s
        self.episode = episode
        self.observers: list[RunObserver] = [] if episode is None else [episode]
        self._claimed = run.last_seq
        self.carried_seq = run.carried_seq
        self._has_messages = run.messages > 0
        self.is_replayed = not self.has_earlier_steps
        self._stored = run.last_seq
        self._in_flight = 0
        self._writing = asyncio.Lock()
        self._commit_is_due = False
        self._background: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self.finishing = False
        self.others_due = True
        self._step = _OpenStep()
        self._end: tuple[int, int] | None = None

    def add(
        self,
        event_type: EventType,
        data: Data,
        *,
        task_id: UUID | None = None,
        parent_task_id: UUID | None = None,
        agent: str | None = None,
        depth: int | None = None,
    ) -> int:
        """Add an event to the step, unless the log has the event. Return the event's ``seq``."""
        seqs = self.replay.seen
        if seqs and (seq := seqs.get(key_of(event_type, task_id, data))):
            return seq
        if event_type not in _STARTS:
            self._step.binding = True
        self._step.events.append(
            {
                "type": event_type,
                "task_id": task_id,
                "parent_task_id": parent_task_id,
                "agent": agent,
                "depth": depth,
                "data": data,
            }
        )
        for observer in self.observers:
            observer.event(event_type, task_id, agent, data)
        if not self._commit_is_due:
            self._commit_is_due = True
            self._writer.commit_later(self._commit_soon)
        return self._stored + self._in_flight + len(self._step.events)

    @property
    def has_earlier_steps(self) -> bool:
        """True if the log has events from before this attempt, such as copied steps or messages."""
        return self.attempt > 1 or self.carried_seq > 0 or self._has_messages

    def resume(self, replay: RunReplay, events: Sequence[Event]) -> None:
        """Continue the log after the events that earlier attempts recorded."""
        self.replay, self.is_replayed = replay, True
        for observer in self.observers:
            observer.earlier_events(events)

    def is_new(self, seq: int) -> bool:
        """Return true if this attempt wrote the event, and therefore must change the task's row."""
        return seq > self._claimed

    def is_stored(self, seq: int) -> bool:
        """Return true if the database has stored the event with this ``seq``."""
        return seq <= self._stored

    def task(self, task_id: UUID, **fields: Any) -> None:
        """Set fields of a task's row with the current step. Other fields do not change.

        Args:
            fields: new values, always including ``parent_id``, ``agent``, ``depth`` and ``status``.
        """
        row = self._step.tasks.setdefault(task_id, {"id": task_id})
        if row.get("status") not in (None, RunStatus.QUEUED, RunStatus.CANCELLED):
            row["began"] = True  # a later status in this step may hide that the task was running
        row.update(fields)

    def spend(
        self, agent: str, model: str, usage: Usage, first_token_ms: int | None = None
    ) -> None:
        """Add a model call's usage to ``spent``, and its ``first_token_ms``."""
        key = agent, model, usage.is_own
        so_far = self.spent.get(key)
        self.spent[key] = usage if so_far is None else so_far + usage
        if first_token_ms is not None:
            self.first_token_ms[key].append(first_token_ms)

    def interrupt(self, **fields: Any) -> None:
        self._step.interrupts.append(fields)

    def publication(self, **fields: Any) -> None:
        """Store a publication in the run's session with the current step."""
        self._step.publications.append(fields)

    def hold(self) -> None:
        """Store all later events only together with the run's end.

        If an unread message prevents the run's end, these events are dropped.
        """
        self._end = len(self._step.events), len(self._step.publications)

    async def commit_if_binding(self) -> None:
        """Commit the step if an action may depend on its events. See :meth:`commit` for errors."""
        if self._step.binding or self._writing.locked() or self._failure is not None:
            await self.commit()

    async def commit(self) -> None:
        """Store all events and rows of the current step.

        Raises:
            FencedError: this worker lost the run, and the step is not stored.
            DatabaseAwayError: the database was away for too long.
        """
        async with self._writing:
            if self._failure is not None:
                raise self._failure
            self._cancel_commit()
            if not (self._step.events if self._end is None or self._step.outcome else self._end[0]):
                return
            writing = asyncio.ensure_future(self._append())
            try:
                await asyncio.shield(writing)
            finally:
                while not writing.done():
                    # Even a cancelled call waits, because only the database's answer says if the
                    # log has the step.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([writing])
                writing.exception()  # retrieve the error, so that asyncio does not log the error
                self._wake(self.run_id)

    async def _append(self) -> None:
        open_step, end = self._step, self._end
        self._step = _OpenStep()
        if end is not None and open_step.outcome is None:
            open_step, self._step, self._end = open_step.before(end), open_step.after(end), (0, 0)
        self._in_flight = len(open_step.events)
        try:
            step = Step.of(
                self.tenant_id,
                self.run_id,
                attempt=self.attempt,
                after=self._stored,
                events=open_step.events,
                tasks=list(open_step.tasks.values()),
                interrupts=open_step.interrupts,
                session=self._session,
                publications=open_step.publications,
                outcome=open_step.outcome,
                known=self.known,
            )
            others_due = await self._writer.store(step)
        except PendingRequestError:
            self._step, self._end = open_step.before(end or (0, 0)), None
            self._in_flight = 0
            raise
        except Exception as error:
            self._failure = error
            raise
        self._stored += self._in_flight
        self._in_flight = 0
        if step.outcome is not None:
            self.others_due = others_due

    def _commit_soon(self) -> None:
        self._commit_is_due = False
        self._background = asyncio.ensure_future(self._commit_quietly())

    def _cancel_commit(self) -> None:
        if self._commit_is_due:
            self._commit_is_due = False
            self._writer.committed(self._commit_soon)

    async def _commit_quietly(self) -> None:
        with contextlib.suppress(Exception):  # the next commit raises this error again
            await self.commit()

    async def close(self) -> None:
        """Stop the background commit. Uncommitted events are dropped."""
        self._cancel_commit()
        if self._background is not None:
            await asyncio.gather(self._background, return_exceptions=True)

    async def finish(self, end: End) -> None:
        """Store the final event and the run's end together with the rest of the current step.

        If the database refused an earlier step with a lasting error, drop the step, so that the run
        can end.

        Raises:
            PendingRequestError: the run has an unread message, or a client requested its
                cancellation. The end was not stored.
        """
        self.finishing = True
        if isinstance(self._failure, asyncpg.PostgresError) and not is_transient(self._failure):
            self._failure, self._in_flight = None, 0
            self._step, self._end = _OpenStep(), None
        usage = None if end.usage is None else end.usage.to_dict()
        data = RunEndedData(stop_reason=end.stop_reason, usage=usage)
        if end.error is not None:
            data["error"] = end.error
        if end.answer_seq is not None:
            data["answer_seq"] = end.answer_seq
        if end.output_json is not None:
            data["output_json"] = end.output_json
        episode = None if self.episode is None else self._episode_at(end, self.episode)
        if episode is not None:
            about = EpisodeStoredData(episode_id=episode["id"], outcome=episode["outcome"])
            self.add(EventType.EPISODE_STORED, about)
        self.add(FINAL_EVENT[end.status], data)
        # Set the outcome now: a waiting commit may store the final event, which needs the outcome.
        self._step.outcome = {
            "episode": episode,
            "messages": end.messages,
            **({"files": end.files} if end.files else {}),
            "status": end.status,
            "output": end.output,
            "output_json": end.output_json,
            "stop_reason": end.stop_reason,
            "error": end.error,
            "usage": usage,
            "turn": end.turn,
            **self._checks(end),
            "spent": self._spending(),
        }
        step = self._step
        try:
            await self.commit()
        except asyncpg.PostgresError as error:
            if episode is None or is_transient(error):
                raise
            # The episode may have caused the error. The run must end even without an episode.
            self._failure, self._in_flight, self._end = None, 0, None
            self._step = step.without_episode(str(error))
            await self.commit()

    def _spending(self) -> list[dict[str, Any]]:
        return [
            {
                "agent": agent,
                "model": model,
                "own": is_own,
                **usage.to_dict(),
                "first_token_ms": self.first_token_ms.get((agent, model, is_own)),
            }
            for (agent, model, is_own), usage in self.spent.items()
        ]

    def _checks(self, end: End) -> dict[str, object]:
        """Return, for the outcome, which checks must judge the run and its parts."""
        is_checked = self._has_checks and end.status is RunStatus.COMPLETED
        parts = list[dict[str, str]]()
        if self.episode is not None and end.status is not RunStatus.CANCELLED:
            parts = self.episode.recorder.part_checks
        self.is_judged = is_checked or bool(parts)
        return {"is_checked": is_checked, **({"part_checks": parts} if parts else {})}

    def _episode_at(self, end: End, episode: RunEpisode) -> dict[str, Any] | None:
        """Build the run's episode; ``None`` after an error, because the run must end anyway."""
        try:
            return episode.recorder.episode(
                end.status,
                output=end.output,
                stop_reason=end.stop_reason,
                error=end.error,
                duration_s=monotonic() - self._began,
            )
        except Exception as error:
            logger.exception("run.episode_failed", run_id=str(self.run_id))
            message = f"its episode was not stored: {type(error).__name__}"
            self.add(EventType.WARNING, WarningData(code=EPISODE_NOT_STORED, message=message))
            return None


# Tasks

T = TypeVar("T")

_OF_TRY = (EventType.AGENT_STARTED, EventType.AGENT_COMPLETED, EventType.AGENT_FAILED)
"""Types of events that each try of a task writes."""

CANCELLED = Failure(code="cancelled", message="somebody cancelled this task")


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Position of a task in its run, as the task's row and the task's events have it.

    Attributes:
        task_id: the task's id; ``None`` for the root, which has no row.
        parent_id: id of the parent task; ``None`` for the root and for the root's tasks.
        agent: the agent's name in the log; empty for a graph's node that is no agent.
        depth: number of tasks above the task; ``None`` for the root.
    """

    task_id: UUID | None
    parent_id: UUID | None
    agent: str
    depth: int | None


def row_change(event_type: str, data: Data, seq: int) -> dict[str, Any]:
    """Return the fields of a task's row that an event sets. Most events set no fields. Pure.

    Args:
        seq: ``seq`` of the event.
    """
    match event_type:
        case EventType.AGENT_STARTED:
            return {"status": RunStatus.RUNNING, "began": True}
        case EventType.AGENT_WAITING:
            return {"status": RunStatus.WAITING}
        case EventType.AGENT_RESUMED:
            return {"status": RunStatus.RUNNING}
        case EventType.AGENT_COMPLETED:
            return {"status": RunStatus.COMPLETED, "answer_seq": seq}
        case EventType.AGENT_FAILED:
            failed: AgentFailedData = data
            is_cancelled = failed["error"]["code"] == CANCELLED["code"]
            status = RunStatus.CANCELLED if is_cancelled else RunStatus.FAILED
            return {"status": status, "error": failed["error"], "usage": failed.get("usage")}
        case EventType.SUBAGENT_DISPATCHED:
            task: SubagentDispatchedData = data
            return {
                "status": SubagentStatus.QUEUED,
                "priority": task["priority"],
                "timeout_ms": task["timeout_ms"],
                "dispatch_seq": seq,
                "mode": "async",
                "attempt": 1,
                "metadata": task["metadata"] or None,
            }
        case EventType.SUBAGENT_DEQUEUED | EventType.SUBAGENT_RESUMED:
            begins = data["attempt"] == 1  # only the first attempt sets the row's timeout
            fields = {"timeout_ms": data["timeout_ms"]} if begins else {}
            return {"status": SubagentStatus.QUEUED, "attempt": data["attempt"], **fields}
        case EventType.SUBAGENT_RETRIED:  # the failure did not end the task
            return {"status": SubagentStatus.RUNNING, "error": None, "usage": None}
        case EventType.SUBAGENT_STATUS_CHANGED:
            began = {"began": True} if data["to"] == SubagentStatus.RUNNING else {}
            return {"status": data["to"], **began}
        case EventType.SUBAGENT_COMPLETED:
            completed: SubagentCompletedData = data
            at = completed.get("answer_seq")
            end = {"answer_seq": seq if at is None else at, "duration_ms": completed["duration_ms"]}
            return {"status": SubagentStatus.COMPLETED, **end}
        case kind if kind in ENDS:
            error, end_status = EventError.of(data)._asdict(), ENDS[EventType(kind)]
            return {"status": end_status, "error": error, "duration_ms": data["duration_ms"]}
    return {}


def is_answered(query: Query, response: AssistantResponse) -> bool:
    """Check if the query's caller may treat the response as an answer. Pure.

    An agent that reaches its iteration limit may return a text. For a run, a graph's sink and an
    asynchronous task, this text is an answer. For a synchronous caller, and for agents that depend
    on the agent's node, this text is a failure.
    """
    if response.error is None or not response.is_answer:
        return response.error is None
    if query.tool_call is not None:
        return False
    graph = query.agent.memory_graph
    is_node = query.parent is None and bool(query.path)
    return not is_node or graph is None or not graph.successors(query.agent.agent_id or "")


class Tasks:
    """The tasks of one run. Every query except the root agent's query is a task.

    Args:
        root: id of this run or of the run that it repeats; namespace of the tasks' ids.
        cancelled: ids of the tasks that a client cancelled.

    Attributes:
        open: queries under way.
        levels: for each path that is no task (the root, or a turn or element of a node), the path
            of the task that contains it.
    """

    def __init__(self, journal: Journal, root: UUID, cancelled: Collection[UUID] = ()) -> None:
        self.journal = journal
        self.root = root
        self.cancelled = set(cancelled)
        self.open: dict[Query, None] = {}
        self.levels: dict[Path, Path] = {(): ()}
        self._ids: dict[Path, UUID | None] = {(): None}
        self._places: dict[Path, TaskPlace] = {}
        self._executions: dict[UUID, asyncio.Future[Any]] = {}

    def id_of(self, query: Query) -> UUID | None:
        """Return a query's task id: UUIDv5 of (parent, call, index); ``None`` for the root."""
        return self.id_at(query.path)

    def id_at(self, path: Path) -> UUID | None:
        if path not in self._ids:
            self._ids[path] = task_id_at(self.id_at(path[:-1]) or self.root, path[-1:])
        return self._ids[path]

    def place_at(self, path: Path, agent: str) -> TaskPlace:
        place = self._places.get(path)
        if place is None or place.agent != agent:
            above = self._above(path) if path else ()
            depth = self._depth_of(path) if path else None
            place = TaskPlace(self.id_at(path), self.id_at(above), agent, depth)
            self._places[path] = place
        return place

    def _above(self, path: Path) -> Path:
        return self.levels.get(path[:-1], path[:-1])

    def _depth_of(self, path: Path) -> int:
        above = self._above(path)
        return self._depth_of(above) + 1 if above else 0

    def add(self, query: Query, event_type: EventType, data: Data) -> int:
        """Write an event of a query, and change the task's row. Return the event's ``seq``."""
        if query.tries > 1 and event_type in _OF_TRY:
            data = {**data, "try": query.tries}
        return self.write(self.place_at(query.path, name_of(query.agent)), event_type, data)

    def write(self, place: TaskPlace, event_type: EventType, data: Data) -> int:
        """Write an event of a task, and change the task's row. Return the event's ``seq``.

        For a node that is no agent, only the event is written, because the node has no row.
        """
        seq = self.journal.add(
            event_type,
            data,
            task_id=place.task_id,
            parent_task_id=place.parent_id,
            agent=place.agent or None,
            depth=place.depth,
        )
        if place.task_id is None or not place.agent or not self.journal.is_new(seq):
            return seq
        if change := row_change(event_type, data, seq):
            self.journal.task(
                place.task_id,
                parent_id=place.parent_id,
                agent=place.agent,
                depth=place.depth,
                **change,
            )
        return seq

    async def cancellable(
        self, path: Path, agent: AgentState, execute: Callable[[], Awaitable[T]]
    ) -> T | None:
        """Run the task at ``path``. Return ``None`` if the task was cancelled."""
        task_id = self.id_at(path)
        assert task_id is not None
        if task_id not in self.cancelled:
            execution = asyncio.ensure_future(execute())
            self._executions[task_id] = execution
            try:
                return await execution
            except asyncio.CancelledError:
                me = asyncio.current_task()
                if task_id not in self.cancelled or (me is not None and me.cancelling()):
                    raise
            finally:
                del self._executions[task_id]
        if not self.stopped(path, CANCELLED):  # cancelled before this worker started the task
            self._write_stopped(path, agent, AgentUsage(), CANCELLED)
        return None

    def cancel(self, task_id: UUID) -> None:
        """Stop a task and all tasks below it. The task's parent gets an error and continues."""
        if task_id not in self.cancelled:
            self.cancelled.add(task_id)
            if execution := self._executions.get(task_id):
                execution.cancel()

    def stopped(self, path: Path, error: Failure) -> bool:
        """Write the ends of a stopped task and its open sub-tasks. Return false if none is open."""
        below = [query for query in self.open if query.path[: len(path)] == path]
        for query in sorted(below, key=lambda query: -query.depth):
            why = error if query.path == path else CANCELLED
            if name_of(query.agent):  # no ``agent.failed`` event for a node that is no agent
                self._write_stopped(query.path, query.agent, query.usage, why, query.tries)
            del self.open[query]
        return bool(below)

    def _write_stopped(
        self, path: Path, agent: AgentState, spent: AgentUsage, error: Failure, tries: int = 1
    ) -> None:
        data = AgentFailedData(error=error, usage=spent.to_dict())
        if tries > 1:
            data["try"] = tries
        self.write(self.place_at(path, name_of(agent)), EventType.AGENT_FAILED, data)


def name_of(agent: AgentState) -> str:
    """Return an agent's name in the log; ``""`` for a graph's node that is no agent."""
    return agent.agent_name
