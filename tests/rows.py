"""All rows of a database, to compare them before and after."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from uuid import UUID

import asyncpg

IN_BACKGROUND = (
    *("last_sweep", "last_sum", "storage_changes", "tenant_storage", "metric_rollups"),
)
"""Tables whose rows change by themselves."""


async def rows(
    url: str, *, without: tuple[str, ...] = (), tenants: Collection[UUID] = ()
) -> set[tuple[str, str]]:
    """Return every row of every table, as text.

    Args:
        without: names of tables to leave out, such as those that record when they were used.
        tenants: as of :func:`unchanged`.
    """
    connection = await asyncpg.connect(url)
    try:
        tables = await connection.fetch(
            "SELECT table_name AS name FROM information_schema.tables"
            " WHERE table_schema = 'public' AND table_type = 'BASE TABLE'"
            " AND table_name <> ALL($1)",
            (*IN_BACKGROUND, *without),
        )
        return {
            (name, row["text"])
            for (name,) in tables
            for row in await connection.fetch(
                f'SELECT t::text AS text FROM "{name}" t'
                " WHERE $1::text[] = '{}' OR to_jsonb(t) ->> 'tenant_id' = ANY ($1)",
                [str(each) for each in tenants],
            )
        }
    finally:
        await connection.close()


@asynccontextmanager
async def unchanged(
    url: str, *, without: tuple[str, ...] = (), tenants: Collection[UUID] = ()
) -> AsyncIterator[None]:
    """Check at the block's end that every row is as it was at its start.

    Args:
        tenants: only rows of these; empty: of all, and of none.
    """
    before = await rows(url, without=without, tenants=tenants)
    yield
    assert await rows(url, without=without, tenants=tenants) == before
