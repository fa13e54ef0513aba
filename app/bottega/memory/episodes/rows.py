"""Rows of episodes. All functions run in a transaction of the tenant's."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg

from bottega.db.driver import decoded
from bottega.db.pages import PageItems, fetch_rows
from bottega.memory.episodes.episode import Body, Episode, Outcome, State, StorageState
from bottega.memory.episodes.scope import Scope

CHANNEL = "bottega_memory"
"""Channel that announces background work; a worker needs none for its own runs' episodes."""
_TELL = f"SELECT pg_notify('{CHANNEL}', '')"
_EPISODES = "SELECT * FROM read_episodes($1::jsonb, $2)"
_FOUND = """
SELECT * FROM read_episodes($2::jsonb, $3, set_config('bottega.tenant', $1, true)::uuid)
"""
_JSON = ("origin", "task", "execution", "result", "metadata", "summary", "reflection")


async def tell(connection: asyncpg.Connection) -> None:
    """Announce background work when the transaction commits."""
    await connection.execute(_TELL)


async def load(
    connection: asyncpg.Connection, scope: Scope, ids: Sequence[UUID]
) -> dict[UUID, Episode]:
    """Return the tenant's episodes by id, without their bodies. Episodes that are unknown, deleted
    or outside of the scope are missing."""
    rows = await connection.fetch(_EPISODES, scope.document, ids)
    return {row["id"]: _episode(row) for row in rows}


async def load_found(
    pool: asyncpg.Pool, tenant_id: UUID, scope: Scope, ids: Sequence[UUID]
) -> dict[UUID, Episode]:
    """Load episodes like :func:`load`, without a transaction."""
    rows = await pool.fetch(_FOUND, str(tenant_id), scope.document, ids)
    return {row["id"]: _episode(row) for row in rows}


async def load_page(
    connection: asyncpg.Connection, scope: Scope, ids: Sequence[UUID], *, limit: int
) -> PageItems[Episode]:
    """Load as many of the scope's episodes as fit in a page, in the order of ``ids``."""
    query = f"{_EPISODES} ORDER BY array_position($2, id) LIMIT $3"
    rows = await fetch_rows(connection, query, scope.document, ids, limit=limit)
    return PageItems(map(_episode, rows), more=rows.more)


def _episode(row: Mapping[str, Any]) -> Episode:
    plain = {name: decoded(row[name]) for name in _JSON}
    lists = {name: tuple(row[name]) for name in ("tags", "failure_signatures")}
    return Episode.from_row({**row, **plain, **lists}, state=_state(row))


def _state(row: Mapping[str, Any]) -> State:
    label = row["label"]
    return State(
        state=StorageState(row["state"]),
        access_count=row["access_count"],
        last_access=row["last_access"],
        consolidated_into=row["consolidated_into"],
        feedback=decoded(row["feedback"]),
        bodies=tuple(Body(**body) for body in decoded(row["bodies"]) or ()),
        label=label and Outcome(label),
        label_source=row["label_source"],
    )
