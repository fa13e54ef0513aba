"""The audit log: a row for each action of administration, and for each cancellation of a run.

The transaction of an action also writes the action's row, so the database stores both or neither.
The database role of the service may only add and read rows.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import insert, select

from bottega.db.pages import MOST_SKEW, PageItems, fetch_page, first_id, paged
from bottega.db.pool import AsyncConnection
from bottega.db.tables import audit_log


async def note(
    connection: AsyncConnection,
    tenant_id: UUID,
    actor: str,
    action: str,
    target: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Add a row to the audit log, in the transaction of the action.

    Args:
        actor: ``key:<prefix>``, ``user:<name>``, ``local`` (the server has no keys) or ``cli``.
        action: ``<noun>.<verb>``, such as ``run.cancel`` or ``key.create``.
        target: id or name of what the action changes.
        details: further facts, but never a secret or deleted content.
    """
    row = {"actor": actor, "action": action, "target": target, "details": dict(details or {})}
    await connection.execute(insert(audit_log).values(tenant_id=tenant_id, **row))


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    *,
    action: str | None = None,
    noted_after: datetime | None = None,
    noted_before: datetime | None = None,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a page of the log, sorted by time, after the row with the id ``after``.

    Args:
        noted_after: list only entries that were written after this time.
        noted_before: list only entries that were written before this time.
    """
    log = audit_log.c
    query = select(audit_log).where(log.tenant_id == tenant_id)
    if action is not None:
        query = query.where(log.action == action)
    if noted_after is not None:
        query = query.where(log.at > noted_after, log.id >= first_id(noted_after))
    if noted_before is not None:
        query = query.where(log.at < noted_before, log.id < first_id(noted_before + MOST_SKEW))
    query = paged(query, log.id, after=after, descending=descending)
    return await fetch_page(connection, query, limit)
