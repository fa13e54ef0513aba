"""Episodic memory: stores, reads and searches episodes."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import structlog
from pydantic_core import from_json

from bottega import metrics
from bottega.clock import Clock, monotonic
from bottega.db.engine import acting_as
from bottega.db.pages import PageItems
from bottega.errors import BottegaError, NotFoundError, UnavailableError
from bottega.memory.episodes import rows, search
from bottega.memory.episodes.access_counter import AccessCounter
from bottega.memory.episodes.embedders import Embedders, Patience
from bottega.memory.episodes.episode import Episode, EpisodeFilter, StorageState
from bottega.memory.episodes.objects import Objects
from bottega.memory.episodes.options import MemoryOptions
from bottega.memory.episodes.scope import Reach, Scope
from bottega.memory.episodes.scoring import Candidate, Parts, is_relevant, score
from bottega.memory.episodes.search import ANY, AnotherEmbedderError, By, Place

if TYPE_CHECKING:  # numpy is slow to import
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

_WORDS_SHOWN = 8

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hit:
    """Episode found by a search, without its bodies.

    Attributes:
        floor: least cosine that is better than chance; ``None`` if no vectors were compared.
    """

    episode: Episode
    score: float
    parts: Parts
    floor: float | None = None

    @property
    def relevant(self) -> bool:
        """True if it is better than an episode drawn by chance; agents get no other."""
        return is_relevant(self.parts, inf if self.floor is None else self.floor)

    @property
    def why(self) -> dict[str, Any]:
        """Telling words that it shares with the query; its cosine, and the least that counts."""
        cosine, floor = self.parts.cosine, self.floor
        return {
            "words": list(self.parts.words[:_WORDS_SHOWN]),
            "cosine": None if cosine is None else round(cosine, 4),
            "floor": None if floor is None else round(floor, 4),
        }


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search, best first.

    Attributes:
        by_meaning: true if vectors that know meaning were compared.
        by_spelling: true if vectors that know only spelling were; if both are false, only the
            query's words counted.
    """

    hits: list[Hit]
    by_meaning: bool
    by_spelling: bool = False


@dataclass(frozen=True, slots=True)
class _Query:
    """A query's vector, its embedder, and the least cosine that counts."""

    vector: "Vector"
    embedder: str
    floor: float
    by_spelling: bool


class EpisodicMemory:
    """Episodes of all tenants.

    Reads count as accesses, which :attr:`accesses` writes about a second later.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        *,
        embedders: Embedders,
        objects: Objects | None = None,
        options: MemoryOptions | None = None,
        clock: Clock,
    ) -> None:
        self.accesses = AccessCounter(pool, clock)
        self._pool = pool
        self._embedders = embedders
        self._objects = objects
        self._options = options or MemoryOptions()
        self._patience = Patience(self._options.vector_deadline_ms / 1000, monotonic)
        self.clock = clock

    async def store(
        self, tenant_id: UUID, episode: Episode, *, on: asyncpg.Connection | None = None
    ) -> UUID:
        """Store an episode; do nothing if its id is stored already.

        It can be searched by words at once, and by meaning after it was embedded.
        """
        async with acting_as(self._pool, tenant_id, on) as connection:
            return await rows.store(connection, tenant_id, episode)

    async def get(
        self, tenant_id: UUID, scope: Scope, episode_id: UUID, *, bodies: bool = True
    ) -> Episode:
        """Return an episode within the scope, and count an access.

        Args:
            bodies: also read the bodies, from the database or the object store.

        Raises:
            NotFoundError: unknown, deleted, outside of the scope, or of another tenant.
            UnavailableError: the object store cannot be reached.
        """
        parts: dict[str, Any] = {}
        keys: dict[str, str] = {}
        async with acting_as(self._pool, tenant_id) as connection:
            found = (await rows.load(connection, scope, [episode_id])).get(episode_id)
            if found is None:
                raise NotFoundError(f"there is no episode {episode_id}")
            if bodies:
                parts, keys = await rows.contents(connection, scope, episode_id)
        self.accesses.count(tenant_id, [episode_id])
        return replace(found, **parts, **await self._fetched(keys))

    async def _fetched(self, keys: dict[str, str]) -> dict[str, Any]:
        """Read bodies from the object store."""
        if not keys:
            return {}
        assert self._objects is not None, "a body is in an object store, but none is configured"
        try:
            contents = await asyncio.gather(*map(self._objects.get, keys.values()))
        except NotFoundError:  # the episode exists and refers to it
            raise UnavailableError(
                f"the {' or the '.join(keys)} of this episode is missing in the object store: "
                "restore it, or correct BOTTEGA_OBJECTS_URL; body=false reads the rest",
                code="object_store",
            ) from None
        return {part: from_json(raw) for part, raw in zip(keys, contents, strict=True)}

    @property
    def pool(self) -> asyncpg.Pool:
        """Connections to the database of the episodes."""
        return self._pool

    async def search(
        self,
        tenant_id: UUID,
        scope: Scope,
        query: str,
        *,
        k: int = 5,
        where: EpisodeFilter = ANY,
        by: By = "task",
        domain: str | None = None,
    ) -> Found:
        """Return the episodes within the scope that best match a query, by words and by meaning.

        Args:
            by: the vector of episodes to compare.
            domain: of the current task; raises the score of its episodes a little.
        """
        if scope.reach is Reach.RUN:
            return Found([], by_meaning=False)
        now = self.clock()
        found, asked = await self._candidates(tenant_id, scope, query, k, where, by, now)
        metrics.episode_searches.labels(_compared(asked)).inc()
        best = score(found, self._options.scoring, now, domain)[:k]
        floor = None if asked is None else asked.floor
        ids = [each.candidate.episode_id for each in best]
        loaded = await rows.load_found(self._pool, tenant_id, scope, ids) if ids else {}
        self.accesses.count(tenant_id, loaded)
        hits = [
            Hit(loaded[each.candidate.episode_id], each.score, each.parts, floor)
            for each in best
            if each.candidate.episode_id in loaded
        ]
        how = _compared(asked)
        return Found(hits, by_meaning=how == "meaning", by_spelling=how == "spelling")

    async def _candidates(
        self,
        tenant_id: UUID,
        scope: Scope,
        query: str,
        k: int,
        where: EpisodeFilter,
        by: By,
        now: datetime,
    ) -> tuple[list[Candidate], _Query | None]:
        """Return the candidates for a query, and the vector that they were compared with."""
        options = self._options

        async def ask() -> tuple[list[Candidate], _Query | None]:
            asked = await self._embedded(tenant_id, query)
            found = await search.candidates(
                self._pool,
                scope,
                query,
                None if asked is None else asked.vector,
                embedder=None if asked is None else asked.embedder,
                aged_before=options.ages.begins(StorageState.AGED, now),
                where=where,
                by=by,
                limit=max(k, options.candidates),
                aged_cosine=options.aged_cosine,
                tenant_id=tenant_id,
            )
            return found, asked

        try:
            return await ask()
        except AnotherEmbedderError:
            self._embedders.forget(tenant_id)
            return await ask()

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
    ) -> list[Hit]:
        """Return the hits of :meth:`search`."""
        found = await self.search(tenant_id, scope, query, k=k, where=where, by=by, domain=domain)
        return found.hits

    async def structured_search(
        self,
        tenant_id: UUID,
        scope: Scope,
        where: EpisodeFilter,
        *,
        limit: int,
        after: Place | None = None,
        descending: bool = False,
    ) -> list[Episode]:
        """Return up to ``limit`` episodes behind ``after``, by end time, then id.

        Does not count as an access."""
        if scope.reach is Reach.RUN:
            return []
        async with acting_as(self._pool, tenant_id) as connection:
            ids = await search.structured(
                connection, scope, where, limit=limit, after=after, descending=descending
            )
            loaded = await rows.load(connection, scope, ids)
        return [loaded[each] for each in ids if each in loaded]

    async def page(
        self,
        tenant_id: UUID,
        scope: Scope,
        where: EpisodeFilter,
        *,
        limit: int,
        after: Place | None = None,
        descending: bool = False,
    ) -> PageItems[Episode]:
        """List a page of episodes behind ``after``, by end time, then id."""
        if scope.reach is Reach.RUN:
            return PageItems(more=False)
        async with acting_as(self._pool, tenant_id) as connection:
            ids = await search.structured(
                connection, scope, where, limit=limit + 1, after=after, descending=descending
            )
            return await rows.load_page(connection, scope, ids, limit=limit)

    async def recent(
        self, tenant_id: UUID, scope: Scope, n: int, where: EpisodeFilter = ANY
    ) -> list[Episode]:
        """Return the ``n`` episodes that ended last, latest first."""
        found = await self.structured_search(tenant_id, scope, where, limit=n, descending=True)
        self.accesses.count(tenant_id, [episode.id for episode in found if episode.id])
        return found

    async def similar_failures(
        self, tenant_id: UUID, scope: Scope, signature: str, k: int, where: EpisodeFilter = ANY
    ) -> list[Episode]:
        """Return episodes with a signature (:mod:`bottega.memory.text.signature`), latest first."""
        return await self.recent(tenant_id, scope, k, where.but(failure_signature=signature))

    async def touch(self, tenant_id: UUID, ids: Sequence[UUID]) -> None:
        """Count an access of each episode, and write it now."""
        async with acting_as(self._pool, tenant_id) as connection:
            await rows.touch(connection, tenant_id, Counter(ids), self.clock())

    async def mark_deleted(
        self, tenant_id: UUID, episode_id: UUID, *, on: asyncpg.Connection | None = None
    ) -> bool:
        """Mark an episode as deleted: it is no longer found or read, and is purged later.

        Returns:
            false if it was marked already.

        Raises:
            NotFoundError: unknown, or of another tenant.
        """
        async with acting_as(self._pool, tenant_id, on) as connection:
            marked = await rows.mark_deleted(connection, episode_id, self.clock())
        if marked is None:
            raise NotFoundError(f"there is no episode {episode_id}")
        return marked

    async def _embedded(self, tenant_id: UUID, query: str) -> _Query | None:
        """Return the query's vector, or nothing if embedding fails."""
        from bottega.memory.text.embeddings import by_spelling

        embedder = await self._embedders.of_queries(tenant_id)
        if embedder is None:
            return None
        try:
            vectors = await self._patience.embed(embedder, query)
        except (TimeoutError, BottegaError) as error:
            log.warning("memory.query_not_embedded", error=str(error) or type(error).__name__)
            return None
        floor = await self._embedders.floor(tenant_id, embedder, vectors[0])
        return _Query(vectors[0], embedder.name, floor, by_spelling(embedder))


def _compared(asked: _Query | None) -> str:
    """Return what a search compared besides words: ``meaning``, ``spelling``, or only ``words``."""
    if asked is None:
        return "words"
    return "spelling" if asked.by_spelling else "meaning"
