"""Who did what: administration, and ending what others may have started.

A row is written in the transaction of the action, so that there is never one without the other. The
application may add rows and read them, and nothing else.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.pages import Part, fetch_page
from bottega.db.tables import audit_log


async def note(
    connection: AsyncConnection,
    tenant_id: UUID,
    actor: str,
    action: str,
    target: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Note an action, in the transaction that carries it out.

    Args:
        actor: who did it: ``key:<prefix>``, ``local`` (no keys), ``cli``.
        action: what was done, as ``<what>.<verb>``: ``run.cancel``, ``key.create``.
        target: the id or name of what it was done to.
        details: what else is to be known of it; never a secret, never what was deleted.
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
) -> Part[dict[str, Any]]:
    """List what was noted by time (ids grow with it): a page behind the id ``after``.

    Args:
        noted_after, noted_before: neither moment itself.
    """
    log = audit_log.c
    query = select(audit_log).where(log.tenant_id == tenant_id)
    if action is not None:
        query = query.where(log.action == action)
    if noted_after is not None:
        query = query.where(log.at > noted_after)
    if noted_before is not None:
        query = query.where(log.at < noted_before)
    if after is not None:
        query = query.where(log.id < after if descending else log.id > after)
    query = query.order_by(log.id.desc() if descending else log.id)
    return await fetch_page(connection, query, limit)
