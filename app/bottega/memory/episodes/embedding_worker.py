"""Background worker that embeds episodes.

A transaction that stores an episode also enqueues the episode for embedding. To claim some
episodes, a worker moves the time of their next try into the future. The worker embeds the summaries
outside of any transaction. Then one transaction stores the vectors and removes the episodes from
the queue. If the worker dies, a different worker embeds the episodes at the time of the next try.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

import asyncpg
from pydantic_core import from_json

from bottega.clock import monotonic
from bottega.db.pool import acting_as
from bottega.errors import BudgetBusyError, BudgetExhaustedError, ModelError, UnavailableError
from bottega.leased_work import Blame, LeasedWork, Rows, blame_service
from bottega.logger import Logger
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.episode import Summary
from bottega.memory.episodes.search import CHANNEL, POLL_S, refresh_common, vector_text

if TYPE_CHECKING:  # loads numpy, which takes 11 MB
    from bottega.memory.text.embeddings import Embedder, Vectors

_FIRST_POSTPONED_S = 15.0
_GIVEN_UP = 6  # number of failed tries after which the change of embedders ignores an episode

_OF_THE_TEXT = frozenset(
    {*("model_bad_request", "model_context_too_long", "model_filtered"), "model_bad_response"}
)

log = Logger(__name__)

_ENSURE_INDEX = "SELECT ensure_vector_index($1)"
_READ = """
SELECT e.id, e.summary, i.embedder, i.background_of, i.background_rows
FROM unnest($2::uuid[]) AS wanted(id)
CROSS JOIN LATERAL (
    SELECT FROM episode_search s WHERE s.tenant_id = $1 AND s.episode_id = wanted.id LIMIT 1) AS s
CROSS JOIN LATERAL (
    SELECT e.id, e.summary FROM episodes e
    WHERE e.tenant_id = $1 AND e.id = wanted.id LIMIT 1) AS e
LEFT JOIN tenant_memory i ON i.tenant_id = $1
"""
# Stores vectors only of episodes that searches can find. Row locks make concurrent changes wait.
_INSERT = """
INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, domain, task_type,
                             session_id, user_id, agent, task, result, whole)
SELECT tenant_id, episode_id, $2, at, outcome, domain, task_type, session_id, user_id, agent,
       made.task::halfvec, made.result, made.whole
FROM (
    SELECT * FROM unnest($3::uuid[], $4::text[], $5::bytea[], $6::bytea[])
        AS m(id, task, result, whole) ORDER BY id) AS made
CROSS JOIN LATERAL (
    SELECT * FROM episode_search s
    WHERE s.tenant_id = $1 AND s.episode_id = made.id FOR SHARE) AS s
ON CONFLICT DO NOTHING
"""
_DONE = """
DELETE FROM episode_work WHERE tenant_id = $1 AND episode_id = ANY ($2) AND work = 'embed'
"""
_FIRST = """
INSERT INTO tenant_memory AS i (tenant_id, embedder) VALUES ($1, $2)
ON CONFLICT (tenant_id) DO UPDATE SET embedder = excluded.embedder WHERE i.embedder IS NULL
"""
_POSTPONE = """
UPDATE episode_work SET tries = tries - $4, next_at = coalesce(
    now() + make_interval(secs => $3),
    (date_trunc('day', now() AT TIME ZONE 'UTC') + interval '1 day') AT TIME ZONE 'UTC')
WHERE tenant_id = $1 AND episode_id = ANY ($2) AND work = 'embed'
"""

# --- Another embedder ---------------------------------------------------------------------------

_PAGE = 256
_FIRST_ID = UUID(int=0)
_OTHERS = "SELECT tenants_of_other_embedders($1, 20) AS id"
_OF_QUERIES = "SELECT embedder FROM tenant_memory WHERE tenant_id = $1"
_WAITING = """
SELECT count(*) FROM (SELECT FROM episode_work WHERE tenant_id = $1 AND work = 'embed'
                      AND tries < $3 LIMIT $2) waiting
"""
# The following queries read each row by its key, because a join may read all of the tenant's rows
# for each page.
_LACKING = """
SELECT s.episode_id, (
    SELECT v.embedder FROM episode_vectors v
    WHERE v.tenant_id = $1 AND v.episode_id = s.episode_id AND v.embedder = $2) IS NULL AS lacking
FROM (SELECT episode_id FROM episode_search WHERE tenant_id = $1 AND episode_id > $4
      ORDER BY episode_id LIMIT $3) AS s
ORDER BY s.episode_id
"""
_ORDER = """
INSERT INTO episode_work (tenant_id, episode_id, work)
SELECT $1, id, 'embed' FROM unnest($2::uuid[]) AS id ON CONFLICT DO NOTHING
"""
_CHANGE_OVER = """
UPDATE tenant_memory i SET embedder = $2, leftovers = true
WHERE i.tenant_id = $1 AND NOT EXISTS (
    SELECT FROM episode_search s WHERE s.tenant_id = $1 AND NOT EXISTS (
        SELECT FROM episode_vectors v
        WHERE v.tenant_id = $1 AND v.episode_id = s.episode_id AND v.embedder = $2)
    AND NOT EXISTS (
        SELECT FROM episode_work p
        WHERE p.tenant_id = $1 AND p.episode_id = s.episode_id AND p.work = 'embed'
          AND p.tries >= $3))
RETURNING true
"""
_LEFT_OVER = "UPDATE tenant_memory SET leftovers = true WHERE tenant_id = $1 AND NOT leftovers"
_CLEAR = """
DELETE FROM episode_vectors WHERE tenant_id = $1 AND ctid = ANY (ARRAY(
    SELECT ctid FROM episode_vectors
    WHERE tenant_id = $1 AND embedder <> $2 AND episode_id >= $4
    ORDER BY episode_id LIMIT $3 FOR UPDATE SKIP LOCKED))
RETURNING episode_id
"""
# Checks that no old vectors exist, because another worker may have failed to delete some of them.
_CLEARED = """
UPDATE tenant_memory SET leftovers = false WHERE tenant_id = $1
  AND NOT EXISTS (SELECT FROM episode_vectors WHERE tenant_id = $1 AND embedder <> $2)
"""

# --- Background ---------------------------------------------------------------------------------
# The background is the distribution of cosines between a tenant's unrelated tasks, which depends on
# the language, length and topics of the texts. The background determines which cosine counts as
# relevant.

GROWN = (20, 100, 1_000)
"""Numbers of episodes with vectors. When a tenant reaches such a number, the worker measures the
background."""

_COUNT = """
SELECT count(*) FROM (
    SELECT FROM episode_vectors WHERE tenant_id = $1 AND embedder = $2 LIMIT $3) few
"""
# The query reads a few episodes from each of sixteen points in time, because topics change with
# time. The query reads each row by its key: a join is slow if the planner expects one row.
_SAMPLE = """
WITH span AS (
    SELECT min(at) AS first, max(at) - min(at) AS length FROM episode_search WHERE tenant_id = $1
)
SELECT DISTINCT ON (s.episode_id) e.summary ->> 'task' AS task, v.task::text AS vector
FROM span CROSS JOIN generate_series(0, 15) AS n
CROSS JOIN LATERAL (
    SELECT episode_id FROM episode_search
    WHERE tenant_id = $1 AND at >= span.first + span.length * n / 16
    ORDER BY at, episode_id LIMIT 6) AS s
CROSS JOIN LATERAL (
    SELECT v.task FROM episode_vectors v
    WHERE v.tenant_id = $1 AND v.episode_id = s.episode_id AND v.embedder = $2 LIMIT 1) AS v
CROSS JOIN LATERAL (
    SELECT e.summary FROM episodes e
    WHERE e.tenant_id = $1 AND e.id = s.episode_id LIMIT 1) AS e
ORDER BY s.episode_id
"""
_KEEP = """
UPDATE tenant_memory SET background_of = $2, background_mean = $3, background = $4,
       background_rows = $5
WHERE tenant_id = $1
"""


class EmbeddingWorker:
    """Worker that makes episodes' vectors; any number of processes may run such a worker.

    :attr:`work` embeds new episodes, :meth:`change_over` embeds old episodes with a new embedder.
    The methods raise ``ModelError`` or ``UnavailableError`` if the embedder is down.
    """

    def __init__(
        self, pool: asyncpg.Pool, embedders: Embedders, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._pool = pool
        self._embedders = embedders
        self.work = LeasedWork(
            pool=pool,
            name="embed",
            columns="episode_id uuid, tries integer",
            lease_s=120.0,
            share=16,
            places=64,
            batch=16,
            do=self._embed,
            blame=_blamed,
            put_off=self._put_off,
            longest_rest_s=60.0,
            channel=CHANNEL,
            poll_s=POLL_S,
            clock=clock,
        )
        self._ordered_to: dict[UUID, UUID] = {}
        self._cleared: dict[UUID, UUID] = {}

    async def _put_off(
        self, tenant_id: UUID, due: Rows, error: Exception, pause_s: float | None
    ) -> None:
        wait_s, uncounted = pause_s, 1
        if wait_s is None:
            (row,) = due
            wait_s = min(3600.0, _FIRST_POSTPONED_S * 2.0 ** min(row["tries"], 20))
            uncounted = 0
            log.warning("episode.not_embedded", episode_id=str(row["episode_id"]), error=str(error))
        await self._postpone(tenant_id, [row["episode_id"] for row in due], wait_s, uncounted)

    async def _postpone(
        self, tenant_id: UUID, ids: Sequence[UUID], wait_s: float | None, uncounted: int
    ) -> None:
        """Postpone the embedding by ``wait_s`` seconds; ``None``: to the next day (UTC)."""
        async with acting_as(self._pool, tenant_id) as connection:
            await connection.execute(_POSTPONE, tenant_id, ids, wait_s, uncounted)

    async def _embed(self, tenant_id: UUID, due: Sequence[asyncpg.Record]) -> None:
        from bottega.memory.text.embeddings import packed_vectors

        ids = [row["episode_id"] for row in due]
        async with acting_as(self._pool, tenant_id) as connection:
            rows = await connection.fetch(_READ, tenant_id, ids)
        summaries = [Summary(**from_json(row["summary"])) for row in rows]
        try:
            of_queries = rows[0]["embedder"] if rows else None
            made = await self._all_made(tenant_id, of_queries, summaries) if summaries else {}
        except BudgetExhaustedError as error:  # this tenant's error, so all other tenants continue
            wait_s = _FIRST_POSTPONED_S if isinstance(error, BudgetBusyError) else None
            await self._postpone(tenant_id, ids, wait_s, uncounted=1)
            return
        read = [row["id"] for row in rows]
        inserts = []
        for name, vectors in made.items():
            task, result, whole = (vectors[:, part] for part in range(3))
            packed = packed_vectors(result), packed_vectors(whole)
            inserts.append((tenant_id, name, read, [*map(vector_text, task)], *packed))
        async with acting_as(self._pool, tenant_id) as connection:
            if made:
                await connection.execute(_FIRST, tenant_id, next(iter(made)))
                await connection.executemany(_INSERT, inserts)
                if rows[0]["embedder"] not in (None, *made):
                    await connection.execute(_LEFT_OVER, tenant_id)
            await connection.execute(_DONE, tenant_id, ids)
        if made:
            name = rows[0]["embedder"] or self._embedders.current.name
            before = rows[0]["background_rows"] if rows[0]["background_of"] == name else 0
            if before < GROWN[-1]:
                await self._measure(tenant_id, name, before)

    async def measure(self, tenant_id: UUID) -> None:
        """Measure a tenant's frequent words, and the background of its cosines, for searches.

        Raises:
            ModelError, UnavailableError: the embedder failed.
        """
        async with acting_as(self._pool, tenant_id) as connection:
            await refresh_common(connection, tenant_id)
            name = await connection.fetchval(_OF_QUERIES, tenant_id)
        if name is not None:
            await self._measure(tenant_id, name)

    async def _measure(self, tenant_id: UUID, name: str, before: int = -1) -> None:
        """Measure and store a tenant's background and frequent words.

        The method does nothing if fewer than 20 episodes have vectors of the embedder, or if this
        process does not have the embedder.

        Args:
            name: name of the embedder.
            before: number of episodes at the last measurement. The method does nothing until the
                number reaches the next number in :data:`GROWN`. -1: no growth is necessary.

        Raises:
            ModelError, UnavailableError: the embedder failed.
        """
        import numpy as np

        from bottega.memory.text.embeddings import embed_queries, measured_background

        embedder = self._embedders.named(name)
        size_wanted = next(size for size in GROWN if size > before)
        async with acting_as(self._pool, tenant_id) as connection:
            count = await connection.fetchval(_COUNT, tenant_id, name, GROWN[-1])
            if embedder is None or count < size_wanted:
                return
            await refresh_common(connection, tenant_id)
            rows = await connection.fetch(_SAMPLE, tenant_id, name)
        stored = np.array([np.fromstring(row["vector"][1:-1], sep=",") for row in rows], np.float32)
        places = np.linspace(0, len(rows) - 1, min(24, len(rows))).round().astype(int)
        queries = stored[places]
        if hasattr(embedder, "embed_queries"):
            paid = self._embedders.paid_by(tenant_id, embedder)
            queries = await embed_queries(paid, [rows[place]["task"] for place in places])
        others = np.ones((len(places), len(stored)), bool)
        others[np.arange(len(places)), places] = False
        mean, *deviations = measured_background(queries, stored, others)
        async with acting_as(self._pool, tenant_id) as connection:
            await connection.execute(_KEEP, tenant_id, name, mean.tolist(), deviations, count)

    async def _all_made(
        self, tenant_id: UUID, of_queries: str | None, summaries: Sequence[Summary]
    ) -> "Mapping[str, Vectors]":
        name, vectors = await self._made(self._embedders.paid_by(tenant_id), summaries)
        by_name = {name: vectors}
        # Until the switch, queries use the older embedder, so new episodes also need its vectors.
        other = None if of_queries in (None, name) else self._embedders.named(of_queries)
        if other is not None:
            try:
                by_name |= [await self._made(self._embedders.paid_by(tenant_id, other), summaries)]
            except (ModelError, UnavailableError) as error:
                log.info("embedder.left", embedder=of_queries, error=error.detail)
        return by_name

    async def _made(self, embedder: "Embedder", found: Sequence[Summary]) -> "tuple[str, Vectors]":
        texts = [text for each in found for text in (each.task, each.result, each.whole)]
        vectors = await embedder.embed(texts)
        await self._pool.execute(_ENSURE_INDEX, embedder.dimension, timeout=60)
        return embedder.name, vectors.reshape(len(found), 3, embedder.dimension)

    async def change_over(self) -> float:
        """Embed the episodes of tenants that use another embedder, one page per tenant and call.

        After the last page, switch the tenant's queries to the current embedder, and delete the
        vectors of other embedders. Return the seconds until the next call."""
        tenants = await self._pool.fetch(_OTHERS, "")
        if not tenants:
            return float("inf")  # without vectors, the embedder need not be loaded
        try:
            # An embedder's name is final only after the embedder's first call.
            await self._embedders.paid_by(tenants[0]["id"]).embed(["."])
        except BudgetExhaustedError:
            return float("inf")  # a later poll tries again
        name = self._embedders.current.name
        tenants = await self._pool.fetch(_OTHERS, name)
        for row in tenants:
            await self._change_over(row["id"], name)
        return 0.5 if tenants else float("inf")

    async def _change_over(self, tenant_id: UUID, name: str) -> None:
        async with acting_as(self._pool, tenant_id) as connection:
            if await connection.fetchval(_OF_QUERIES, tenant_id) == name:
                await self._clear(connection, tenant_id, name)
                return
            await connection.execute(_LEFT_OVER, tenant_id)
            waiting = await connection.fetchval(_WAITING, tenant_id, _PAGE, _GIVEN_UP)
            if waiting >= _PAGE or await self._order(connection, tenant_id, name) or waiting:
                return
            self._ordered_to.pop(tenant_id, None)  # the next call checks all episodes again
            if await connection.fetchval(_CHANGE_OVER, tenant_id, name, _GIVEN_UP):
                log.info("embedder.changed", tenant_id=str(tenant_id), embedder=name)

    async def _order(self, connection: asyncpg.Connection, tenant_id: UUID, name: str) -> bool:
        """Enqueue a page of the episodes that lack vectors of an embedder; false: there is none."""
        reached = self._ordered_to.get(tenant_id, _FIRST_ID)
        while rows := await connection.fetch(_LACKING, tenant_id, name, _PAGE, reached):
            reached = self._ordered_to[tenant_id] = rows[-1]["episode_id"]
            if ids := [row["episode_id"] for row in rows if row["lacking"]]:
                await connection.execute(_ORDER, tenant_id, ids)
                return True
        return False

    async def _clear(self, connection: asyncpg.Connection, tenant_id: UUID, name: str) -> None:
        """Delete the vectors of all embedders except this worker's embedder.

        At the end, the method enqueues the episodes that lack a vector of this worker's embedder,
        because a worker with a different embedder may have embedded some episodes.
        """
        after = self._cleared.pop(tenant_id, _FIRST_ID)
        rows = await connection.fetch(_CLEAR, tenant_id, name, 2 * _PAGE, after)
        if rows:
            self._cleared[tenant_id] = max(row["episode_id"] for row in rows)
        elif after == _FIRST_ID and not await self._order(connection, tenant_id, name):
            self._ordered_to.pop(tenant_id, None)
            await connection.execute(_CLEARED, tenant_id, name)


def _blamed(error: Exception) -> Blame | None:
    of_the_text = isinstance(error, ModelError) and error.code in _OF_THE_TEXT
    return Blame.ROW if of_the_text else blame_service(error)
