"""Deliveries of webhooks, as clients see them."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import and_, case, func, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.pages import PageItems, beside, fetch_page, paged
from bottega.db.tables import runs, webhooks
from bottega.events.types import EventType

Place = tuple[UUID, int]
"""Run and ``seq`` of a delivery, by which they are listed: runs by age."""

_same_run = and_(runs.c.tenant_id == webhooks.c.tenant_id, runs.c.id == webhooks.c.run_id)
_run = beside(runs, _same_run, "status", "user_id")
_event = case(
    (webhooks.c.seq > 0, EventType.RUN_WAITING.value), else_=func.concat("run.", _run.c.status)
)


async def page(
    tx: AsyncConnection,
    tenant_id: UUID,
    filters: Mapping[str, Any],
    *,
    user: str | None = None,
    after: Place | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a page of deliveries; ``filters``: values of ``status`` and ``run_id``, ``None``: any.

    Args:
        user: only of this user's runs.

    A delivery has the ``event`` that it tells of, and ``url`` without its query, which may hold a
    secret.
    """
    own = webhooks.c
    query = (
        select(
            own.run_id,
            own.seq,
            _event.label("event"),
            func.split_part(own.url, "?", 1).label("url"),
            *(own[name] for name in ("status", "tries", "answer", "error", "next_at", "ended_at")),
        )
        .join(_run, true())
        .where(own.tenant_id == tenant_id)
        .where(*(own[name] == value for name, value in filters.items() if value is not None))
    )
    if user is not None:
        query = query.where(_run.c.user_id == user)
    query = paged(query, own.run_id, own.seq, after=after, descending=descending)
    few = filters.get("status") == "pending"  # their index has another order
    return await fetch_page(tx, query, limit, by_index=not few)
