"""Batches: many runs of one agent or graph by one request; see ``db/sql/batches.sql``."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json
from sqlalchemy import bindparam, column, func, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.engine import acting_as
from bottega.db.failures import persist
from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.tables import runs
from bottega.errors import ConflictError, NotFoundError
from bottega.events.log import storable

MOST_ITEMS = 10_000
_ITEMS_AT_ONCE = 500
_RESULTS_AT_ONCE = 100

_ADD = "SELECT add_items($1, $2, $3, $4)"
_START = "SELECT start_batch($1, $2)"
_RESULTS = "SELECT number, line FROM batch_results($1, $2, $3, $4)"
_RETRY = text("SELECT retry_batch(:tenant, :run)")
_SHOWN = func.shown_batch(column("runs"), type_=JSONB).label("batch")
_BATCHES = select(runs.c.id, _SHOWN).where(
    runs.c.tenant_id == bindparam("tenant"), runs.c.mode == "batch"
)


async def store_items(
    pool: asyncpg.Pool, tenant_id: UUID, batch_id: UUID, items: Sequence[Mapping[str, Any]]
) -> None:
    """Store the items of an accepted batch, a page in each transaction, and start the batch.

    After a failure, the next call stores the items that are missing. Once the batch has started, a
    call changes nothing.

    Args:
        items: mappings with ``input``, and perhaps ``metadata`` and ``key``.
    """
    for first in range(0, len(items), _ITEMS_AT_ONCE):
        page = to_json(storable([*items[first : first + _ITEMS_AT_ONCE]])).decode()
        async with acting_as(pool, tenant_id) as connection:
            await connection.execute(_ADD, tenant_id, batch_id, first + 1, page)
    async with acting_as(pool, tenant_id) as connection:
        await connection.execute(_START, tenant_id, batch_id)


async def get(tx: AsyncConnection, tenant_id: UUID, batch_id: UUID) -> dict[str, Any]:
    """Return a batch as the API shows it.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    query = _BATCHES.where(runs.c.id == bindparam("batch"))
    row = (await tx.execute(query, {"tenant": tenant_id, "batch": batch_id})).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no batch {batch_id}")
    return dict(row.batch)


async def page(
    tx: AsyncConnection, tenant_id: UUID, *, after: UUID | None, descending: bool, limit: int
) -> PageItems[dict[str, Any]]:
    """List batches by age: the page after ``after``."""
    query = paged(_BATCHES, runs.c.id, after=after, descending=descending)
    rows = await fetch_page(tx, query.params(tenant=tenant_id), limit)
    return PageItems((dict(row["batch"]) for row in rows), more=rows.more)


async def results(pool: asyncpg.Pool, tenant_id: UUID, batch_id: UUID) -> AsyncIterator[bytes]:
    """Yield a line of JSON for each item, in order. Reads a page at a time."""
    after = 0
    while True:
        about = tenant_id, batch_id, after, _RESULTS_AT_ONCE

        async def read(about: tuple[Any, ...] = about) -> list[asyncpg.Record]:
            async with acting_as(pool, tenant_id) as connection:
                rows: list[asyncpg.Record] = await connection.fetch(_RESULTS, *about)
                return rows

        rows = await persist(read)
        for row in rows:
            yield to_json(from_json(row["line"])) + b"\n"
        if len(rows) < _RESULTS_AT_ONCE:
            return
        after = rows[-1]["number"]


async def retry(tx: AsyncConnection, tenant_id: UUID, batch_id: UUID) -> dict[str, Any]:
    """Let the failed items of a batch run again; return the batch.

    Raises:
        NotFoundError: unknown, or another tenant's.
        ConflictError: ``nothing_failed``.
    """
    await get(tx, tenant_id, batch_id)
    if not await tx.scalar(_RETRY, {"tenant": tenant_id, "run": batch_id}):
        raise ConflictError(f"no item of batch {batch_id} has failed", code="nothing_failed")
    return await get(tx, tenant_id, batch_id)
