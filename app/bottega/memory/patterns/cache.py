"""The pattern cache: judges and retrieves patterns."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from heapq import nlargest
from uuid import UUID
from weakref import WeakValueDictionary

import asyncpg

from bottega.clock import Clock
from bottega.db.engine import acting_as
from bottega.db.pages import PageItems
from bottega.memory.episodes.options import LearningOptions
from bottega.memory.patterns import application_rows, baselines, rows
from bottega.memory.patterns.evidence import Validation
from bottega.memory.patterns.matcher import Match, Matcher
from bottega.memory.patterns.matcher_cache import MatcherCache
from bottega.memory.patterns.pattern import (
    ON_FAILURE,
    Application,
    Baseline,
    Category,
    Features,
    Pattern,
    PatternState,
)
from bottega.memory.patterns.refinement import Similar, likeness
from bottega.memory.patterns.rows import EVERY_PATTERN, PatternFilter
from bottega.memory.patterns.store import PatternStore, all_of

_PAGE = 100
"""Patterns per transaction; short, because it blocks the applications of their runs."""
_AT_ONCE = 2_000  # patterns and tests in a search without a thread
_TRIED = 200  # most candidates that are compared for a task
LIVE = PatternFilter(states=(PatternState.CANDIDATE, PatternState.VALIDATED))
_KEPT = (PatternState.CANDIDATE, PatternState.VALIDATED, PatternState.IN_REVIEW)

_apart = ThreadPoolExecutor(2, "patterns")
"""Searches that take longer; one at a time per tenant."""


class PatternCache:
    """The patterns of all tenants.

    A method with ``on`` can join a transaction of the tenant's.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        *,
        matchers: MatcherCache,
        options: LearningOptions | None = None,
        clock: Clock,
    ) -> None:
        self.options = options or LearningOptions()
        self.clock = clock
        self._pool = pool
        self._matchers = matchers
        self._turns: WeakValueDictionary[UUID, asyncio.Lock] = WeakValueDictionary()

    # --- One ----------------------------------------------------------------------------------

    async def get(self, tenant_id: UUID, pattern_id: UUID) -> Pattern:
        """Return a complete pattern in its current version.

        Raises:
            NotFoundError: unknown, or another tenant's.
        """
        return (await self.get_many(tenant_id, [pattern_id]))[pattern_id]

    async def get_many(
        self, tenant_id: UUID, ids: Sequence[UUID], *, on: asyncpg.Connection | None = None
    ) -> dict[UUID, Pattern]:
        """Return several patterns by id.

        Raises:
            NotFoundError: one of them is unknown, or another tenant's.
        """
        async with acting_as(self._pool, tenant_id, on) as connection:
            found = await rows.load(connection, tenant_id, ids)
        all_of(found, ids)
        return found

    async def page(
        self,
        tenant_id: UUID,
        where: PatternFilter = EVERY_PATTERN,
        *,
        limit: int,
        after: UUID | None = None,
        descending: bool = False,
    ) -> PageItems[Pattern]:
        """List patterns in the order of their creation, after the one with the id ``after``."""
        async with acting_as(self._pool, tenant_id) as connection:
            ids = await rows.page(
                connection, tenant_id, where, limit=limit + 1, after=after, descending=descending
            )
            return await rows.load_page(connection, tenant_id, ids, limit=limit)

    @asynccontextmanager
    async def changing(self, tenant_id: UUID) -> AsyncIterator[PatternStore]:
        """Begin a transaction for changes; at its end, reload the patterns here."""
        async with acting_as(self._pool, tenant_id) as connection:
            yield self.store(connection, tenant_id)
        self.forget(tenant_id)

    def store(self, connection: asyncpg.Connection, tenant_id: UUID) -> PatternStore:
        """Return the changes in a transaction of the tenant's; call :meth:`forget` after it."""
        return PatternStore(connection, tenant_id, self.options, self.clock())

    def forget(self, tenant_id: UUID) -> None:
        """Reload a tenant's patterns in this process now, without waiting for the notification."""
        self._matchers.forget(tenant_id)

    # --- Which apply --------------------------------------------------------------------------

    async def find_applicable(
        self,
        tenant_id: UUID,
        features: Features,
        *,
        category: Category | None = None,
        failure_signature: str | None = None,
        k: int = 5,
    ) -> list[Match]:
        """Return the validated patterns that apply to a task, best first.

        Args:
            category: ``None``: those about failures if the features name one, else the others.
            failure_signature: of the failure; it becomes a feature.
        """
        features_of_task, categories = _asked(features, category, failure_signature)
        matcher = await self._matchers.of(tenant_id)
        find = partial(matcher.find, features_of_task, now=self.clock(), k=k, categories=categories)
        return await self._found(tenant_id, matcher, find)

    async def candidates(
        self,
        tenant_id: UUID,
        features: Features,
        *,
        category: Category | None = None,
        failure_signature: str | None = None,
        draw: Callable[[Pattern], float] | None = None,
    ) -> list[Match]:
        """Return the candidates that apply to a task, the most promising first.

        They are ordered by the expected success of the next application, then by ``draw``.

        Args:
            category, failure_signature: as of :meth:`find_applicable`.
            draw: a random number from 0 to 1 per pattern; the smallest comes first.
        """
        features_of_task, categories = _asked(features, category, failure_signature)
        matcher = await self._matchers.of(tenant_id)
        find = partial(
            matcher.candidates,
            features_of_task,
            now=self.clock(),
            categories=categories,
            most=_TRIED,
        )
        found = await self._found(tenant_id, matcher, find)
        if len(found) < 2:
            return found
        async with acting_as(self._pool, tenant_id) as connection:
            ids = [each.pattern.key for each in found]
            tallies = await application_rows.tallies(connection, tenant_id, ids)
        return sorted(
            found,
            key=lambda each: (
                -(tallies[each.pattern.key].good + 1) / (tallies[each.pattern.key].n + 2),
                0.0 if draw is None else draw(each.pattern),
                each.pattern.key,
            ),
        )

    async def _found(
        self, tenant_id: UUID, matcher: Matcher, find: Callable[[], list[Match]]
    ) -> list[Match]:
        """Search; in a thread if testing the conditions of all patterns might hold up others."""
        if matcher.tests <= _AT_ONCE:
            return find()
        turn = self._turns.setdefault(tenant_id, asyncio.Lock())
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(_apart, find)

    async def alternatives(
        self, tenant_id: UUID, patterns: Sequence[Pattern]
    ) -> dict[UUID, list[str]]:
        """Return the names of each pattern's alternatives that are in use or on trial."""
        if not any(each.guide.alternatives for each in patterns):
            return {each.key: [] for each in patterns}
        matcher = await self._matchers.of(tenant_id)
        return {each.key: matcher.names(each.guide.alternatives) for each in patterns}

    async def baselines(
        self,
        tenant_id: UUID,
        patterns: Sequence[Pattern],
        features: Features,
        *,
        on: asyncpg.Connection | None = None,
    ) -> dict[UUID, Baseline]:
        """Return the known success rate of similar tasks without each of the patterns."""
        async with acting_as(self._pool, tenant_id, on) as connection:
            return await baselines.of(connection, tenant_id, patterns, features)

    # --- Evidence -----------------------------------------------------------------------------

    async def record_application(
        self,
        tenant_id: UUID,
        applications: Iterable[Application],
        *,
        on: asyncpg.Connection | None = None,
    ) -> int:
        """Store applications of patterns. Return the number of new or changed ones.

        A repeated one changes nothing; a later outcome of an episode replaces the earlier one.
        Ignored, as no evidence, are: episodes that the pattern was found in; episodes of trust 1;
        cancelled, quarantined and deleted ones; unknown patterns and versions. A validated pattern
        that does worse or harm goes into review at once.
        """
        of: dict[tuple[UUID, UUID | int], Application] = {
            (each.pattern_id, each.episode_id or n): each for n, each in enumerate(applications)
        }
        if not of:
            return 0
        async with acting_as(self._pool, tenant_id, on) as connection:
            ids = {each.pattern_id for each in of.values()}
            held = await rows.hold(connection, tenant_id, ids)
            touched = await application_rows.record(connection, tenant_id, [*of.values()])
            patterns = [held[each] for each in sorted(set(touched))]
            await self.store(connection, tenant_id).let_fall(patterns)
        return len(touched)

    async def validate(
        self, tenant_id: UUID, ids: Sequence[UUID] | None = None
    ) -> list[Validation]:
        """Judge patterns, store the results and update the states; a transaction per page.

        Args:
            ids: ``None``: all candidates and validated patterns.

        Raises:
            NotFoundError: one of them is unknown, or another tenant's.
        """
        found: list[Validation] = []
        async for page in self.pages(tenant_id, ids):
            async with acting_as(self._pool, tenant_id) as connection:
                judged = await self.store(connection, tenant_id).judge(page)
            if ids is not None:
                all_of({each.pattern_id for each in judged}, page)
            found += judged
        return found

    # --- Fewer --------------------------------------------------------------------------------

    async def similar(self, tenant_id: UUID, pattern: Pattern, k: int) -> list[Similar]:
        """Return the most similar patterns of the same category, best first; no deprecated ones."""
        where = PatternFilter(states=_KEPT, categories=(pattern.category,))
        best: list[Similar] = []
        after: UUID | None = None
        while page := await self.page(tenant_id, where, limit=_PAGE, after=after):
            found = [Similar(each, likeness(pattern, each)) for each in page]
            best += [each for each in found if each.pattern.id != pattern.id]
            best = nlargest(k, best, key=lambda each: (each.likeness, -each.pattern.key.int))
            after = page[-1].key
        return best

    async def prune_low_value(self, tenant_id: UUID) -> list[UUID]:
        """Deprecate candidates that harm, show no effect, or hardly apply. Return their ids."""
        pruned: list[UUID] = []
        async for page in self.pages(tenant_id, None):
            async with acting_as(self._pool, tenant_id) as connection:
                pruned += await self.store(connection, tenant_id).prune(page)
        return pruned

    # --- Rows ---------------------------------------------------------------------------------

    async def pages(
        self, tenant_id: UUID, ids: Sequence[UUID] | None, where: PatternFilter = LIVE
    ) -> AsyncIterator[list[UUID]]:
        """Yield the given ids, or those of all patterns that match ``where``, a page at a time."""
        if ids is not None:
            for start in range(0, len(ids), _PAGE):
                yield list(ids[start : start + _PAGE])
            return
        after: UUID | None = None
        while True:
            async with acting_as(self._pool, tenant_id) as connection:
                page = await rows.page(connection, tenant_id, where, limit=_PAGE, after=after)
            if not page:
                return
            yield page
            after = page[-1]


def _asked(
    features: Features, category: Category | None, failure_signature: str | None
) -> tuple[Features, frozenset[Category]]:
    features_of_task = dict(features)
    if failure_signature is not None:
        features_of_task["failure_signature"] = failure_signature
    if category is not None:
        return features_of_task, frozenset((category,))
    failed = "failure_signature" in features_of_task or "error_type" in features_of_task
    return features_of_task, ON_FAILURE if failed else frozenset(Category) - ON_FAILURE
