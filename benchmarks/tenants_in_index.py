"""Tenants whose vectors share an index, by the size and position of their data.

All tenants' vectors are in one index without tenants. Some tenants' vectors are far from the
questions, with all others between. A vector is its cluster's centre, plus an offset in 32 shared
directions (real vectors also vary in few), plus a little noise in all directions.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import cast
from uuid import UUID

import asyncpg
import numpy as np
from numpy.typing import NDArray
from pgvector.asyncpg import register_vector

from bottega.db.connect import connect
from bottega.llm.builtin_embedder import DIMENSION
from bottega.memory.episodes import search
from bottega.memory.episodes.episode import EpisodeFilter
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.text.content import content_words

EMBEDDER = "clusters-1"
NOW = datetime(2026, 11, 1, tzinfo=UTC)
K = 20
BEST = 10
QUESTIONS = 20

_BATCH = 5_000
_SHARED = 32

Halves = NDArray[np.float16]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Clusters:
    """Positions of the clusters, determined by the seed.

    Attributes:
        centres: shape (c, d). directions: shape (32, d).
    """

    centres: Floats
    directions: Floats

    @classmethod
    def drawn(cls, count: int, seed: int) -> "Clusters":
        random = np.random.default_rng(seed)
        scale = DIMENSION**-0.5
        return cls(
            random.normal(scale=scale, size=(count, DIMENSION)).astype(np.float32),
            random.normal(scale=scale, size=(_SHARED, DIMENSION)).astype(np.float32),
        )

    def vectors(self, count: int, seed: int) -> Halves:
        """Draw vectors of shape (count, d), each of length 1."""
        made = np.empty((count, DIMENSION), np.float16)
        for start in range(0, count, _BATCH):
            size = min(_BATCH, count - start)
            random = np.random.default_rng((seed, start))
            rows = self.centres[random.integers(len(self.centres), size=size)]
            within = random.normal(scale=0.15, size=(size, _SHARED)).astype(np.float32)
            rows = rows + within @ self.directions
            rows += random.normal(scale=0.3 * DIMENSION**-0.5, size=rows.shape).astype(np.float32)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            made[start : start + size] = rows
        return made


def cosines(vectors: Halves, queries: Floats) -> Floats:
    """Return the cosines of all pairs, shape (queries, vectors)."""
    found = np.empty((len(queries), len(vectors)), np.float32)
    for start in range(0, len(vectors), _BATCH):
        part = vectors[start : start + _BATCH].astype(np.float32)
        found[:, start : start + _BATCH] = queries @ part.T
    return found


def nearest(all_cosines: Floats, eligible: NDArray[np.bool_], k: int) -> NDArray[np.intp]:
    """Return the exact ``k`` nearest eligible vectors (shape of the cosines), best first."""
    masked = np.where(eligible, all_cosines, -np.inf)
    some = np.argpartition(masked, -k, axis=1)[:, -k:]
    order = np.argsort(-np.take_along_axis(masked, some, axis=1), axis=1)
    return cast("NDArray[np.intp]", np.take_along_axis(some, order, axis=1))


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant.

    Attributes:
        share: share of all episodes. far: its vectors are far from the questions.
    """

    name: str
    share: float
    far: bool = False

    @property
    def id(self) -> UUID:
        return UUID(bytes=self.name.encode().ljust(16)[:16])


@dataclass(frozen=True, slots=True)
class IndexedEpisodes:
    """The loaded data: row n is the episode with the id n + 1.

    Attributes:
        owner: place of the row's tenant. age_days: 0 to 170.
        questions: shape (q, d), where most tenants' vectors are.
    """

    tenants: Sequence[Tenant]
    vectors: Halves
    owner: NDArray[np.intp]
    questions: Floats

    @property
    def age_days(self) -> NDArray[np.float64]:
        return np.arange(len(self.owner)) * 7919 % 170_000 / 1000

    @property
    def domain(self) -> NDArray[np.intp]:
        return np.arange(len(self.owner)) // 7 % 10


def drawn(count: int, tenants: Sequence[Tenant], seed: int = 1) -> IndexedEpisodes:
    random = np.random.default_rng(seed)
    sizes = [max(K, round(count * tenant.share)) for tenant in tenants[:-1]]
    owner = np.repeat(np.arange(len(tenants)), [*sizes, count - sum(sizes)])
    random.shuffle(owner)
    clusters = Clusters.drawn(max(20, count // 200), seed)
    # In any cluster, all near vectors are nearer to a question than all far ones.
    side = random.normal(scale=DIMENSION**-0.5, size=DIMENSION).astype(np.float32)
    far = np.array([tenant.far for tenant in tenants])[owner]
    vectors = clusters.vectors(count, seed)
    for start in range(0, count, _BATCH):
        part = slice(start, start + _BATCH)
        vectors[part] = _moved(vectors[part], np.where(far[part, None], -side, side))
    questions = _moved(clusters.vectors(QUESTIONS, seed + 1), side)
    return IndexedEpisodes(tenants, vectors, owner, questions)


def _moved(vectors: Halves, by: Floats) -> Floats:
    moved: Floats = vectors.astype(np.float32) + by
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)
    return moved


_ROWS = """
CREATE TEMP TABLE row AS
SELECT tenant_id, lpad(to_hex(number + 1), 32, '0')::uuid AS id, task,
       $1::timestamptz - number::bigint * 7919 % 170000 / 1000.0 * interval '1 day' AS at,
       CASE WHEN number % 10 = 3 THEN 'FAILURE' WHEN number % 100 = 7 THEN 'PARTIAL'
           ELSE 'SUCCESS' END AS outcome,
       'domain' || number / 7 % 10 AS domain, 'type' || number / 3 % 50 AS task_type,
       'session' || number / 100 AS session_id, 'tag' || number / 11 % 200 AS tag,
       CASE WHEN number % 10 = 3 THEN 'failure' || number / 10 % 100 END AS failure_signature,
       jsonb_build_object('task', 'entry' || number || ' group' || number / 13 % 300,
                          'result', 'everybody says this') AS summary
FROM loaded
"""
_TABLES = (
    """
    INSERT INTO episodes (tenant_id, id, at, outcome, domain, task_type, session_id,
                          failure_signature, trust, task, summary)
    SELECT tenant_id, id, at, outcome, domain, task_type, session_id, failure_signature, 3, '{}',
           summary
    FROM row
    """,
    """
    INSERT INTO episode_search (tenant_id, episode_id, at, outcome, domain, task_type, session_id,
                                failure_signature, trust, terms)
    SELECT tenant_id, id, at, outcome, domain, task_type, session_id, failure_signature, 3,
           episode_terms(tenant_id, summary)
    FROM row
    """,
    "INSERT INTO episode_state (tenant_id, episode_id, at) SELECT tenant_id, id, at FROM row",
    """
    INSERT INTO episode_failures (tenant_id, signature, episode_id)
    SELECT tenant_id, failure_signature, id FROM row WHERE failure_signature IS NOT NULL
    """,
    "INSERT INTO episode_tags (tenant_id, tag, episode_id) SELECT tenant_id, tag, id FROM row",
    f"""
    INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, domain, task_type,
                                 session_id, task, result, whole)
    SELECT tenant_id, id, '{EMBEDDER}', at, outcome, domain, task_type, session_id, task, '\\xff',
           '\\xff'
    FROM row
    """,
)


@asynccontextmanager
async def connected(url: str, tenant: Tenant | None = None) -> AsyncIterator[asyncpg.Connection]:
    """Connect as the application's role for a tenant, or as the login without one."""
    if tenant is None:
        connection = await asyncpg.connect(url)
    else:
        connection = await connect(url)
        await connection.execute(f"SET bottega.tenant = '{tenant.id}'")
    try:
        yield connection
    finally:
        await connection.close()


async def load(url: str, held: IndexedEpisodes) -> None:
    """Store all, and build the index of the vectors last."""
    async with connected(url) as connection:
        await register_vector(connection)
        await connection.execute(
            "SET session_replication_role = replica; SET synchronous_commit = off;"
            "SET maintenance_work_mem = '256MB'; SET max_parallel_maintenance_workers = 2"
        )
        name = "ix_episode_vectors_task_768"
        index = await connection.fetchval("SELECT pg_get_indexdef($1::regclass)", name)
        await connection.execute(f"DROP INDEX {name}")
        await connection.executemany(
            "INSERT INTO tenants (id, name) VALUES ($1, $2)",
            [(tenant.id, f"tenant-{place}") for place, tenant in enumerate(held.tenants)],
        )
        await connection.execute(
            "CREATE TEMP TABLE loaded (tenant_id uuid, number integer, task halfvec)"
        )
        for part in _batches(held):
            await connection.copy_records_to_table("loaded", records=part)
        # A utility command takes no parameters.
        await connection.execute(_ROWS.replace("$1", f"'{NOW.isoformat()}'"))
        for statement in _TABLES:
            await connection.execute(statement)
        await connection.execute(index, timeout=3600)
        await connection.execute("VACUUM ANALYZE", timeout=3600)
    for tenant in held.tenants:
        async with connected(url, tenant) as connection:
            await search.refresh_common(connection, tenant.id)


def _batches(
    held: IndexedEpisodes,
) -> Iterator[list[tuple[UUID, int, NDArray[np.float16]]]]:
    ids = [tenant.id for tenant in held.tenants]
    for start in range(0, len(held.owner), _BATCH):
        yield [
            (ids[held.owner[number]], number, held.vectors[number])
            for number in range(start, min(start + _BATCH, len(held.owner)))
        ]


# --- Questions ------------------------------------------------------------------------------------

FILTERS = {
    "": EpisodeFilter(),
    "of a domain": EpisodeFilter(domain="domain3"),
    "recent": EpisodeFilter(after=NOW - timedelta(days=17)),
}


def eligible(held: IndexedEpisodes, tenant: int, name: str) -> NDArray[np.bool_]:
    may: NDArray[np.bool_] = held.owner == tenant
    if name == "of a domain":
        may &= held.domain == 3
    elif name == "recent":
        may &= held.age_days < 17
    return may


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one question.

    Attributes:
        expected: number of rows to find, :data:`K` at most.
        exact: share of the :data:`BEST` nearest that was found.
    """

    expected: int
    found: int
    exact: float


async def ask(url: str, held: IndexedEpisodes, tenant: int, name: str) -> list[Answer]:
    """Ask all questions, as the application's role, for one tenant."""
    may = eligible(held, tenant, name)
    expected = min(K, int(may.sum()))
    near = cosines(held.vectors, held.questions)
    best = nearest(near, np.broadcast_to(may, near.shape), max(1, expected))[
        :, : min(BEST, expected)
    ]
    async with connected(url, held.tenants[tenant]) as connection:
        return [
            await _ask(connection, FILTERS[name], question, expected, set(exact))
            for question, exact in zip(held.questions, best.tolist(), strict=True)
        ]


async def _ask(
    connection: asyncpg.Connection,
    where: EpisodeFilter,
    question: Floats,
    expected: int,
    exact: set[int],
) -> Answer:
    async with connection.transaction():
        candidates = await search.candidates(
            connection,
            EVERYTHING,
            content_words(""),
            question,
            embedder=EMBEDDER,
            aged_before=NOW - timedelta(days=180),
            where=where,
            limit=K,
        )
    found = {each.episode_id.int - 1 for each in candidates}
    share = len(exact & found) / len(exact) if exact else 1.0
    return Answer(expected, len(candidates), share)
