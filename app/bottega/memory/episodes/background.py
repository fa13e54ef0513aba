"""Measurement of an embedder's background: cosines of a tenant's tasks that have nothing in common.

The tenant's own texts set the least cosine that counts as relevant, since their language, length
and topics change it.
"""

from uuid import UUID

import asyncpg
import numpy as np

from bottega.db.engine import acting_as
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.text.embeddings import embed_queries, measured_background

GROWN = (20, 100, 1_000)
"""Numbers of episodes with vectors from which on the background is measured (again)."""

TO_MEASURE = "SELECT id, embedder FROM tenants_to_measure($1, 20)"

_POINTS = 16
_QUERIES = 24
_COUNT = """
SELECT count(*) FROM (
    SELECT FROM episode_vectors WHERE tenant_id = $1 AND embedder = $2 LIMIT $3) few
"""
# A few episodes from each of sixteen points in time, because topics change with time.
_SAMPLE = """
WITH span AS (
    SELECT min(at) AS first, max(at) - min(at) AS length FROM episode_search WHERE tenant_id = $1
)
SELECT DISTINCT ON (v.episode_id) e.summary ->> 'task' AS task, v.task::text AS vector
FROM span, generate_series(0, $3::integer - 1) AS n, LATERAL (
    SELECT episode_id FROM episode_search
    WHERE tenant_id = $1 AND at >= span.first + span.length * n / $3
    ORDER BY at, episode_id LIMIT 6) AS s
JOIN episode_vectors v
    ON v.tenant_id = $1 AND v.episode_id = s.episode_id AND v.embedder = $2
JOIN episodes e ON e.tenant_id = $1 AND e.id = s.episode_id
ORDER BY v.episode_id
"""
# Else the daily look would find the same tenant again at once.
_LOOKED = "UPDATE tenant_memory SET background_at = now() WHERE tenant_id = $1"
_KEEP = """
UPDATE tenant_memory SET background_of = $2, background_mean = $3, background = $4,
       background_rows = $5, background_at = now()
WHERE tenant_id = $1
"""


async def measure(
    pool: asyncpg.Pool, embedders: Embedders, tenant_id: UUID, name: str, before: int = -1
) -> None:
    """Measure the background of a tenant's queries, and keep it.

    Does nothing below 20 episodes with vectors of the embedder, or without the embedder.

    Args:
        name: the embedder's.
        before: episodes when it was last measured; at least 0: do nothing until the next of
            :data:`GROWN` is reached.

    Raises:
        ModelError, UnavailableError: the embedder failed.
    """
    embedder = embedders.named(name)
    wanted = next(size for size in GROWN if size > before)
    async with acting_as(pool, tenant_id) as connection:
        known = await connection.fetchval(_COUNT, tenant_id, name, GROWN[-1])
        if embedder is None or known < wanted:
            if before < 0:
                await connection.execute(_LOOKED, tenant_id)
            return
        rows = await connection.fetch(_SAMPLE, tenant_id, name, _POINTS)
    stored = np.array([np.fromstring(row["vector"][1:-1], sep=",") for row in rows], np.float32)
    places = np.linspace(0, len(rows) - 1, min(_QUERIES, len(rows))).round().astype(int)
    queries = stored[places]
    if hasattr(embedder, "embed_queries"):
        queries = await embed_queries(embedder, [rows[place]["task"] for place in places])
    others = np.ones((len(places), len(stored)), bool)
    others[np.arange(len(places)), places] = False
    mean, *spread = measured_background(queries, stored, others)
    async with acting_as(pool, tenant_id) as connection:
        await connection.execute(_KEEP, tenant_id, name, mean.tolist(), spread, known)
    embedders.forget(tenant_id)
