"""The journal of a run being executed: nothing follows from what is not written down.

A step is everything since the last commit, stored by one statement. Steps are committed

- before anything outside happens because of them (a model call after an answer or a result, a
  tool that is no sub-agent),
- at the end of the run,
- and after :data:`SHOW_AFTER_S` at the latest, so that people see it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import structlog

from bottega.agents.messages import AgentUsage
from bottega.clock import monotonic
from bottega.events import log
from bottega.events.types import FINAL_EVENT, Event, EventType, RunStatus
from bottega.memory.telling import Telling
from bottega.redaction import Redactor
from bottega.runs.fold import Fold, key_of

logger = structlog.get_logger(__name__)

SHOW_AFTER_S = 0.05
EPISODE_NOT_STORED = "episode_not_stored"
"""A warning in the place of ``episode.stored`` (``append_step`` in SQL too)."""

_STARTS = frozenset(
    (
        EventType.AGENT_STARTED,
        EventType.LLM_STARTED,
        EventType.MEMORY_INJECTED,
        EventType.CONTEXT_RECALLED,
        EventType.WARNING,
    )
)
"""Nothing is lost with these: who goes on without them comes to them again."""
_FAILED_BESIDE = (EventType.SUBAGENT_FAILED, EventType.SUBAGENT_TIMEOUT)


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended.

    Attributes:
        output: the answer, or what there is of one.
        answer_seq: of the event that holds the answer.
    """

    status: RunStatus
    output: Any = None
    stop_reason: str | None = None
    error: dict[str, str] | None = None
    usage: AgentUsage | None = None
    answer_seq: int | None = None


class Journal:
    """The open end of a run's log, held by the one worker that may write to it.

    Args:
        attempt, last_seq: as the claim answered them.
        carried_seq: up to here the log was carried over from the run that this one repeats.
        elapsed_s: since the run's first start.
        telling: tells the run's episode at its end; ``None``: nobody is to remember it.
        wake: called after each commit.
        known: of secrets that are not to be written down.

    Attributes:
        folded: what earlier attempts did; set before the run goes on.
        tokens: that the run paid for, in all its attempts.
        broken: names and errors of tasks that ran beside the root and failed, since somebody
            looked.
        finishing: whether the run's end is being stored, or is stored.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        tenant_id: UUID,
        run_id: UUID,
        *,
        attempt: int,
        last_seq: int,
        carried_seq: int = 0,
        elapsed_s: float = 0.0,
        telling: Telling | None = None,
        wake: Callable[[UUID], None],
        known: Redactor = Redactor(()),
    ) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.folded = Fold()
        self.tokens = 0
        self.broken: list[tuple[str, str]] = []
        self._pool = pool
        self.tenant_id = tenant_id
        self._wake = wake
        self._known = known
        self._began = monotonic() - elapsed_s
        self.telling = telling
        self._heard_past = False
        self._claimed = last_seq
        self.carried_seq = carried_seq
        self._stored = last_seq
        self._in_flight = 0
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._shower: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self.finishing = False
        self._clear()

    def _clear(self) -> None:
        self._binding = False
        self._events: list[dict[str, Any]] = []
        self._tasks: dict[UUID, dict[str, Any]] = {}
        self._publications: list[dict[str, Any]] = []

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
        """Write an event into the current step; answers its ``seq``, old or new."""
        if known := self.folded.seen.get(key_of(event_type, task_id, data)):
            return known
        if event_type not in _STARTS:
            self._binding = True
        self._events.append(
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
            self.broken.append((agent or "", str(data["error"].get("message") or "")))
        if self.telling is not None:
            self.telling.hear(event_type, task_id, agent, data)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SHOW_AFTER_S, self._show)
        return self._stored + self._in_flight + len(self._events)

    @property
    def has_past(self) -> bool:
        """Whether the log holds steps that were done before this attempt."""
        return self.attempt > 1 or self.carried_seq > 0

    @property
    def untold(self) -> bool:
        """Whether the run's episode still lacks what earlier attempts did."""
        return self.telling is not None and self.has_past and not self._heard_past

    def tell_past(self, events: Iterable[Event]) -> None:
        """Let the run's episode have what earlier attempts did."""
        if self.telling is not None and self.untold:
            self._heard_past = True
            for event in events:
                self.telling.hear(event.type, event.task_id, event.agent, event.data)

    def is_new(self, seq: int) -> bool:
        """Whether what an event changed is still to be changed."""
        return seq > self._claimed

    def is_stored(self, seq: int) -> bool:
        """Whether an event is in the log, for everybody to see."""
        return seq <= self._stored

    def task(self, task_id: UUID, **fields: Any) -> None:
        """Set fields of a task's row with the current step; what is not set stays as it is.

        Args:
            fields: ``parent_id``, ``agent``, ``depth`` and ``status`` in any case.
        """
        row = self._tasks.setdefault(task_id, {"id": task_id})
        if row.get("status") not in (None, RunStatus.QUEUED):
            row["began"] = True  # the row will only say how the step left it
        row.update(fields)

    def publication(self, **fields: Any) -> None:
        """Add to what the run's graph shows with the current step."""
        self._publications.append(fields)

    async def settle(self) -> None:
        """Return when all that was done so far is stored; what was only begun may wait.

        Raises:
            Exception: as :meth:`commit`.
        """
        if self._binding or self._writing.locked() or self._failure is not None:
            await self.commit()

    async def commit(self, outcome: dict[str, Any] | None = None) -> None:
        """Return when all that was written so far is stored.

        Raises:
            FencedError: this worker lost the run; nothing it does counts any more.
            UnavailableError, OSError, …: the database stayed away for too long.
        """
        async with self._writing:
            if self._failure is not None:
                raise self._failure
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if not self._events and outcome is None:
                return
            writing = asyncio.ensure_future(self._append(outcome))
            try:
                await asyncio.shield(writing)
            finally:
                while not writing.done():
                    # Cancelled: what the database answers still decides where the log ends.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([writing])
                writing.exception()  # seen: who was cancelled meanwhile hears nothing of it
                self._wake(self.run_id)

    async def _append(self, outcome: dict[str, Any] | None) -> None:
        events, tasks, publications = self._events, self._tasks, self._publications
        self._clear()
        self._in_flight = len(events)
        try:
            await log.append_step(
                self._pool,
                self.tenant_id,
                self.run_id,
                attempt=self.attempt,
                after=self._stored,
                events=events,
                tasks=list(tasks.values()),
                publications=publications,
                outcome=outcome,
                known=self._known,
            )
        except Exception as error:
            self._failure = error
            raise
        self._stored += len(events)
        self._in_flight = 0

    def _show(self) -> None:
        """The step waited long enough; store it beside what is going on."""
        self._timer = None
        self._shower = asyncio.ensure_future(self._show_now())

    async def _show_now(self) -> None:
        with contextlib.suppress(Exception):  # kept: the run's own next commit raises it
            await self.commit()

    async def close(self) -> None:
        """Leave nothing running. What is not committed is dropped."""
        if self._timer is not None:
            self._timer.cancel()
        if self._shower is not None:
            await asyncio.gather(self._shower, return_exceptions=True)

    async def finish(self, end: End) -> None:
        """Write the final event and the run's end, in one step with all that is still open.

        A step that the database refused for good is given up, not the run's end.
        """
        self.finishing = True
        if isinstance(self._failure, asyncpg.PostgresError) and not log.is_transient(self._failure):
            self._failure, self._in_flight = None, 0
            self._clear()
        usage = None if end.usage is None else end.usage.model_dump()
        data: dict[str, Any] = {"stop_reason": end.stop_reason, "usage": usage}
        if end.error is not None:
            data["error"] = end.error
        if end.answer_seq is not None:
            data["answer_seq"] = end.answer_seq
        episode = self._episode(end)
        if episode is not None:
            about = {"episode_id": episode["id"], "outcome": episode["outcome"]}
            self.add(EventType.EPISODE_STORED, about)
        self.add(FINAL_EVENT[end.status], data)
        await self.commit(
            {
                "episode": episode,
                "status": end.status,
                "output": end.output,
                "stop_reason": end.stop_reason,
                "error": end.error,
                "usage": usage,
                "tokens": self.tokens,
            }
        )
        if end.error is not None:
            logger.warning("run.failed", run_id=str(self.run_id), **end.error)

    def _episode(self, end: End) -> dict[str, Any] | None:
        """What is to be remembered of the run; a bug in it must not keep the run from its end."""
        if self.telling is None:
            return None
        try:
            return self.telling.episode(
                end.status,
                output=end.output,
                stop_reason=end.stop_reason,
                error=end.error,
                duration_s=monotonic() - self._began,
            )
        except Exception as error:
            logger.exception("run.untold", run_id=str(self.run_id))
            message = f"its episode was not stored: {type(error).__name__}"
            self.add(EventType.WARNING, {"code": EPISODE_NOT_STORED, "message": message})
            return None
