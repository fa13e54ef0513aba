"""Background worker that embeds episodes.

Storing an episode also stores pending work for its vectors. A worker claims some of it by moving
the time of the next try, embeds the summaries outside of any transaction, then stores the vectors
and deletes the pending work in one transaction. If it dies, another worker retries at that time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json

from bottega.clock import monotonic
from bottega.db.engine import acting_as
from bottega.errors import BottegaError, ModelError, UnavailableError
from bottega.memory.episodes.embedders import Embedders
from bottega.memory.episodes.episode import Summary
from bottega.memory.text.embeddings import DIMENSION, Embedder, Vectors

POLL_S = 5.0
"""Seconds until an episode stored by another process is noticed."""

_LEASE_S = 120.0
_MOST = 32
_EACH = 16
_TENANTS_AT_ONCE = 4
_INDEX_S = 60.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_FIRST_POSTPONED_S = 15.0
_LONGEST_POSTPONED_S = 3600.0
_GIVEN_UP = 6  # tries after which a switch of the embedder no longer waits for an episode

_OF_THE_TEXT = frozenset(
    {
        *("model_bad_request", "model_context_too_long", "model_filtered"),
        "model_bad_response",
    }
)

log = structlog.get_logger(__name__)

_CLAIM = "SELECT tenant_id, episode_id, tries FROM claim_due_episode_work('embed', $1, $2, $3)"
_NEXT = "SELECT next_episode_work_s('embed')"
_READ = """
SELECT e.id, e.summary, i.embedder
FROM episode_search s
JOIN episodes e ON e.tenant_id = s.tenant_id AND e.id = s.episode_id
LEFT JOIN tenant_memory i ON i.tenant_id = s.tenant_id
WHERE s.tenant_id = $1 AND s.episode_id = ANY ($2)
"""
# Skips episodes no longer searched; the row lock makes changes of them wait.
_INSERT = """
INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, domain, task_type,
                             session_id, user_id, agent, task, result, whole)
SELECT tenant_id, episode_id, $3, at, outcome, domain, task_type, session_id, user_id, agent,
       $4::real[]::halfvec, $5::real[]::halfvec, $6::real[]::halfvec
FROM episode_search WHERE tenant_id = $1 AND episode_id = $2 FOR SHARE
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
UPDATE episode_work SET next_at = now() + make_interval(secs => $3), tries = tries - $4
WHERE tenant_id = $1 AND episode_id = ANY ($2) AND work = 'embed'
"""

# --- Another embedder ---------------------------------------------------------------------------

_PAGE = 256
_OTHERS = "SELECT tenants_of_other_embedders($1, 20) AS id"
_STATE = "SELECT embedder, leftovers FROM tenant_memory WHERE tenant_id = $1"
_WAITING = """
SELECT count(*) FROM (SELECT FROM episode_work WHERE tenant_id = $1 AND work = 'embed'
                      AND tries < $3 LIMIT $2) waiting
"""
_LACKING = """
SELECT s.episode_id FROM episode_search s
WHERE s.tenant_id = $1 AND s.episode_id > $4 AND NOT EXISTS (
    SELECT FROM episode_vectors v
    WHERE v.tenant_id = $1 AND v.episode_id = s.episode_id AND v.embedder = $2)
ORDER BY s.episode_id LIMIT $3
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
_LEFT_OVER = "UPDATE tenant_memory SET leftovers = $2 WHERE tenant_id = $1 AND leftovers <> $2"
_CLEAR = """
DELETE FROM episode_vectors WHERE tenant_id = $1 AND (episode_id, embedder) IN (
    SELECT episode_id, embedder FROM episode_vectors
    WHERE tenant_id = $1 AND embedder <> $2 LIMIT $3)
"""


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts of an episode to embed."""

    id: UUID
    task: str
    result: str
    whole: str


class EmbeddingWorker:
    """Worker for pending vectors.

    Each method does what is due, and returns the seconds until the next work. Any number of
    processes may run at a time.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        embedders: Embedders,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._pool = pool
        self._embedders = embedders
        self._clock = clock
        self._pause_s = 0.0
        self._down_until = float("-inf")
        self._indexed = {DIMENSION}
        self._reached: dict[UUID, UUID] = {}

    async def embed_due(self) -> float:
        """Embed some pending episodes of several tenants."""
        began = self._clock()
        if began < self._down_until:
            return self._down_until - began
        rows = await self._pool.fetch(_CLAIM, _LEASE_S, _MOST, _EACH)
        if not rows:
            seconds: float | None = await self._pool.fetchval(_NEXT)
            return float("inf") if seconds is None else max(0.0, seconds)
        of_tenant: dict[UUID, dict[UUID, int]] = defaultdict(dict)
        for row in rows:
            of_tenant[row["tenant_id"]][row["episode_id"]] = row["tries"]
        failures = [
            failure
            for some in _parts(list(of_tenant), _TENANTS_AT_ONCE)
            for failure in await asyncio.gather(
                *(self._embed_or_postpone(tenant, of_tenant[tenant]) for tenant in some)
            )
            if failure is not None
        ]
        if failures:
            return self._rest(failures[0])
        self._pause_s = 0.0
        return self._clock() - began  # leaves half of the time to others

    async def _embed_or_postpone(
        self, tenant_id: UUID, tries: Mapping[UUID, int]
    ) -> BottegaError | None:
        """Embed episodes, given their earlier tries; return the error if all of them fail."""
        try:
            await self._embed(tenant_id, list(tries))
            return None
        except (ModelError, UnavailableError) as caught:
            error: BottegaError = caught
        if not _may_be_of_the_text(error):
            # The embedder failed, not the texts: does not count as a try.
            await self._postpone(tenant_id, list(tries), self._next_pause_s(), uncounted=1)
            return error
        if len(tries) > 1:  # find the text that fails
            each = [
                await self._embed_or_postpone(tenant_id, {episode_id: number})
                for episode_id, number in tries.items()
            ]
            return error if all(each) else None
        ((episode_id, number),) = tries.items()
        wait_s = min(_LONGEST_POSTPONED_S, _FIRST_POSTPONED_S * 2.0 ** min(number, 20))
        await self._postpone(tenant_id, [episode_id], wait_s)
        log.warning("episode.not_embedded", episode_id=str(episode_id), error=error.detail)
        return error

    async def _embed(self, tenant_id: UUID, ids: Sequence[UUID]) -> None:
        async with acting_as(self._pool, tenant_id) as connection:
            rows = await connection.fetch(_READ, tenant_id, ids)
        found = [_texts(row["id"], Summary(**from_json(row["summary"]))) for row in rows]
        made = await self._all_made(rows[0]["embedder"], found) if found else {}
        inserts = [
            (tenant_id, each.id, name, *(row.tolist() for row in vectors[place]))
            for name, vectors in made.items()
            for place, each in enumerate(found)
        ]
        async with acting_as(self._pool, tenant_id) as connection:
            if made:
                await connection.execute(_FIRST, tenant_id, next(iter(made)))
                await connection.executemany(_INSERT, inserts)
                if rows[0]["embedder"] not in (None, *made):
                    await connection.execute(_LEFT_OVER, tenant_id, True)
            await connection.execute(_DONE, tenant_id, ids)

    async def _all_made(
        self, of_queries: str | None, found: Sequence[_Texts]
    ) -> Mapping[str, Vectors]:
        """Return vectors of episodes by embedder: the current one, then that of the queries."""
        name, vectors = await self._made(self._embedders.current, found)
        made = {name: vectors}
        # Until the switch, queries use the other embedder and must find new episodes, too.
        other = None if of_queries in (None, name) else self._embedders.named(of_queries)
        if other is not None:
            try:
                made |= [await self._made(other, found)]
            except (ModelError, UnavailableError) as error:
                log.info("embedder.left", embedder=of_queries, error=error.detail)
        return made

    async def _made(self, embedder: Embedder, found: Sequence[_Texts]) -> tuple[str, Vectors]:
        """Return an embedder's name, and its vectors of the episodes, shape (n, 3, d)."""
        texts = [text for each in found for text in (each.task, each.result, each.whole)]
        vectors = await embedder.embed(texts)
        if embedder.dimension not in self._indexed:
            ensure = "SELECT ensure_vector_index($1)"
            await self._pool.execute(ensure, embedder.dimension, timeout=_INDEX_S)
            self._indexed.add(embedder.dimension)
        return embedder.name, vectors.reshape(len(found), 3, embedder.dimension)

    async def _postpone(
        self, tenant_id: UUID, ids: Sequence[UUID], wait_s: float, *, uncounted: int = 0
    ) -> None:
        async with acting_as(self._pool, tenant_id) as connection:
            await connection.execute(_POSTPONE, tenant_id, ids, wait_s, uncounted)

    def _next_pause_s(self) -> float:
        return min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))

    def _rest(self, error: BottegaError) -> float:
        """Pause the use of the embedder, longer each time; return the seconds."""
        if not self._pause_s:
            log.warning("embedder.unavailable", error=error.detail)
        self._pause_s = self._next_pause_s()
        self._down_until = self._clock() + self._pause_s
        return self._pause_s

    async def change_over(self) -> float:
        """Embed all searched episodes with the current embedder, a page at a time.

        Then switch the tenant's queries to the current embedder, and delete the old vectors."""
        if self._clock() < self._down_until:
            return self._down_until - self._clock()
        if not await self._pool.fetch(_OTHERS, ""):
            return float("inf")  # there are no vectors: do not load the embedder
        try:
            await self._embedders.current.embed(["."])  # its name is final only after a call
        except (ModelError, UnavailableError) as error:
            return self._rest(error)
        name = self._embedders.current.name
        tenants = await self._pool.fetch(_OTHERS, name)
        for row in tenants:
            await self._change_over(row["id"], name)
        return 0.5 if tenants else float("inf")

    async def _change_over(self, tenant_id: UUID, name: str) -> None:
        async with acting_as(self._pool, tenant_id) as connection:
            state = await connection.fetchrow(_STATE, tenant_id)
            if state is None:
                return
            if state["embedder"] == name:
                await self._clear(connection, tenant_id, name)
                return
            await connection.execute(_LEFT_OVER, tenant_id, True)
            if await connection.fetchval(_WAITING, tenant_id, _PAGE, _GIVEN_UP) >= _PAGE:
                return
            if await self._order(connection, tenant_id, name):
                return
            if await connection.fetchval(_CHANGE_OVER, tenant_id, name, _GIVEN_UP):
                log.info("embedder.changed", tenant_id=str(tenant_id), embedder=name)

    async def _order(self, connection: asyncpg.Connection, tenant_id: UUID, name: str) -> bool:
        """Enqueue a page of episodes without vectors of an embedder; return false at the end."""
        reached = self._reached.get(tenant_id, UUID(int=0))
        rows = await connection.fetch(_LACKING, tenant_id, name, _PAGE, reached)
        ids = [row["episode_id"] for row in rows]
        if not ids:
            self._reached.pop(tenant_id, None)  # the next call starts from the beginning
            return False
        await connection.execute(_ORDER, tenant_id, ids)
        self._reached[tenant_id] = ids[-1]
        return True

    async def _clear(self, connection: asyncpg.Connection, tenant_id: UUID, name: str) -> None:
        """Delete vectors of other embedders.

        A worker with another embedder may have embedded some episodes only with that one; these are
        enqueued first."""
        status = await connection.execute(_CLEAR, tenant_id, name, 2 * _PAGE)
        if status == "DELETE 0" and not await self._order(connection, tenant_id, name):
            await connection.execute(_LEFT_OVER, tenant_id, False)


def _texts(episode_id: UUID, summary: Summary) -> _Texts:
    return _Texts(episode_id, summary.task, summary.result, summary.whole)


def _may_be_of_the_text(error: BottegaError) -> bool:
    """Return true if another text might succeed."""
    return isinstance(error, ModelError) and error.code in _OF_THE_TEXT


def _parts(items: Sequence[UUID], size: int) -> list[Sequence[UUID]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
