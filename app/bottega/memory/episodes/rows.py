"""Rows of episodes. Functions run in a transaction of the tenant, or take the tenant's id."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg

from bottega.db.sessions import decoded
from bottega.memory.episodes.episode import Episode
from bottega.memory.episodes.scope import Scope

CHANNEL = "bottega_memory"
"""Channel that announces background work to other processes."""
POLL_S = 5.0
"""Seconds until background work notices an episode that another process stored."""
_TELL = f"SELECT send_signal('{CHANNEL}', '')"
_EPISODES = """
SELECT * FROM read_episodes($1::jsonb, $2, CASE WHEN $3::text IS NOT NULL
    THEN set_config('bottega.tenant', $3, true)::uuid END)
"""
_JSON = (
    *("origin", "task", "execution", "result", "metadata", "summary", "reflection"),
    *("feedback", "bodies", "verdict"),
)


async def tell(connection: asyncpg.Connection) -> None:
    """Announce background work when the transaction commits."""
    await connection.execute(_TELL)


async def load(
    on: asyncpg.Connection | asyncpg.Pool,
    scope: Scope,
    ids: Sequence[UUID],
    *,
    tenant_id: UUID | None = None,
) -> dict[UUID, Episode]:
    """Return the tenant's episodes by id, without their bodies. Episodes that are unknown, deleted
    or outside of the scope are missing.

    Args:
        tenant_id: if given, the call needs no transaction of the tenant.
    """
    tenant = None if tenant_id is None else str(tenant_id)
    rows = await on.fetch(_EPISODES, scope.document, ids, tenant)
    return {row["id"]: to_episode(row) for row in rows}


def to_episode(row: Mapping[str, Any]) -> Episode:
    """Build an episode from a row of the SQL function ``read_episodes``."""
    values = {**row, **{name: decoded(row[name]) for name in _JSON}}
    return Episode.from_row(values, state=values)
