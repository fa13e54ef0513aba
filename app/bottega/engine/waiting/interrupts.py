"""The tool calls of a run that wait for people, on the worker that executes the run."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, uuid5

import asyncpg
from pydantic_core import from_json

from bottega.agents.messages import ToolCall
from bottega.agents.people.interrupts import Interrupt, Resolution
from bottega.agents.query import Query
from bottega.db.failures import persist
from bottega.engine.task_rows import Tasks, name_of
from bottega.engine.waiting.loops import Loops
from bottega.engine.waiting.tasks import WaitingTasks
from bottega.events.types import EventType
from bottega.subagents.swarm import TaskOfQuery
from bottega.subagents.waiting import people

_DECIDED = "SELECT run_id, id, decided FROM decided_interrupts($1, $2)"
_PATIENCE_S = 3.0
MOST_OF_CALL, _MOST_OF_RUN = 10, 50
"""Questions of MCP servers that reach people, of one call and of one run."""

Decided = Mapping[str, Any]
"""``status``, ``resolution`` and ``by`` of an interrupt."""


class OpenInterrupts:
    """The interrupts of one run.

    A call asks, and waits here. If nothing else of the run goes on, the run is suspended; the next
    attempt comes to the same call, and finds the decision in the log. A decision that comes while a
    worker has the run is only in the interrupt's row until the worker records it.

    Args:
        waits: called when a call has begun to wait, or goes on.

    Attributes:
        tasks: shows which tasks wait.
    """

    def __init__(self, tasks: Tasks, run_id: UUID, loops: Loops, waits: Callable[[], None]) -> None:
        self._tasks = tasks
        self._journal = tasks.journal
        self._run_id = run_id
        self._loops = loops
        self._waits = waits
        self.tasks = WaitingTasks(tasks, loops)
        self._decided: dict[UUID, Decided] = {}
        self._waiting: dict[UUID, asyncio.Event] = {}
        self._questions: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """True if a call waits here."""
        return bool(self._waiting)

    def decide(self, interrupt_id: UUID, decided: Decided) -> None:
        """Take a decision that was stored. Idempotent."""
        self._decided[interrupt_id] = decided
        if waiting := self._waiting.get(interrupt_id):
            waiting.set()

    async def decision(self, query: Query, tool_call: ToolCall, interrupt: Interrupt) -> Resolution:
        """Return what people decided on a call; ask them and wait, unless the log has it.

        Questions of MCP servers beyond the bound get no answer.
        """
        key = (self._tasks.id_of(query), query.model_calls, tool_call.id)
        kind = interrupt.kind
        number = (interrupt.number,) if interrupt.number else ()
        interrupt_id = uuid5(self._run_id, ":".join(map(str, (*key, kind, *number))))
        replay = self._journal.replay
        if known := replay.decisions.get((key, kind)):
            asked, resolution = known
            # A decision of the run that this one repeats serves only a call that has its result.
            if asked == str(interrupt_id) or key in replay.ended:
                return Resolution(resolution)
        if interrupt.server is not None and self._is_too_many(str(interrupt_id)):
            return Resolution({})
        self._ask(query, tool_call, interrupt, interrupt_id)
        decided = await self._wait(query, interrupt_id)
        about = {"kind": kind, "call": query.model_calls, "tool_call_id": tool_call.id}
        self._tasks.add(
            query,
            EventType.INTERRUPT_RESOLVED,
            {"interrupt_id": str(interrupt_id), **about, **decided},
        )
        self._waits()
        if isinstance(query.task, TaskOfQuery):
            await people.decided(query.task.swarm.registry, query.task.handle)
        return Resolution(decided["resolution"])

    def _is_too_many(self, interrupt_id: str) -> bool:
        """Check the bound of servers' questions; count this one if it is within it."""
        asked = self._journal.replay.questions | self._questions
        if interrupt_id in asked:
            return False
        if len(asked) >= _MOST_OF_RUN:
            return True
        self._questions.add(interrupt_id)
        return False

    def _ask(
        self, query: Query, tool_call: ToolCall, interrupt: Interrupt, interrupt_id: UUID
    ) -> None:
        asked = {
            "kind": interrupt.kind,
            "call": query.model_calls,
            "tool_call_id": tool_call.id,
            "tool": tool_call.name,
            "arguments": tool_call.arguments,
            "question": interrupt.question,
            "schema": interrupt.schema,
            "reason": interrupt.reason,
            "server": interrupt.server,
            "expires_s": interrupt.expires_s,
        }
        seq = self._tasks.add(
            query, EventType.INTERRUPT_CREATED, {"interrupt_id": str(interrupt_id), **asked}
        )
        if self._journal.is_new(seq):
            task_id = self._tasks.id_of(query)
            self._journal.interrupt(
                id=interrupt_id, task_id=task_id, agent=name_of(query.agent), **asked
            )

    async def _wait(self, query: Query, interrupt_id: UUID) -> Decided:
        if interrupt_id not in self._decided:
            waiting = self._waiting[interrupt_id] = asyncio.Event()
            try:
                with self._loops.asking(query, interrupt_id):
                    self._waits()
                    await waiting.wait()
            finally:
                del self._waiting[interrupt_id]
        return self._decided[interrupt_id]


async def take_decisions(
    pool: asyncpg.Pool, asking: Mapping[UUID, tuple[UUID, OpenInterrupts]]
) -> None:
    """Let runs know what was decided on their interrupts. Waits while the database is away.

    Args:
        asking: tenant and interrupts, by run.
    """
    if not asking:
        return
    wanted = [tenant for tenant, _ in asking.values()], list(asking)
    rows = await persist(lambda: pool.fetch(_DECIDED, *wanted, timeout=_PATIENCE_S))
    for row in rows:
        asking[row["run_id"]][1].decide(row["id"], from_json(row["decided"]))
