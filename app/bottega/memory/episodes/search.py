"""Rows of episodes, and searches for episodes by meaning and words, by fields, and by time.

Each function needs a transaction of the tenant (:func:`bottega.db.pool.acting_as`), or the
tenant's id as an argument.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega.db.sessions import decoded
from bottega.memory.episodes.episode import Episode, EpisodeFilter
from bottega.memory.episodes.scope import Scope
from bottega.memory.episodes.scoring import Candidate
from bottega.memory.text.content import ContentWords

if TYPE_CHECKING:  # numpy is slow to import, and only searches need it
    import numpy as np
    from numpy.typing import NDArray

CHANNEL = "bottega_memory"
"""Channel that announces new background work to other processes."""
POLL_S = 5.0
"""Maximum seconds until background work finds an episode that a different process stored."""
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
    """Announce new background work to all processes when the transaction commits."""
    await connection.execute(_TELL)


async def load(
    on: asyncpg.Connection | asyncpg.Pool,
    scope: Scope,
    ids: Sequence[UUID],
    *,
    tenant_id: UUID | None = None,
) -> dict[UUID, Episode]:
    """Return the tenant's episodes by id, without bodies. The result omits episodes that are
    unknown, deleted or outside of the scope.

    Args:
        tenant_id: the tenant; ``None``: the transaction's tenant.
    """
    tenant = None if tenant_id is None else str(tenant_id)
    rows = await on.fetch(_EPISODES, scope.document, ids, tenant)
    return {row["id"]: to_episode(row) for row in rows}


def to_episode(row: Mapping[str, Any]) -> Episode:
    """Build an episode from a row of the SQL function ``read_episodes``."""
    values = {**row, **{name: decoded(row[name]) for name in _JSON}}
    return Episode.from_row(values, state=values)


By = Literal["task", "result", "whole"]
Place = tuple[datetime, UUID]
"""Position of an episode in the order of time."""

ANY = EpisodeFilter()

LIST = {
    descending: f"""
    SELECT * FROM read_episodes($1::jsonb, ARRAY(
        SELECT episode_list($1::jsonb, $2::jsonb, $3, $4, {descending}, $5)))
    ORDER BY at {order}, id {order}
    """  # noqa: S608 (texts of ours)
    for descending, order in ((False, "ASC"), (True, "DESC"))
}
"""Lists searchable episodes by end time, then id; the key is true for the latest first. The
arguments are scope, conditions, the time and id after which the page begins, and the limit."""
_CANDIDATES = """
SELECT * FROM search_episodes(
    $1::jsonb, $2::text[], $3::text::halfvec, $4, $5, $6::jsonb, $7, $8, $9, $10)
"""

# Samples 100 episodes at each of 20 points in time, because topics change with time.
_REFRESH_COMMON = """
WITH span AS (
    SELECT min(at) AS first, max(at) - min(at) AS length, count(*)::integer AS rows
    FROM episode_search WHERE tenant_id = $1
), sample AS MATERIALIZED (
    SELECT DISTINCT ON (s.episode_id) s.terms
    FROM span, generate_series(0, 19) AS n, LATERAL (
        SELECT episode_id, terms FROM episode_search
        WHERE tenant_id = $1 AND at >= span.first + span.length * n / 20
        ORDER BY at, episode_id LIMIT 100) AS s
), size AS (
    SELECT count(*)::real AS rows FROM sample
), word AS (
    SELECT lexeme, count(*) / size.rows AS share
    FROM sample, size, unnest(tsvector_to_array(terms)) AS lexeme
    WHERE lexeme <> '=' || $1
    GROUP BY lexeme, size.rows HAVING count(*) >= greatest(2, size.rows / 500)
    ORDER BY share DESC, lexeme LIMIT 2000
)
INSERT INTO tenant_memory (tenant_id, common, shares, sampled_rows)
SELECT $1, coalesce((SELECT array_agg(lexeme) FROM word), '{}'),
       coalesce((SELECT array_agg(share) FROM word), '{}'), span.rows FROM span
ON CONFLICT (tenant_id) DO UPDATE SET
    common = excluded.common, shares = excluded.shares, sampled_rows = excluded.sampled_rows
"""


async def candidates(
    connection: asyncpg.Connection | asyncpg.Pool,
    scope: Scope,
    query: ContentWords,
    vector: "NDArray[np.float32] | None",
    *,
    embedder: str | None,
    aged_before: datetime,
    where: EpisodeFilter = ANY,
    by: By = "task",
    limit: int = 20,
    tenant_id: UUID | None = None,
) -> list[Candidate]:
    """Return candidates for a query from the episodes within the scope, in any order.

    Candidates are the ``limit`` episodes with the most similar vectors, and the ``limit`` episodes
    that match the query's words best.

    Args:
        query: the query's words; without words, the search compares only vectors.
        vector: the query's vector, shape (d,); ``None``: the search compares only words.
        embedder: name of the vector's embedder; the search ignores vectors of all other embedders.
        aged_before: the search finds an episode that ended before this time only if the cosine is
            at least 0.8.
        by: the text that is compared for :attr:`Candidate.cosine`. To find candidates, the search
            always compares the vectors of tasks.
        tenant_id: the tenant; ``None``: the transaction's tenant.
    """
    rows = await connection.fetch(
        _CANDIDATES,
        scope.document,
        query.texts,
        None if vector is None or embedder is None else vector_text(vector),
        embedder,
        by,
        conditions(where),
        aged_before,
        0.8,
        limit,
        tenant_id,
    )
    return [
        Candidate(**{**row, "words": frozenset(place - 1 for place in row["words"] or ())})
        for row in rows
    ]


def vector_text(vector: "NDArray[np.float32]") -> str:
    """Return a vector as a text for PostgreSQL.

    A text is faster than an array, because the driver checks the type of each item of an array.
    """
    return to_json(vector.tolist()).decode()


def conditions(where: EpisodeFilter) -> str:
    """Return a filter in JSON, as an argument of SQL functions."""
    filters = {name: value for name, value in asdict(where).items() if value}
    if where.min_trust == 1:  # no condition, because all episodes have at least this trust
        del filters["min_trust"]
    return to_json(filters).decode()


async def refresh_common(connection: asyncpg.Connection, tenant_id: UUID) -> None:
    """Store the frequent words of a tenant's episodes, from a sample of at most 2,000 episodes.

    Without the list of frequent words, searches are correct, but slow if there are many episodes,
    because frequent words select too many episodes. Call the function again when the number of
    episodes has grown by a fifth.
    """
    await connection.execute(_REFRESH_COMMON, tenant_id)
