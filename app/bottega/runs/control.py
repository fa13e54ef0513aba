"""Requests of clients about runs under way: cancellation of a run or task, and messages.

Each is a stored request, and a notification to the run's worker.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.clock import monotonic
from bottega.db.engine import Database
from bottega.db.failures import repeated
from bottega.errors import BottegaError, ConflictError, InvalidInputError, NotFoundError
from bottega.events.listener import NotifyListener
from bottega.leased_work import WorkLoop
from bottega.tenants import audit

CHANNEL = "bottega_cancel"
_SLOW_POLL_S = 5.0
_PATIENCE_S = 3.0
_WISHES = "SELECT run_id, task_id, messages FROM run_wishes($1, $2)"


_LOCK = text("SELECT FROM runs WHERE tenant_id = :tenant AND id = :run FOR UPDATE")
_WAITS = text("""
SELECT EXISTS (SELECT FROM interrupts
    WHERE tenant_id = :tenant AND run_id = :run AND id = ANY(:calls) AND status = 'pending')
""")
_CANCEL = text("SELECT cancel_run(:tenant, :run)")
_CANCEL_TASK = text("SELECT id, was_over FROM cancel_task(:tenant, :run, :task)")


@repeated
async def request_cancel(
    database: Database, tenant_id: UUID, run_id: UUID, actor: str, *, calls: Sequence[UUID] = ()
) -> bool:
    """Store a request to cancel a run; return true if it was over already.

    Args:
        calls: do nothing unless one of these interrupts waits; empty: cancel it anyway.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    async with database.begin(tenant_id) as tx:
        if calls:
            wish = {"tenant": tenant_id, "run": run_id}
            await tx.execute(_LOCK, wish)
            if not await tx.scalar(_WAITS, wish | {"calls": calls}):
                return False
        answer = await tx.scalar(_CANCEL, {"tenant": tenant_id, "run": run_id})
        if answer is None:
            raise NotFoundError(f"there is no run {run_id}")
        if answer != "final":
            await audit.note(tx, tenant_id, actor, "run.cancel", str(run_id))
    return bool(answer == "final")


@repeated
async def request_task_cancel(
    database: Database, tenant_id: UUID, run_id: UUID, task_id: UUID, actor: str
) -> dict[UUID, bool]:
    """Store a request to cancel a task and all below it; return which were over already.

    Raises:
        NotFoundError: unknown, another run's, or another tenant's.
    """
    wish = {"tenant": tenant_id, "run": run_id, "task": task_id}
    async with database.begin(tenant_id) as tx:
        was_over = {row.id: row.was_over for row in await tx.execute(_CANCEL_TASK, wish)}
        if not was_over:
            raise NotFoundError(f"run {run_id} has no task {task_id}")
        if not was_over[task_id]:
            details = {"run_id": str(run_id)}
            await audit.note(tx, tenant_id, actor, "task.cancel", str(task_id), details)
    return was_over


class RunsHere(Protocol):
    """The runs that a worker executes."""

    def under_way(self) -> Sequence[tuple[UUID, UUID]]:
        """Return tenant and id of each."""

    def cancel(self, run_id: UUID, task_id: UUID | None = None) -> None:
        """Cancel a run, or only one task of it. Idempotent."""

    async def take_decisions(self) -> None:
        """Let the runs know what people have decided."""

    async def take_messages(self, sent: Mapping[UUID, int]) -> None:
        """Let the runs have the messages that users sent; ``sent``: their number, by run."""


class CancelWatch:
    """A worker's watch for cancelled runs, and for decisions and messages of people.

    A notification is a hint; the row decides.
    """

    def __init__(self, pool: asyncpg.Pool, listener: NotifyListener, runs: RunsHere) -> None:
        self._pool, self._runs = pool, runs
        self._noticed_at = float("-inf")
        self._loop = WorkLoop(CHANNEL, self._cancel_wished, poll_s=_SLOW_POLL_S)
        self.run = self._loop.run
        listener.subscribe(CHANNEL, self._notice)

    def _notice(self, payload: str | None) -> None:
        self._noticed_at = monotonic()
        self._loop.wake()

    def look_again(self, since: float) -> None:
        """Look for wishes about runs that have just begun here, if any came since their claim."""
        if self._noticed_at >= since:
            self._loop.wake()

    async def _cancel_wished(self) -> float:
        if runs := self._runs.under_way():
            tenants, ids = zip(*runs, strict=True)
            sent: dict[UUID, int] = {}
            for row in await self._pool.fetch(_WISHES, tenants, ids, timeout=_PATIENCE_S):
                if row["messages"] is None:
                    self._runs.cancel(row["run_id"], row["task_id"])
                else:
                    sent[row["run_id"]] = row["messages"]
            await self._runs.take_messages(sent)
        await self._runs.take_decisions()
        return _SLOW_POLL_S


_SEND = text("""
SELECT CAST(send_message(
    :tenant, :run, CAST(:content AS jsonb), :principal, CAST(:files AS uuid[])) AS text)
""")
_CONFLICTS = {
    "final": "run {run} is over, or is being cancelled: start another one",
    "no_root": "run {run} has the mode 'dag', and so no agent that takes messages: wait for its "
    "end, or cancel it",
    "too_many_messages": "run {run} has got {limit} messages, the most that a run takes: send it "
    "after the end",
}
REFUSED_MESSAGES = frozenset((*_CONFLICTS, "message_too_large"))


class SentMessage(NamedTuple):
    """A message as it is stored.

    Attributes:
        content: a text or parts.
        made_files: files that were made of data in it; they are deleted with the run.
    """

    content: Any
    made_files: Sequence[UUID]
    principal: str


async def send(tx: AsyncConnection, tenant_id: UUID, run_id: UUID, sent: SentMessage) -> UUID:
    """Store a message for a run under way; return its id.

    Raises:
        NotFoundError: unknown, or another tenant's.
        ConflictError: ``final``, ``no_root`` or ``too_many_messages``.
        InvalidInputError: ``message_too_large``.
    """
    values = {"tenant": tenant_id, "run": run_id, "content": to_json(sent.content).decode()}
    values |= {"principal": sent.principal, "files": list(sent.made_files)}
    answer = from_json(await tx.scalar(_SEND, values))
    if answer.get("refused") == "unknown":
        raise NotFoundError(f"there is no run {run_id}")
    if "refused" in answer:
        raise refused_message(answer, run_id, "/content")
    details = {"message_id": answer["id"]}
    await audit.note(tx, tenant_id, sent.principal, "run.message", str(run_id), details)
    return UUID(answer["id"])


def refused_message(answer: Mapping[str, Any], run_id: object, pointer: str) -> BottegaError:
    """Return the error for a message that a run does not take.

    Args:
        pointer: the message's place in the request.
    """
    reason, limit = answer["refused"], answer.get("limit")
    if reason == "message_too_large":
        return InvalidInputError(
            f"a message takes {limit} bytes at most, as JSON without the data of its files: "
            "upload the rest as a file",
            code=reason,
            pointer=pointer,
        )
    return ConflictError(_CONFLICTS[reason].format(run=run_id, limit=limit), code=reason)
