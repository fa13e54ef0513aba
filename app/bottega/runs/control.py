"""Clients' requests about unfinished runs: cancellations of runs and tasks, and messages to runs.

The transaction that stores a request also adds a row to the inbox of the run's worker.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json
from sqlalchemy import text

from bottega.db.failures import repeated
from bottega.db.pool import AsyncConnection, Database
from bottega.errors import BottegaError, ConflictError, InvalidInputError, NotFoundError, no_run
from bottega.tenants import audit

_PROBE_S = 0.2
_READ = "SELECT id, run_id, kind, subject FROM read_inbox($1, $2)"

_LOCK = text("SELECT FROM runs WHERE tenant_id = :tenant AND id = :run FOR UPDATE")
_WAITS = text("""
SELECT EXISTS (SELECT FROM interrupts
    WHERE tenant_id = :tenant AND run_id = :run AND id = ANY(:calls) AND status = 'pending')
""")
_CANCEL = text("SELECT cancel_run(:tenant, :run)")
_CANCEL_TASK = text("SELECT id, was_over FROM cancel_task(:tenant, :run, :task)")


@repeated
async def request_cancel(
    database: Database,
    tenant_id: UUID,
    run_id: UUID,
    actor: str,
    *,
    calls: Sequence[UUID] = (),
    action: str = "run.cancel",
) -> bool:
    """Store a request to cancel a run. Return true if the run was already over.

    Args:
        calls: ids of interrupts. Cancel the run only if one of these interrupts is pending. If
            ``calls`` is empty, always cancel the run.
        action: name of the action in the audit log.

    Raises:
        NotFoundError: the tenant has no such run.
    """
    async with database.begin(tenant_id) as tx:
        if calls:
            wish = {"tenant": tenant_id, "run": run_id}
            await tx.execute(_LOCK, wish)
            if not await tx.scalar(_WAITS, wish | {"calls": calls}):
                return False
        answer = await tx.scalar(_CANCEL, {"tenant": tenant_id, "run": run_id})
        if answer is None:
            raise no_run(run_id)
        if answer != "final":
            await audit.note(tx, tenant_id, actor, action, str(run_id))
    return bool(answer == "final")


@repeated
async def request_task_cancel(
    database: Database, tenant_id: UUID, run_id: UUID, task_id: UUID, actor: str
) -> dict[UUID, bool]:
    """Cancel a task and its sub-tasks. Return {id of a task: true if it was already over}.

    Raises:
        NotFoundError: the tenant's run has no such task.
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

    def under_way(self) -> Sequence[object]:
        """Return the ids of the runs that have not ended."""

    def cancel(self, run_id: UUID, task_id: UUID | None = None) -> None:
        """Cancel a run, or only one of the run's tasks. Idempotent."""

    async def take(self, run_ids: Collection[UUID]) -> set[UUID]:
        """Deliver new messages and decisions to runs. Return the ids of the runs that took them."""

    def child_ended(self, run_id: UUID) -> None:
        """Tell the parent run that this child run has ended. Idempotent."""


class WorkerInbox:
    """A worker's inbox: cancellations, messages, decisions and notices that child runs ended.

    A message or decision stays in the inbox until its run accepts the message or decision. A
    cancellation stays until its run ends.
    """

    def __init__(self, pool: asyncpg.Pool, worker_id: UUID, runs: RunsHere) -> None:
        self._pool, self._worker_id, self._runs = pool, worker_id, runs
        self._read_ids: list[int] = []

    async def run(self) -> None:
        """Read the inbox several times a second while this worker has runs, until cancelled."""
        while True:
            if self._read_ids or self._runs.under_way():
                await self._read_inbox()
            await asyncio.sleep(_PROBE_S)

    async def _read_inbox(self) -> None:
        rows = await self._pool.fetch(_READ, self._worker_id, self._read_ids, timeout=3.0)
        self._read_ids = []
        for row in rows:
            if row["kind"] in ("cancel", "task"):
                self._runs.cancel(row["run_id"], row["subject"])
            elif row["kind"] == "child":
                self._runs.child_ended(row["subject"])
                self._read_ids.append(row["id"])
        if messages := [row for row in rows if row["kind"] in ("message", "decision")]:
            runs_taken = await self._runs.take({row["run_id"] for row in messages})
            self._read_ids += [row["id"] for row in messages if row["run_id"] in runs_taken]


_SEND = text("""
SELECT CAST(send_message(
    :tenant, :run, CAST(:content AS jsonb), :principal, CAST(:files AS uuid[])) AS text)
""")
_CONFLICTS = {
    "final": "run {run} is over, or is being cancelled: start another run",
    "no_root": "run {run} has the mode 'dag', and so no agent that takes messages: wait for the "
    "run's end, or cancel it",
    "too_many_messages": "run {run} has got {limit} messages, the most that a run takes: send the "
    "message with a new run",
}
REFUSED_MESSAGES = frozenset((*_CONFLICTS, "message_too_large"))


class SentMessage(NamedTuple):
    """A message to store.

    Attributes:
        content: a text or parts.
        made_files: ids of files with the message's data. These files are deleted with the run.
    """

    content: Any
    made_files: Sequence[UUID]
    principal: str


async def send(
    tx: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    message: SentMessage,
    pointer: str = "/content",
) -> UUID:
    """Store a message for an unfinished run. Return the message's id.

    Args:
        pointer: JSON Pointer to the message in the request.

    Raises:
        NotFoundError: the tenant has no such run.
        ConflictError: ``final``, ``no_root`` or ``too_many_messages``.
        InvalidInputError: ``message_too_large``.
    """
    values = {"tenant": tenant_id, "run": run_id, "content": to_json(message.content).decode()}
    values |= {"principal": message.principal, "files": list(message.made_files)}
    answer = from_json(await tx.scalar(_SEND, values))
    if answer.get("refused") == "unknown":
        raise no_run(run_id)
    if "refused" in answer:
        raise refused_message(answer, run_id, pointer)
    details = {"message_id": answer["id"]}
    await audit.note(tx, tenant_id, message.principal, "run.message", str(run_id), details)
    return UUID(answer["id"])


def refused_message(answer: Mapping[str, Any], run_id: object, pointer: str) -> BottegaError:
    """Return the error for a message that a run does not accept.

    Args:
        pointer: JSON Pointer to the message in the request.
    """
    reason, limit = answer["refused"], answer.get("limit")
    if reason == "message_too_large":
        return InvalidInputError(
            f"a message may have at most {limit} bytes, as JSON without the data of its files: "
            "upload a part of its text as a file",
            code=reason,
            pointer=pointer,
        )
    return ConflictError(_CONFLICTS[reason].format(run=run_id, limit=limit), code=reason)
