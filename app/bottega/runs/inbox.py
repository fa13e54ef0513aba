"""Clients' messages for runs under way."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from pydantic_core import from_json, to_json
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.errors import BottegaError, ConflictError, InvalidInputError, NotFoundError
from bottega.tenants import audit

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
