"""A database for measurements, with a corpus or vectors in it."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from benchmarks.memory.corpus import Told
from bottega.db import embedded, migrate
from bottega.db.engine import Database, acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.memory.episodes import search
from bottega.memory.text.embeddings import Embedder
from bottega.memory.text.signature import failure_signature

NOW = datetime(2026, 11, 1, tzinfo=UTC)
TENANT = DEFAULT_TENANT


@asynccontextmanager
async def database(shared_buffers: str | None = None) -> AsyncIterator[Database]:
    """Open a fresh, migrated database, configured like the service's.

    Args:
        shared_buffers: PostgreSQL's setting; ``None``: that of the embedded server.
    """
    with tempfile.TemporaryDirectory(prefix="bottega-", ignore_cleanup_errors=True) as name:
        if shared_buffers is not None:
            with embedded.running(Path(name)) as url:
                connection = await asyncpg.connect(url)
                await connection.execute(f"ALTER SYSTEM SET shared_buffers = '{shared_buffers}'")
                await connection.close()
        with embedded.running(Path(name)) as url:
            await asyncio.to_thread(migrate.upgrade, url)
            async with open_database(url) as opened:
                yield opened


def row(told: Told) -> dict[str, Any]:
    """Return an episode as ``store_episode`` takes it; its id is its number."""
    failure = told.failure
    return {
        "id": str(UUID(int=told.number + 1)),
        "at": (NOW - timedelta(days=told.age_days)).isoformat(),
        "outcome": told.outcome,
        "domain": told.topic[0].domain,
        "task_type": told.topic[0].task_type,
        "trust": 3,
        "failure_signature": failure
        and failure_signature(failure.type, told.errors, tool=failure.tool),
        "task": {"original_input": told.task, "goals": [], "constraints": [], "context": {}},
        "metadata": {"tools_used": list(told.steps)},
        "summary": {
            "task": told.task,
            "result": told.result,
            "errors": told.errors,
            "steps": " ".join(told.steps),
        },
    }


def number(episode_id: UUID) -> int:
    return episode_id.int - 1


async def _many(connection: asyncpg.Connection, statement: str, rows: Sequence[Any]) -> None:
    for start in range(0, len(rows), 500):
        await connection.executemany(statement, rows[start : start + 500])


async def store(pool: asyncpg.Pool, episodes: Sequence[Told]) -> None:
    """Store the corpus as episodes of :data:`TENANT`, with accesses, and sample its words."""
    async with acting_as(pool, TENANT) as connection:
        await _many(
            connection,
            "SELECT store_episode($1, $2::jsonb)",
            [(TENANT, json.dumps(row(told))) for told in episodes],
        )
        await _many(
            connection,
            "UPDATE episode_state SET access_count = $3 WHERE tenant_id = $1 AND episode_id = $2",
            [(TENANT, UUID(int=told.number + 1), told.accesses) for told in episodes],
        )
        await search.refresh_common(connection, TENANT)


async def embed(pool: asyncpg.Pool, episodes: Sequence[Told], embedder: Embedder) -> None:
    """Replace all vectors by those of one embedder."""
    async with acting_as(pool, TENANT) as connection:
        await connection.execute("DELETE FROM episode_vectors WHERE tenant_id = $1", TENANT)
        parts = [
            [told.task for told in episodes],
            [told.result for told in episodes],
            ["\n".join((told.task, told.result, told.errors)) for told in episodes],
        ]
        vectors = [await embedder.embed(texts) for texts in parts]
        await _many(
            connection,
            """
            INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, domain,
                                         task_type, session_id, task, result, whole)
            SELECT tenant_id, episode_id, $3, at, outcome, domain, task_type, session_id,
                   $4::real[], packed_vector($5::real[]::halfvec),
                   packed_vector($6::real[]::halfvec)
            FROM episode_search WHERE tenant_id = $1 AND episode_id = $2
            """,
            [
                (TENANT, UUID(int=told.number + 1), embedder.name, *(v.tolist() for v in three))
                for told, *three in zip(episodes, *vectors, strict=True)
            ],
        )
