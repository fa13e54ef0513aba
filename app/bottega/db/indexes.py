"""Maintenance of the memory's database indexes, for all tenants together.

Once a night, one process updates the planner's statistics, and rebuilds the indexes of tables with
many changed rows, while the service runs. The role of its connection cannot read any rows.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import structlog

from bottega.clock import Clock, utcnow
from bottega.errors import UnavailableError

ROLE = "bottega_maintenance"

_LOCK = 4_871_019_230
_EVERY = timedelta(hours=12)  # less than a day, because the work may begin earlier the next night
_SHARE = 0.5

logger = structlog.get_logger(__name__)

# A table that is locked for too long is skipped until the next night.
_PATIENCE = "SELECT set_config('lock_timeout', $1, false)"
_TAKE_TURN = "SELECT pg_try_advisory_lock($1)"
# Inserts and HOT updates leave no dead entries in an index.
_TABLES = """
SELECT s.relname AS name, greatest(c.reltuples, 0)::float AS rows,
       s.n_tup_upd - s.n_tup_hot_upd + s.n_tup_del AS changes, coalesce(i.changes, 0) AS before,
       ARRAY(SELECT indexrelid::regclass::text FROM pg_index
             WHERE indrelid = s.relid AND indisvalid ORDER BY 1) AS indexes
FROM pg_stat_user_tables s
JOIN pg_class c ON c.oid = s.relid
LEFT JOIN index_maintenance i ON i.name = s.relname
WHERE s.schemaname = 'public' AND has_table_privilege(s.relid, 'MAINTAIN')
  AND (i.at IS NULL OR i.at < $1)
ORDER BY s.relname
"""
_DONE = """
INSERT INTO index_maintenance (name, changes, at) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET changes = excluded.changes, at = excluded.at
"""


async def maintain_indexes(
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    *,
    least_changes: int = 20_000,
    patience_s: float = 10.0,
    now: Clock = utcnow,
) -> dict[str, Any]:
    """Analyse the tables due this night, and rebuild indexes with many changes.

    After a crash, the next call continues with the remaining tables.

    Args:
        connect: opens a connection as :data:`ROLE`, without a command timeout.
        least_changes: a table's indexes are rebuilt if more of its rows than this changed, and more
            than half of its rows.
        patience_s: seconds to wait for a table's lock.
        now: the time that decides if this night's work is done.

    Returns:
        The number of tables ``analysed``, the indexes ``rebuilt``, and the number of ``broken``
        indexes (left by a killed process) that were dropped; or the reason why all was ``skipped``.
    """
    try:
        connection = await connect()
    except UnavailableError as error:
        logger.warning("indices.skipped", error=error.detail)
        return {"skipped": error.detail}
    try:
        await connection.execute(_PATIENCE, f"{round(1000 * patience_s)}ms")
        if connection.get_server_version().major < 17:
            return {"skipped": "PostgreSQL 16 has no privilege MAINTAIN"}
        if not await connection.fetchval(_TAKE_TURN, _LOCK):
            return {"skipped": "another process maintains the indexes now"}
        return await _maintained(connection, least_changes, now())
    finally:
        await connection.close()


async def _maintained(
    connection: asyncpg.Connection, least_changes: int, now: datetime
) -> dict[str, Any]:
    tables = await connection.fetch(_TABLES, now - _EVERY)
    broken = await connection.fetchval("SELECT drop_broken_indexes()") if tables else 0
    analysed, rebuilt = 0, list[str]()
    for table in tables:
        name, changes = table["name"], table["changes"]
        # If the count of changes became smaller, the server's statistics were reset to zero.
        before = table["before"] if table["before"] <= changes else 0
        try:
            await connection.execute(f"ANALYZE {name}")
        except asyncpg.LockNotAvailableError:
            logger.info("indices.not_analysed", table=name)
            continue
        analysed += 1
        if changes - before > max(least_changes, _SHARE * table["rows"]):
            rebuilt += await _rebuilt(connection, table["indexes"])
            before = changes
        await connection.execute(_DONE, name, before, now)
    return {"analysed": analysed, "rebuilt": rebuilt, "broken": broken}


async def _rebuilt(connection: asyncpg.Connection, indexes: Sequence[str]) -> list[str]:
    """Rebuild a table's indexes, except those that stay locked; return the rebuilt indexes.

    Each failure leaves a broken index, so the indexes are rebuilt one at a time. If a whole table
    were rebuilt at once, a failure would leave a broken index for each index of the table, and one
    in another schema, which ``drop_broken_indexes`` does not drop.
    """
    rebuilt = []
    for index in indexes:
        try:
            await connection.execute(f"REINDEX INDEX CONCURRENTLY {index}")
        except asyncpg.LockNotAvailableError:
            logger.info("indices.not_rebuilt", index=index)
        else:
            rebuilt.append(index)
    return rebuilt
