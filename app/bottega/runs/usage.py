"""Sums of what a tenant's runs spent, by one of their properties."""

from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.agents.messages import CURRENCY
from bottega.db.pages import MOST_SKEW, PageItems, fetch_page, first_id, paged
from bottega.errors import InvalidInputError

UsageBy = Literal["agent", "model", "session", "day", "key", "user"]

_USUAL = timedelta(days=30)
_LONGEST = timedelta(days=366)
_SUMS = ("input", "output", "cached", "reasoning", "estimated")
_COLUMNS = ("name", *_SUMS, "amount", "complete", "runs")


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    by: UsageBy,
    *,
    since: datetime | None,
    until: datetime | None,
    after: str | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, object]]:
    """List sums of ended runs that were created in a time, by name, after the name ``after``.

    The name is under the key ``by``; ``None``: of runs without a session, or without a user.

    Args:
        until: ``None``: now.
        since: ``None``: 30 days before ``until``.

    Raises:
        InvalidInputError: the time is longer than a year.
    """
    until = until or await connection.scalar(select(func.now()))
    assert until is not None
    since = since or until - _USUAL
    if until - since > _LONGEST:
        raise InvalidInputError(
            f"from since to until there are more than {_LONGEST.days} days: ask for less",
            pointer="/since",
        )
    bounds = since, until, first_id(since), first_id(until + MOST_SKEW)
    sums = func.usage_by(tenant_id, by, *bounds).table_valued(*_COLUMNS)
    query = select(sums)
    query = paged(query, sums.c.name, after=after, descending=descending)
    rows = await fetch_page(connection, query, limit)
    return PageItems(
        (
            {
                by: row["name"] or None,
                **{name: row[name] for name in (*_SUMS, "runs")},
                "cost": {
                    "amount": row["amount"],
                    "currency": CURRENCY,
                    "complete": row["complete"],
                },
            }
            for row in rows
        ),
        more=rows.more,
    )
