"""The pattern cache: what several runs taught, kept, judged and given out (spec page 4, M19 to
M26)."""

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from heapq import nlargest
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg

from bottega.clock import Clock
from bottega.db.engine import acting_as
from bottega.db.pages import Part
from bottega.memory import application_rows, baselines, curating, judging, pattern_rows
from bottega.memory.options import LearningOptions
from bottega.memory.pattern import (
    ON_FAILURE,
    Application,
    Baseline,
    Category,
    Features,
    Pattern,
    PatternState,
)
from bottega.memory.pattern_rows import EVERY_PATTERN, PatternFilter
from bottega.memory.refining import Similar, likeness
from bottega.memory.weighing import Validation

if TYPE_CHECKING:  # numpy is needed only by who looks for patterns
    from bottega.memory.matchers import Matchers
    from bottega.memory.matching import Match

_PAGE = 100
"""Patterns in a transaction, which what comes of their runs meanwhile waits for."""
_TRIED = 200  # candidates that are compared for a task
LIVE = PatternFilter(states=(PatternState.CANDIDATE, PatternState.VALIDATED))
_KEPT = (PatternState.CANDIDATE, PatternState.VALIDATED, PatternState.IN_REVIEW)


class PatternCache:
    """The patterns of all tenants.

    Methods that take ``on`` may be part of a transaction of the tenant's.

    Args:
        matchers: what finds those that apply.
        clock: what says how old evidence is.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        *,
        matchers: "Matchers",
        options: LearningOptions | None = None,
        clock: Clock,
    ) -> None:
        self.options = options or LearningOptions()
        self.clock = clock
        self._pool = pool
        self._matchers = matchers

    # --- One ----------------------------------------------------------------------------------

    async def add(
        self, tenant_id: UUID, pattern: Pattern, *, on: asyncpg.Connection | None = None
    ) -> Pattern:
        """Keep a new pattern, as a candidate of version 1.

        One that says the same of the same (by fingerprint) may be there already: then nothing
        happens. But one that was given up, and not for another, comes back as its next version, if
        enough of the episodes that it was found in ended since.

        Returns:
            the one that is kept.

        Raises:
            InvalidInputError: its conditions cannot be used; the pointer says which.
        """
        async with self._changing(tenant_id, on) as connection:
            return await curating.add(connection, tenant_id, pattern, self.options, self.clock())

    async def get(self, tenant_id: UUID, pattern_id: UUID) -> Pattern:
        """A pattern, whole, in its current version; what is read often is at hand, and up to half a
        minute old as to how often it was used, and in which episodes.

        Raises:
            NotFoundError: unknown, or another tenant's.
        """

        async def read() -> Pattern:
            return (await self.get_many(tenant_id, [pattern_id]))[pattern_id]

        return await self._matchers.pattern(tenant_id, pattern_id, read)

    async def get_many(
        self, tenant_id: UUID, ids: Sequence[UUID], *, on: asyncpg.Connection | None = None
    ) -> dict[UUID, Pattern]:
        """Several patterns by id.

        Raises:
            NotFoundError: one of them is unknown, or another tenant's.
        """
        async with self.acting(tenant_id, on) as connection:
            found = await pattern_rows.load(connection, tenant_id, ids)
        curating.all_of(found, ids)
        return found

    async def page(
        self,
        tenant_id: UUID,
        where: PatternFilter = EVERY_PATTERN,
        *,
        limit: int,
        after: UUID | None = None,
        descending: bool = False,
    ) -> Part[Pattern]:
        """List patterns in the order in which they came: a page behind the one ``after``."""
        async with acting_as(self._pool, tenant_id) as connection:
            ids = await pattern_rows.page(
                connection, tenant_id, where, limit=limit + 1, after=after, descending=descending
            )
            return await pattern_rows.load_page(connection, tenant_id, ids, limit=limit)

    async def update(
        self,
        tenant_id: UUID,
        pattern_id: UUID,
        version: int,
        changes: Mapping[str, Any],
        *,
        on: asyncpg.Connection | None = None,
    ) -> Pattern:
        """Change what a pattern says. That makes a new version; what changes nothing does not.

        If it says something else now, or in other words, it starts over, as a candidate without
        evidence: nobody knows what runs make of these. Else what came of it counts on.

        Args:
            version: that the changes were made to.
            changes: by the name of the field of :class:`Pattern`; see
                :data:`bottega.memory.curating.CHANGEABLE`.

        Raises:
            NotFoundError: unknown, or another tenant's.
            ConflictError: ``stale_version``: it was changed meanwhile.
            InvalidInputError: its conditions cannot be used; the pointer says which.
        """
        async with self._changing(tenant_id, on) as connection:
            return await curating.update(
                connection, tenant_id, pattern_id, version, changes, self.clock()
            )

    async def deprecate(
        self,
        tenant_id: UUID,
        pattern_id: UUID,
        reason: str,
        replaced_by: UUID | None = None,
        *,
        on: asyncpg.Connection | None = None,
    ) -> Pattern:
        """Give a pattern up: it is kept, and never used again.

        Raises:
            NotFoundError: it, or what replaces it, is unknown or another tenant's.
            InvalidInputError: it would be replaced by itself, or by one that was given up.
        """
        async with self._changing(tenant_id, on) as connection:
            return await curating.deprecate(
                connection, tenant_id, pattern_id, reason, self.clock(), replaced_by
            )

    def forget(self, tenant_id: UUID) -> None:
        """Let this process look at a tenant's patterns again; else it hears a moment later."""
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
    ) -> "list[Match]":
        """The validated patterns that apply to a task, best first.

        Args:
            category: ``None``: those about failures if the features tell of one, else the others.
            failure_signature: of what failed, a feature like the others.
        """
        told, categories = _asked(features, category, failure_signature)
        matcher = await self._matchers.of(tenant_id)
        return matcher.find(told, now=self.clock(), k=k, categories=categories)

    async def candidates(
        self,
        tenant_id: UUID,
        features: Features,
        *,
        category: Category | None = None,
        failure_signature: str | None = None,
        draw: Callable[[Pattern], float] | None = None,
    ) -> "list[Match]":
        """The candidates that apply to a task, the most promising first: by how likely the next
        application goes well, as far as one can tell, and then by the lot.

        Args:
            category, failure_signature: as of :meth:`find_applicable`.
            draw: the lot of each, from 0 to 1, the smallest first.
        """
        told, categories = _asked(features, category, failure_signature)
        matcher = await self._matchers.of(tenant_id)
        found = matcher.candidates(told, now=self.clock(), categories=categories, most=_TRIED)
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

    async def baselines(
        self,
        tenant_id: UUID,
        patterns: Sequence[Pattern],
        features: Features,
        *,
        on: asyncpg.Connection | None = None,
    ) -> dict[UUID, Baseline]:
        """How often tasks like one go well without each of the patterns, as far as is known."""
        async with self.acting(tenant_id, on) as connection:
            return await baselines.of(connection, tenant_id, patterns, features)

    # --- Evidence -----------------------------------------------------------------------------

    async def record_application(
        self,
        tenant_id: UUID,
        applications: Iterable[Application],
        *,
        on: asyncpg.Connection | None = None,
    ) -> int:
        """Count what came of patterns that were given, or on purpose were not. The same again
        changes nothing; a later outcome of the same episode goes before the earlier one.

        Left out is what is no evidence: episodes that a pattern was found in, that nobody vouches
        for (trust 1), that were cancelled, quarantined or forgotten, and patterns and versions
        that there are not. A validated pattern that is doing worse, or harm, goes into review at
        once.

        Returns:
            how many are new or changed.
        """
        of: dict[tuple[UUID, UUID | int], Application] = {
            (each.pattern_id, each.episode_id or n): each for n, each in enumerate(applications)
        }
        if not of:
            return 0
        async with self.acting(tenant_id, on) as connection:
            ids = {each.pattern_id for each in of.values()}
            held = await pattern_rows.hold(connection, tenant_id, ids)
            touched = await application_rows.record(connection, tenant_id, [*of.values()])
            patterns = [held[each] for each in sorted(set(touched))]
            await judging.let_fall(connection, tenant_id, patterns, self.options, self.clock())
        return len(touched)

    async def validate(
        self, tenant_id: UUID, ids: Sequence[UUID] | None = None
    ) -> list[Validation]:
        """Judge patterns by their applications: those asked for, or all candidates and validated
        ones. What is found is kept, and states follow from it; a page is a transaction.

        Raises:
            NotFoundError: one of them is unknown, or another tenant's.
        """
        found: list[Validation] = []
        async for page in self.pages(tenant_id, ids):
            async with acting_as(self._pool, tenant_id) as connection:
                judged = await judging.judge(
                    connection, tenant_id, page, self.options, self.clock()
                )
            if ids is not None:
                curating.all_of({each.pattern_id for each in judged}, page)
            found += judged
        return found

    async def discovered(self, tenant_id: UUID) -> list[UUID]:
        """The patterns that the false discovery rate allows, by what the last look found."""
        async with acting_as(self._pool, tenant_id) as connection:
            return await judging.kept_by_rate(connection, tenant_id, self.options)

    # --- Fewer --------------------------------------------------------------------------------

    async def similar(self, tenant_id: UUID, pattern: Pattern, k: int) -> list[Similar]:
        """The patterns of the same category that say most nearly the same of the same, best first;
        without itself and those that were given up."""
        where = PatternFilter(states=_KEPT, categories=(pattern.category,))
        best: list[Similar] = []
        after: UUID | None = None
        while page := await self.page(tenant_id, where, limit=_PAGE, after=after):
            found = [Similar(each, likeness(pattern, each)) for each in page]
            best += [each for each in found if each.pattern.id != pattern.id]
            best = nlargest(k, best, key=lambda each: (each.likeness, -each.pattern.key.int))
            after = page[-1].key
        return best

    async def merge(
        self, tenant_id: UUID, ids: Collection[UUID], *, on: asyncpg.Connection | None = None
    ) -> Pattern:
        """Make one of several patterns of one category. It says what the one says that is known
        best, wherever one of them applied; what came of all of them is its evidence, each episode
        once, but for those that one of them was found in. It is judged at once; they are
        deprecated.

        Raises:
            NotFoundError: one of them is unknown, or another tenant's.
            InvalidInputError: too few or too many, of several categories, one was given up, or
                together they would say more of when they apply than one pattern may.
        """
        async with self._changing(tenant_id, on) as connection:
            return await curating.merge(
                connection, tenant_id, sorted(ids), self.options, self.clock()
            )

    async def prune_low_value(self, tenant_id: UUID) -> list[UUID]:
        """Give candidates up that make things worse, that were tried often without its showing, or
        that hardly ever come up. Answers which."""
        pruned: list[UUID] = []
        async for page in self.pages(tenant_id, None):
            async with acting_as(self._pool, tenant_id) as connection:
                pruned += await curating.prune(
                    connection, tenant_id, page, self.options, self.clock()
                )
        return pruned

    # --- Rows ---------------------------------------------------------------------------------

    async def pages(
        self, tenant_id: UUID, ids: Sequence[UUID] | None, where: PatternFilter = LIVE
    ) -> AsyncIterator[list[UUID]]:
        """The ids asked for, or those of all patterns of some kind, a page at a time."""
        if ids is not None:
            for start in range(0, len(ids), _PAGE):
                yield list(ids[start : start + _PAGE])
            return
        after: UUID | None = None
        while True:
            async with acting_as(self._pool, tenant_id) as connection:
                page = await pattern_rows.page(
                    connection, tenant_id, where, limit=_PAGE, after=after
                )
            if not page:
                return
            yield page
            after = page[-1]

    @asynccontextmanager
    async def _changing(
        self, tenant_id: UUID, on: asyncpg.Connection | None
    ) -> AsyncIterator[asyncpg.Connection]:
        """The same, for who changes patterns and may read them before that is heard of."""
        async with self.acting(tenant_id, on) as connection:
            yield connection
        if on is None:
            self.forget(tenant_id)

    @asynccontextmanager
    async def acting(
        self, tenant_id: UUID, on: asyncpg.Connection | None = None
    ) -> AsyncIterator[asyncpg.Connection]:
        """The transaction given, or one of its own."""
        if on is not None:
            yield on
        else:
            async with acting_as(self._pool, tenant_id) as connection:
                yield connection


def _asked(
    features: Features, category: Category | None, failure_signature: str | None
) -> tuple[Features, frozenset[Category]]:
    """What is known of the task, and the categories that are looked for."""
    told = dict(features)
    if failure_signature is not None:
        told["failure_signature"] = failure_signature
    if category is not None:
        return told, frozenset((category,))
    failed = "failure_signature" in told or "error_type" in told
    return told, ON_FAILURE if failed else frozenset(Category) - ON_FAILURE
