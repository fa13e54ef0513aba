"""Cache of each tenant's matcher, and the functions that retrieve and validate patterns.

Notifications of the database remove outdated matchers from the cache. While the connection for
notifications is down, every call reads the database. A new connection clears the cache.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import nlargest
from uuid import UUID
from weakref import WeakValueDictionary

import asyncpg
from cachetools import LRUCache

from bottega import metrics
from bottega.clock import Clock
from bottega.db.pages import PageItems, fetch_rows
from bottega.db.pool import acting_as
from bottega.events.listener import NotifyListener
from bottega.memory.patterns.evidence import Validation
from bottega.memory.patterns.matcher import Match, Matcher
from bottega.memory.patterns.pattern import (
    ON_FAILURE,
    Category,
    Features,
    Pattern,
    PatternState,
)
from bottega.memory.patterns.refinement import likeness, of_low_value, tally_of
from bottega.memory.patterns.store import (
    CHANNEL,
    COLUMNS,
    GIVEN_ARMS,
    PAGE,
    PatternStore,
    from_row,
)

MOST_KEPT = 100_000
"""Maximum number of patterns in all matchers; the least recently used is dropped first."""
LIVE = (PatternState.CANDIDATE, PatternState.VALIDATED)
_SIMILAR = (*LIVE, PatternState.IN_REVIEW)

# Selects the patterns for a tenant's matcher: validated patterns first, then by confidence.
_LIVE = f"""
SELECT {COLUMNS} FROM patterns p
WHERE p.tenant_id = $1 AND p.state IN ('VALIDATED', 'CANDIDATE')
ORDER BY p.state DESC, p.confidence DESC, p.id LIMIT 20000
"""  # noqa: S608 (constant texts)


_apart = ThreadPoolExecutor(2, "patterns")
"""Threads for long searches; a tenant has only one search at a time."""


@dataclass(frozen=True)
class PatternCache:
    """The patterns of all tenants; :meth:`store` changes a tenant's patterns in a transaction."""

    pool: asyncpg.Pool
    listener: NotifyListener
    clock: Clock
    _matchers: LRUCache[UUID, Matcher] = field(
        default_factory=lambda: LRUCache(
            MOST_KEPT, lambda matcher: min(MOST_KEPT, 1 + len(matcher))
        )
    )
    _loading: set[UUID] = field(default_factory=set)  # tenants unchanged since loading began
    _turns: WeakValueDictionary[UUID, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        self.listener.subscribe(CHANNEL, self._on_change)

    async def get(self, tenant_id: UUID, pattern_id: UUID) -> Pattern:
        """Return a complete pattern in its current version.

        Raises:
            NotFoundError: the tenant has no such pattern.
        """
        async with acting_as(self.pool, tenant_id) as connection:
            patterns = await self.store(connection, tenant_id).get_many([pattern_id])
        return patterns[pattern_id]

    async def page(
        self,
        tenant_id: UUID,
        *,
        states: Collection[PatternState] = tuple(PatternState),
        categories: Collection[Category] = tuple(Category),
        limit: int,
        after: UUID | None = None,
        descending: bool = False,
    ) -> PageItems[Pattern]:
        """List patterns in the order of their creation, after the pattern with the id ``after``."""
        where = tenant_id, GIVEN_ARMS, [*states], [*categories], after
        how = {"descending": descending, "by_index": True}
        async with acting_as(self.pool, tenant_id) as connection:
            rows = await fetch_rows(connection, PAGE, *where, limit=limit, **how)
        return PageItems(map(from_row, rows), more=rows.more)

    async def pages(
        self,
        tenant_id: UUID,
        states: Collection[PatternState] = LIVE,
        categories: Collection[Category] = tuple(Category),
    ) -> AsyncIterator[list[Pattern]]:
        """Yield all patterns of these states and categories, one page at a time.

        Pages are short, because a transaction that changes a page blocks runs that apply its
        patterns.
        """
        after: UUID | None = None
        while page := await self.page(
            tenant_id, states=states, categories=categories, limit=100, after=after
        ):
            yield page
            after = page[-1].key

    @asynccontextmanager
    async def changing(self, tenant_id: UUID) -> AsyncIterator[PatternStore]:
        """Open a transaction for changes; after it, drop the tenant's matcher in this process."""
        async with acting_as(self.pool, tenant_id) as connection:
            yield self.store(connection, tenant_id)
        self.forget(tenant_id)

    def store(self, connection: asyncpg.Connection, tenant_id: UUID) -> PatternStore:
        """Return a tenant's patterns in a transaction; call :meth:`forget` after its end."""
        return PatternStore(connection, tenant_id, self.clock())

    def forget(self, tenant_id: UUID) -> None:
        """Drop a tenant's matcher in this process at once, without waiting for the notification."""
        self._matchers.pop(tenant_id, None)
        self._loading.discard(tenant_id)

    def _on_change(self, payload: str | None) -> None:
        if payload is None:
            self._matchers.clear()
            self._loading.clear()
        else:
            with contextlib.suppress(ValueError):
                self.forget(UUID(payload))

    async def find_applicable(
        self,
        tenant_id: UUID,
        features: Features,
        *,
        category: Category | None = None,
        k: int = 5,
    ) -> list[Match]:
        """Return the validated patterns that apply to a task, best first.

        Args:
            category: category of the patterns. ``None``: if the features name a failure, the
                categories about failures; if not, all other categories.
        """
        of = _categories(features) if category is None else (category,)
        now = self.clock()
        return await self._found(
            tenant_id, lambda matcher: matcher.find(features, now=now, k=k, categories=of)
        )

    async def candidates(
        self,
        tenant_id: UUID,
        features: Features,
        draw: Callable[[Pattern], float] = lambda _: 0.0,
    ) -> list[Match]:
        """Return the candidates that apply to a task, the most promising first.

        The candidates are sorted by expected success rate (:attr:`Tally.expected`), and candidates
        with equal rates by ``draw``.

        Args:
            draw: a function that returns a random number from 0 to 1 for a pattern; the pattern
                with the smallest number is first.
        """
        of, now = _categories(features), self.clock()

        def order(match: Match) -> tuple[float, float, UUID]:
            tally = tally_of(match.pattern.evidence)
            return -tally.expected, draw(match.pattern), match.pattern.key

        candidate = PatternState.CANDIDATE
        matches = await self._found(
            tenant_id,
            lambda matcher: [*matcher.ranked(candidate, features, now=now, categories=of)],
        )
        return sorted(matches, key=order)

    async def _found(self, tenant_id: UUID, find: Callable[[Matcher], list[Match]]) -> list[Match]:
        """Run a search; use a thread if the search might block the event loop for too long."""
        matcher = await self.matcher(tenant_id)
        if matcher.tests <= 2_000:
            return find(matcher)
        async with self._turns.setdefault(tenant_id, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(_apart, find, matcher)

    async def matcher(self, tenant_id: UUID) -> Matcher:
        """Return the matcher of a tenant's patterns, which may lack the latest changes."""
        loading = asyncio.ensure_future(self._matcher(tenant_id))
        # The callback retrieves the error, so asyncio does not log it.
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(loading)  # loading continues if the caller is cancelled

    async def _matcher(self, tenant_id: UUID) -> Matcher:
        async with self._turns.setdefault(tenant_id, asyncio.Lock()):
            if tenant_id in self._matchers and self.listener.hears(CHANNEL):
                metrics.cache_hits.labels("matchers").inc()
                return self._matchers[tenant_id]
            self._loading.add(tenant_id)
            async with acting_as(self.pool, tenant_id) as connection:
                rows = await connection.fetch(_LIVE, tenant_id)
            matcher = await asyncio.to_thread(lambda: Matcher(map(from_row, rows)))
            if tenant_id in self._loading:
                self._matchers[tenant_id] = matcher
            return matcher

    async def validate(
        self, tenant_id: UUID, ids: Sequence[UUID] | None = None
    ) -> list[Validation]:
        """Validate patterns, store the results and update the states.

        Args:
            ids: ids of the patterns; ``None``: all candidates and validated patterns, with one
                transaction per page.

        Raises:
            NotFoundError: the tenant does not have one of the patterns.
        """
        if ids is None:
            pages = [[each.key for each in page] async for page in self.pages(tenant_id)]
            return [each for page in pages for each in await self.validate(tenant_id, page)]
        async with acting_as(self.pool, tenant_id) as connection:
            return await self.store(connection, tenant_id).judge(ids)

    async def similar(
        self, tenant_id: UUID, pattern: Pattern, k: int
    ) -> list[tuple[Pattern, float]]:
        """Return the most similar patterns of the same category, each with its :func:`likeness`.

        The most similar pattern is first. The result omits deprecated patterns."""
        best: list[tuple[Pattern, float]] = []
        async for page in self.pages(tenant_id, _SIMILAR, [pattern.category]):
            best += [(each, likeness(pattern, each)) for each in page if each.id != pattern.id]
            best = nlargest(k, best, key=lambda each: (each[1], -each[0].key.int))
        return best

    async def prune_low_value(self, tenant_id: UUID) -> list[UUID]:
        """Deprecate candidates that do harm, have no effect or rarely apply; return their ids."""
        pruned: list[UUID] = []
        async for page in self.pages(tenant_id, [PatternState.CANDIDATE]):
            async with self.changing(tenant_id) as store:
                for each in (await store.get_many([one.key for one in page], lock=True)).values():
                    if why := of_low_value(each, store.now):
                        await store.deprecate(each.key, why)
                        pruned.append(each.key)
        return pruned


def _categories(features: Features) -> frozenset[Category]:
    failed = "failure_signature" in features or "error_type" in features
    return ON_FAILURE if failed else frozenset(Category) - ON_FAILURE
