"""Episodic memory, which stores, reads and searches episodes."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega import metrics
from bottega.clock import Clock
from bottega.db.pages import PageItems, fetch_rows
from bottega.db.pool import acting_as
from bottega.errors import NotFoundError
from bottega.events.data import Why
from bottega.logger import Logger
from bottega.memory.episodes import search
from bottega.memory.episodes.embedders import EmbeddedQuery, Embedders
from bottega.memory.episodes.episode import Episode, EpisodeFilter, StorageState, ended_before
from bottega.memory.episodes.scope import MemoryOptions, Reach, Scope
from bottega.memory.episodes.scoring import LEAST_WORDS, Parts, is_relevant, score
from bottega.memory.episodes.search import ANY, By, Place
from bottega.memory.text.content import ContentWords, content_words
from bottega.objects import Objects

log = Logger(__name__)

_STORE = "SELECT store_episode($1, $2)"
_BODIES = "SELECT part, content, object_key FROM read_episode_bodies($1::jsonb, $2)"
_PARTS = """
SELECT episode_id, content FROM episode_parts
WHERE tenant_id = $1 AND part = $2 AND episode_id = ANY (episodes_within($3::jsonb, $4))
"""
_MARK = "SELECT mark_episode_deleted($1, $2)"


@dataclass(frozen=True, slots=True)
class Hit:
    """An episode that a search found, without the episode's bodies.

    Attributes:
        words: content words that the episode and the query have in common.
        floor: minimum cosine that counts as relevant; ``None``: no vectors were compared.
        relevant: see :func:`is_relevant`.
    """

    episode: Episode
    parts: Parts
    words: Sequence[str] = ()
    floor: float | None = None
    relevant: bool = False

    @property
    def score(self) -> float:
        return self.parts.score

    @property
    def relevance(self) -> dict[str, Any]:
        """Words that the episode and the query have in common, and the cosine of their vectors."""
        return {name: value for name, value in self.why.items() if name != "floor"}

    @property
    def why(self) -> Why:
        """Common words of the episode and the query, the cosine of their vectors, and the floor."""
        cosine, floor = self.parts.cosine, self.floor
        return {
            "words": list(self.words[:8]),
            "cosine": None if cosine is None else round(cosine, 4),
            "floor": None if floor is None else round(floor, 4),
        }


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search, best first.

    Attributes:
        by_meaning: true if vectors that represent meaning were compared.
        by_spelling: true if vectors that represent only spelling were compared. If ``by_meaning``
            and ``by_spelling`` are false, the search compared only words.
    """

    hits: list[Hit]
    by_meaning: bool = False
    by_spelling: bool = False


def _hit(
    episode: Episode,
    parts: Parts,
    content: ContentWords,
    places: frozenset[int],
    query: EmbeddedQuery,
    *,
    words: bool,
) -> Hit:
    by_meaning = query.compared == "meaning"
    shared = content.count(places) if words else 0
    floor = None
    if query.floor is not None:
        with_words = by_meaning and shared >= LEAST_WORDS
        floor = query.floor.with_words if with_words else query.floor.alone
    # A query without content words, such as a greeting, has no topic, so no episode is relevant.
    relevant = content.count() > 0 and is_relevant(
        shared, parts.cosine, floor, by_meaning=by_meaning or not words
    )
    return Hit(episode, parts, content.some(places), floor, relevant)


_TOUCH = """
UPDATE episode_state SET access_count = access_count + $3, last_access = greatest(last_access, $4)
WHERE tenant_id = $1 AND episode_id = $2
"""


@dataclass(slots=True)
class AccessCounter:
    """Numbers of episode accesses, collected in memory and written in one transaction per tenant.

    So a search writes nothing, and the row of a frequently read episode changes at most once a
    second. If a process dies, it loses the counts of the last second.
    """

    pool: asyncpg.Pool
    clock: Clock
    _waiting: dict[UUID, Counter[UUID]] = field(default_factory=lambda: defaultdict(Counter))

    def touch(self, tenant_id: UUID, ids: Iterable[UUID]) -> None:
        waiting = self._waiting[tenant_id]
        if len(waiting) < 10_000:  # the counter ignores further episodes
            # a list, because update() would add up a mapping's values
            waiting.update(list(ids))

    async def run(self, every_s: float = 1.0) -> None:
        """Write the counts every ``every_s`` seconds and when the task is cancelled."""
        try:
            while True:
                await asyncio.sleep(every_s)
                await self.flush()
        finally:
            await self.flush()

    async def flush(self) -> None:
        """Write the counts now; discard counts that cannot be written."""
        waiting, self._waiting = self._waiting, defaultdict(Counter)
        try:
            async with asyncio.timeout(5):
                for tenant_id, times in waiting.items():
                    # Updates in the order of ids prevent deadlocks between transactions. Each id
                    # has its own statement, because a join may compare all episodes with each id.
                    now = self.clock()
                    rows = [(tenant_id, one, count, now) for one, count in sorted(times.items())]
                    async with acting_as(self.pool, tenant_id) as connection:
                        await connection.executemany(_TOUCH, rows)
        # the error is only logged, so that later counts are still written
        except Exception as error:
            log.warning("memory.accesses_lost", error=str(error))


@dataclass(slots=True)
class EpisodicMemory:
    """Episodes of all tenants.

    Each read counts as an access; :attr:`accesses` writes the count about a second later.
    """

    pool: asyncpg.Pool
    _: KW_ONLY
    embedders: Embedders
    clock: Clock
    objects: Objects | None = None
    options: MemoryOptions = MemoryOptions()
    accesses: AccessCounter = field(init=False)

    def __post_init__(self) -> None:
        self.accesses = AccessCounter(self.pool, self.clock)

    async def store(
        self, tenant_id: UUID, episode: Episode, *, on: asyncpg.Connection | None = None
    ) -> UUID:
        """Store an episode; do nothing if an episode with this id is stored.

        Searches by words find the episode at once. Searches by meaning find it after it was
        embedded.
        """
        async with acting_as(self.pool, tenant_id, on) as connection:
            row = to_json(episode.to_row()).decode()
            episode_id: UUID = await connection.fetchval(_STORE, tenant_id, row)
            await search.tell(connection)
        return episode_id

    async def get(
        self, tenant_id: UUID, scope: Scope, episode_id: UUID, *, bodies: bool = True
    ) -> Episode:
        """Return an episode within the scope, and count the access.

        Args:
            bodies: true: also read the bodies, from the database or the object store.

        Raises:
            NotFoundError: the tenant has no such episode, or the episode is deleted or out of
                scope.
            UnavailableError: a body cannot be read; a call with ``bodies=False`` does not raise
                this error.
        """
        async with acting_as(self.pool, tenant_id) as connection:
            episode = (await search.load(connection, scope, [episode_id])).get(episode_id)
            if episode is None:
                raise NotFoundError(f"there is no episode {episode_id}")
            read = await connection.fetch(_BODIES, scope.document, episode_id) if bodies else ()
        self.accesses.touch(tenant_id, [episode_id])
        here = {row["part"]: from_json(row["content"]) for row in read if row["content"]}
        keys = {row["part"]: row["object_key"] for row in read if row["object_key"]}
        return replace(episode, **here, **await self._fetched(keys))

    async def _fetched(self, keys: dict[str, str]) -> dict[str, Any]:
        if not keys:
            return {}
        assert self.objects is not None, "a body is in an object store, but none is configured"
        contents = await asyncio.gather(*map(self.objects.get, keys.values()))
        return {part: from_json(raw) for part, raw in zip(keys, contents, strict=True)}

    async def semantic_search(
        self,
        tenant_id: UUID,
        scope: Scope,
        query: str,
        *,
        k: int = 5,
        where: EpisodeFilter = ANY,
        by: By = "task",
        domain: str | None = None,
        words: bool = True,
    ) -> Found:
        """Return the episodes within the scope that best match a query, by words and by vectors.

        Args:
            by: the text of an episode; the search compares the vector of this text.
            words: false: the search compares words only if the embedder does not answer.
            domain: domain of the current task; episodes of this domain score a little higher.
        """
        if scope.reach is Reach.RUN:
            return Found([])
        now = self.clock()
        deadline_s = self.options.vector_deadline_ms / 1000
        content = content_words(query)
        asked = await self.embedders.embed_query(tenant_id, query, deadline_s)
        candidates = await search.candidates(
            self.pool,
            scope,
            content if words or asked.vector is None else ContentWords(()),
            asked.vector,
            embedder=asked.embedder,
            aged_before=ended_before(StorageState.AGED, now),
            where=where,
            by=by,
            limit=max(k, 20),
            tenant_id=tenant_id,
        )
        best = score(candidates, self.options.scoring, now, domain)[:k]
        ids = [candidate.episode_id for candidate, _ in best]
        loaded = await search.load(self.pool, scope, ids, tenant_id=tenant_id) if ids else {}
        self.accesses.touch(tenant_id, loaded)
        metrics.episode_searches.labels(asked.compared).inc()
        hits = [
            _hit(loaded[candidate.episode_id], parts, content, candidate.words, asked, words=words)
            for candidate, parts in best
            if candidate.episode_id in loaded
        ]
        return Found(hits, asked.compared == "meaning", asked.compared == "spelling")

    async def parts(
        self, tenant_id: UUID, scope: Scope, hits: Sequence[Hit], part: str
    ) -> list[tuple[Hit, dict[str, Any]]]:
        """Return the work of a node (``GRAPH/NODE``) or sub-agent in each of the found episodes."""
        if not hits:
            return []
        ids = [hit.episode.id for hit in hits]
        async with acting_as(self.pool, tenant_id) as connection:
            found = dict(await connection.fetch(_PARTS, tenant_id, part, scope.document, ids))
        return [(hit, from_json(text)) for hit in hits if (text := found.get(hit.episode.id))]

    async def structured_search(
        self,
        tenant_id: UUID,
        scope: Scope,
        where: EpisodeFilter,
        *,
        limit: int,
        after: Place | None = None,
        descending: bool = False,
    ) -> PageItems[Episode]:
        """List a page of searchable episodes after a position, sorted by end time, then by id.

        This method does not count accesses."""
        if scope.reach is Reach.RUN:
            return PageItems([], more=False)
        params = scope.document, search.conditions(where), *(after or (None, None))
        async with acting_as(self.pool, tenant_id) as connection:
            rows = await fetch_rows(connection, search.LIST[descending], *params, limit=limit)
        return PageItems(map(search.to_episode, rows), more=rows.more)

    async def recent(
        self, tenant_id: UUID, scope: Scope, n: int, where: EpisodeFilter = ANY
    ) -> list[Episode]:
        """Return the ``n`` episodes that ended last, latest first."""
        episodes = await self.structured_search(tenant_id, scope, where, limit=n, descending=True)
        self.accesses.touch(tenant_id, [episode.id for episode in episodes if episode.id])
        return episodes

    async def similar_failures(
        self, tenant_id: UUID, scope: Scope, signature: str, k: int, where: EpisodeFilter = ANY
    ) -> list[Episode]:
        """Return episodes that have a failure with this signature, latest first.

        See :mod:`bottega.memory.text.signature`.
        """
        return await self.recent(tenant_id, scope, k, replace(where, failure_signature=signature))

    async def mark_deleted(
        self, tenant_id: UUID, episode_id: UUID, *, on: asyncpg.Connection | None = None
    ) -> bool:
        """Mark an episode as deleted: nobody can find or read it, and later a job removes it.

        Returns:
            False if the episode was already marked as deleted.

        Raises:
            NotFoundError: the tenant has no such episode.
        """
        async with acting_as(self.pool, tenant_id, on) as connection:
            marked: bool | None = await connection.fetchval(_MARK, episode_id, self.clock())
        if marked is None:
            raise NotFoundError(f"there is no episode {episode_id}")
        return marked
