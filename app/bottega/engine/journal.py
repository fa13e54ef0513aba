"""The journal of a run under way: nothing may depend on an event that is not stored.

A step is all events since the last commit, stored by one statement. Steps are committed

- before anything outside happens because of them (a model call after an answer or a result, a tool
  that is no sub-agent),
- at the end of the run,
- and after ``SHOW_AFTER_S`` at the latest, so that people see it.

``StepWriter`` writes the steps of all runs of a worker: those that are ready together share a
transaction. A group is stored by one call of SQL's ``append_steps``, which fences each step by
itself. A step that cannot be stored with others is sent alone, so that it neither fails nor delays
them.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import structlog

from bottega import metrics
from bottega.agents.messages import AgentUsage, Usage
from bottega.clock import monotonic
from bottega.db.failures import is_transient, persist
from bottega.engine.claim import ClaimedRun
from bottega.engine.replay import Replay, key_of
from bottega.errors import PendingRequestError
from bottega.events import log
from bottega.events.log import Step
from bottega.events.types import (
    FINAL_EVENT,
    Event,
    EventError,
    EventType,
    RunStatus,
    ToolError,
    warning,
)
from bottega.memory.learning.episode_recorder import EpisodeRecorder
from bottega.redaction import Redactor

SHOW_AFTER_S = 0.08
"""Longest time for which an event waits for the next step, so that people see it."""

_GROUP_STEPS = 50
_GROUP_CHARACTERS = 1024 * 1024
_PATIENCE_S = 0.005
"""Wait for a call under way before a second one begins."""
_CALLS = 2
_ALONE = 1


class _Waiting(NamedTuple):
    step: Step
    stored: "asyncio.Future[bool]"


class StepWriter:
    """The writer of steps that all runs of a worker share."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._waiting: deque[_Waiting] = deque()
        self._calls = 0
        self._begin_at: asyncio.Handle | None = None
        self._alone = asyncio.Semaphore(_ALONE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unshown: dict[Callable[[], None], float] = {}
        self._show_at: asyncio.TimerHandle | None = None

    async def store(self, step: Step) -> bool:
        """Store a step, in a group if others are ready too. At most one of each run at a time.

        Returns:
            Whether due runs of its tenant may be claimed now, since it ended one.

        Raises:
            FencedError: the run belongs to a newer attempt, or is over.
            PendingRequestError: the step completes a run for which a message or its
                cancellation waits.
            DatabaseAwayError: the database was away for too long.
        """
        loop, began = asyncio.get_running_loop(), monotonic()
        waiting = _Waiting(step, loop.create_future())
        self._waiting.append(waiting)
        if self._begin_at is None and self._calls < _CALLS:
            if self._calls == 0:
                self._begin_at = loop.call_soon(self._begin)
            else:
                self._begin_at = loop.call_later(_PATIENCE_S, self._begin)
        others_due = await waiting.stored
        metrics.step_duration.observe(monotonic() - began)
        return others_due

    def _begin(self) -> None:
        """Send the next group."""
        self._begin_at = None
        if not self._waiting:
            return
        group: list[_Waiting] = []
        characters = 0
        while self._waiting and len(group) < _GROUP_STEPS and characters < _GROUP_CHARACTERS:
            group.append(self._waiting.popleft())
            characters += len(group[-1].step.events)
        self._calls += 1
        self._start(self._send(group))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, group: list[_Waiting]) -> None:
        try:
            answers = await log.append_steps(self._pool, [each.step for each in group])
        except Exception as error:
            if is_transient(error) and not isinstance(error, asyncpg.LockNotAvailableError):
                self._start(self._send_again(group))
            else:
                self._each_alone(group)
        else:
            self._answer(group, answers)
        finally:
            self._calls -= 1
            if self._begin_at is not None:
                self._begin_at.cancel()
            self._begin()

    async def _send_again(self, group: list[_Waiting]) -> None:
        """Repeat a group while the database is away: it is unknown if it was stored."""
        steps = [each.step for each in group]

        async def send() -> list[str]:
            try:
                return await log.append_steps(self._pool, steps)
            except asyncpg.LockNotAvailableError:
                return ["busy"] * len(steps)

        try:
            answers = await persist(send)
        except Exception:
            self._each_alone(group)
        else:
            self._answer(group, answers)

    def _answer(self, group: list[_Waiting], answers: list[str]) -> None:
        for each, answer in zip(group, answers, strict=True):
            if answer == "busy":
                self._each_alone([each])
            elif not each.stored.done():
                if answer in ("refused", "pending"):
                    each.stored.set_exception(log.refusal(each.step, answer))
                else:
                    each.stored.set_result(answer != "stored")

    def _each_alone(self, group: list[_Waiting]) -> None:
        for each in group:
            self._start(self._send_alone(each))

    async def _send_alone(self, waiting: _Waiting) -> None:
        try:
            others_due = await log.append_step(self._pool, waiting.step, self._alone)
        except Exception as error:
            if not waiting.stored.done():
                waiting.stored.set_exception(error)
        else:
            if not waiting.stored.done():
                waiting.stored.set_result(others_due)

    def show_later(self, show: Callable[[], None]) -> None:
        """Call ``show`` within :data:`SHOW_AFTER_S`, together with those of other runs."""
        self._unshown[show] = monotonic()
        if self._show_at is None:
            self._show_at = asyncio.get_running_loop().call_later(SHOW_AFTER_S, self._show)

    def shown(self, show: Callable[[], None]) -> None:
        """Do not call ``show`` any more."""
        self._unshown.pop(show, None)

    def _show(self) -> None:
        now = monotonic()
        due = [show for show, since in self._unshown.items() if now - since > SHOW_AFTER_S / 2]
        for show in due:
            del self._unshown[show]
            show()
        self._show_at = None
        if self._unshown:
            oldest = next(iter(self._unshown.values()))
            loop = asyncio.get_running_loop()
            self._show_at = loop.call_later(oldest + SHOW_AFTER_S - now, self._show)


logger = structlog.get_logger(__name__)

EPISODE_NOT_STORED = "episode_not_stored"
"""Code of the warning in place of ``episode.stored``."""

_STARTS = frozenset(
    (
        EventType.AGENT_STARTED,
        EventType.LLM_STARTED,
        EventType.MEMORY_INJECTED,
        EventType.CONTEXT_RECALLED,
        EventType.ANSWER_REJECTED,
        EventType.WARNING,
    )
)
"""Events that need no early commit: a resumed run writes them again."""
_FAILED_BESIDE = (EventType.SUBAGENT_FAILED, EventType.SUBAGENT_TIMEOUT)


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run.

    Attributes:
        output: the answer, complete or not.
        output_json: the answer, parsed, if it has a schema.
        answer_seq: ``seq`` of the event that holds the answer.
        turn: the run's turn of its conversation; ``None``: it is none.
        messages: number of those sent to the run that its agent got.
        files: of a linked run: what it wrote, by path.
    """

    status: RunStatus
    output: Any = None
    output_json: Any = None
    stop_reason: str | None = None
    error: dict[str, str] | None = None
    usage: AgentUsage | None = None
    answer_seq: int | None = None
    turn: dict[str, Any] | None = None
    messages: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _OpenStep:
    """Everything written since the last commit.

    Attributes:
        binding: true if something may depend on its events.
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
        """Return a step that ends a run, with a warning in place of its episode."""
        data = warning(EPISODE_NOT_STORED, f"its episode was not stored: {why}")
        told = {"type": EventType.WARNING, "data": data}
        events = [e | told if e["type"] is EventType.EPISODE_STORED else e for e in self.events]
        return replace(self, events=events, outcome={**(self.outcome or {}), "episode": None})


class Journal:
    """The open end of a run's log, held by the one worker that may write to it.

    Args:
        episode_recorder: builds the run's episode at its end; ``None``: no episode is stored.
        writer: stores the steps of all runs of this worker.
        wake: called after each commit.
        known: redacts secrets before they are stored.

    Attributes:
        replay: the record of earlier attempts; set before the run resumes.
        spent: by this attempt, by agent, model, and whether the server is the tenant's own.
        broken: names and errors of asynchronous tasks that failed and were not yet handled.
        finishing: whether the run's end is being stored, or is stored.
        others_due: false if the run has ended, and its tenant had no due runs then.
    """

    def __init__(
        self,
        writer: StepWriter,
        run: ClaimedRun,
        *,
        episode_recorder: EpisodeRecorder | None = None,
        wake: Callable[[UUID], None],
        known: Redactor = Redactor(()),
    ) -> None:
        self.run_id = run.run_id
        self.attempt = run.attempt
        self.replay = Replay()
        self.spent: dict[tuple[str, str, bool], Usage] = {}
        self.broken: list[tuple[str, ToolError]] = []
        self._writer = writer
        self.tenant_id = run.tenant_id
        self._wake = wake
        self._session = run.session_id
        self._has_checks = run.has_checks
        self.known = known
        self._began = monotonic() - run.elapsed_s
        self.episode_recorder = episode_recorder
        self._heard_earlier_steps = False
        self._claimed = run.last_seq
        self.carried_seq = run.carried_seq
        self._has_messages = run.messages > 0
        self._stored = run.last_seq
        self._in_flight = 0
        self._writing = asyncio.Lock()
        self._unshown = False
        self._shower: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self.finishing = False
        self.others_due = True
        self._step = _OpenStep()
        self._end: tuple[int, int] | None = None

    def add(
        self,
        event_type: EventType,
        data: dict[str, Any],
        *,
        task_id: UUID | None = None,
        parent_task_id: UUID | None = None,
        agent: str | None = None,
        depth: int | None = None,
    ) -> int:
        """Add an event to the current step; return its ``seq``, old or new."""
        seen = self.replay.seen
        if seen and (known := seen.get(key_of(event_type, task_id, data))):
            return known
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
        if event_type in _FAILED_BESIDE:
            code, message = EventError.of(data)
            self.broken.append((agent or "", ToolError(code or "error", message or "")))
        if self.episode_recorder is not None:
            self.episode_recorder.hear(event_type, task_id, agent, data)
        if not self._unshown:
            self._unshown = True
            self._writer.show_later(self._show)
        return self._stored + self._in_flight + len(self._step.events)

    @property
    def has_earlier_steps(self) -> bool:
        """True if the log holds steps from before this attempt."""
        return self.attempt > 1 or self.carried_seq > 0 or self._has_messages

    @property
    def lacks_earlier_steps(self) -> bool:
        """True if the run's episode still lacks the steps of earlier attempts."""
        return (
            self.episode_recorder is not None
            and self.has_earlier_steps
            and not self._heard_earlier_steps
        )

    def add_earlier_steps(self, events: Iterable[Event]) -> None:
        """Add the steps of earlier attempts to the run's episode, once."""
        if self.episode_recorder is not None and self.lacks_earlier_steps:
            self._heard_earlier_steps = True
            for event in events:
                self.episode_recorder.hear(event.type, event.task_id, event.agent, event.data)

    def is_new(self, seq: int) -> bool:
        """Return true if the state changes of an event are still to be made."""
        return seq > self._claimed

    def is_stored(self, seq: int) -> bool:
        """Return true if an event is stored, so that subscribers can see it."""
        return seq <= self._stored

    def task(self, task_id: UUID, **fields: Any) -> None:
        """Set fields of a task's row with the current step; other fields stay.

        Args:
            fields: always with ``parent_id``, ``agent``, ``depth`` and ``status``.
        """
        row = self._step.tasks.setdefault(task_id, {"id": task_id})
        if row.get("status") not in (None, RunStatus.QUEUED, RunStatus.CANCELLED):
            row["began"] = True  # the row keeps only the step's last status
        row.update(fields)

    def spend(self, agent: str, model: str, usage: Usage) -> None:
        """Count the usage of a model call of this attempt."""
        key = agent, model, usage.is_own
        so_far = self.spent.get(key)
        self.spent[key] = usage if so_far is None else so_far + usage

    def interrupt(self, **fields: Any) -> None:
        """Store a new interrupt with the current step."""
        self._step.interrupts.append(fields)

    def publication(self, **fields: Any) -> None:
        """Store a publication in the run's session with the current step."""
        self._step.publications.append(fields)

    def hold(self) -> None:
        """Keep what follows until it is stored with the run's end.

        It is dropped if the run must read a message first.
        """
        self._end = len(self._step.events), len(self._step.publications)

    async def settle(self) -> None:
        """Commit, unless the step holds only starts, which may wait. Raises as :meth:`commit`."""
        if self._step.binding or self._writing.locked() or self._failure is not None:
            await self.commit()

    async def commit(self) -> None:
        """Store all that was written so far.

        Raises:
            FencedError: this worker lost the run; its work no longer counts.
            DatabaseAwayError: the database was away for too long.
        """
        async with self._writing:
            if self._failure is not None:
                raise self._failure
            self._stop_showing()
            if not (self._step.events if self._end is None or self._step.outcome else self._end[0]):
                return
            writing = asyncio.ensure_future(self._append())
            try:
                await asyncio.shield(writing)
            finally:
                while not writing.done():
                    # Cancelled: wait anyway, since the answer decides where the log ends.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([writing])
                writing.exception()  # retrieved, in case the caller was cancelled
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

    def _show(self) -> None:
        """Store the step in the background, because it has waited long enough."""
        self._unshown = False
        self._shower = asyncio.ensure_future(self._show_now())

    def _stop_showing(self) -> None:
        if self._unshown:
            self._unshown = False
            self._writer.shown(self._show)

    async def _show_now(self) -> None:
        with contextlib.suppress(Exception):  # the next commit raises it
            await self.commit()

    async def close(self) -> None:
        """Stop the background commit. Uncommitted events are dropped."""
        self._stop_showing()
        if self._shower is not None:
            await asyncio.gather(self._shower, return_exceptions=True)

    async def finish(self, end: End) -> None:
        """Write the final event and the run's end, in one step with all that is still open.

        A step that the database refused for good is dropped, so that the run can still end.

        Raises:
            PendingRequestError: a message or its cancellation waits; nothing of its end is stored.
        """
        self.finishing = True
        if isinstance(self._failure, asyncpg.PostgresError) and not is_transient(self._failure):
            self._failure, self._in_flight = None, 0
            self._step, self._end = _OpenStep(), None
        usage = None if end.usage is None else end.usage.to_dict()
        data: dict[str, Any] = {"stop_reason": end.stop_reason, "usage": usage}
        if end.error is not None:
            data["error"] = end.error
        if end.answer_seq is not None:
            data["answer_seq"] = end.answer_seq
        if end.output_json is not None:
            data["output_json"] = end.output_json
        episode = self._episode(end)
        if episode is not None:
            about = {"episode_id": episode["id"], "outcome": episode["outcome"]}
            self.add(EventType.EPISODE_STORED, about)
        self.add(FINAL_EVENT[end.status], data)
        # Whichever commit stores the final event stores the outcome: another one may be waiting.
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
            "is_checked": self.checks(end),
            "spent": [
                {"agent": agent, "model": model, "own": is_own, **usage.to_dict()}
                for (agent, model, is_own), usage in self.spent.items()
            ],
        }
        step = self._step
        try:
            await self.commit()
        except asyncpg.PostgresError as error:
            if episode is None or is_transient(error):
                raise
            # An episode never keeps a run from ending.
            self._failure, self._in_flight, self._end = None, 0, None
            self._step = step.without_episode(str(error))
            await self.commit()

    def checks(self, end: End) -> bool:
        """Return true if the end orders the root agent's success checks."""
        return self._has_checks and end.status is RunStatus.COMPLETED

    def _episode(self, end: End) -> dict[str, Any] | None:
        """Return the run's episode. A bug in it must not keep the run from ending."""
        if self.episode_recorder is None:
            return None
        try:
            return self.episode_recorder.episode(
                end.status,
                output=end.output,
                stop_reason=end.stop_reason,
                error=end.error,
                duration_s=monotonic() - self._began,
            )
        except Exception as error:
            logger.exception("run.untold", run_id=str(self.run_id))
            message = f"its episode was not stored: {type(error).__name__}"
            self.add(EventType.WARNING, warning(EPISODE_NOT_STORED, message))
            return None
