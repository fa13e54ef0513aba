"""Patterns in a transaction: add, update, deprecate, merge, validate.

After the transaction the caller must call
:meth:`bottega.memory.patterns.cache.PatternCache.forget`, so that this process reloads the
patterns.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.memory.patterns import application_rows
from bottega.memory.patterns.evidence import (
    EVIDENCE_DAYS,
    LEAST_APPLICATIONS,
    Validation,
    validated,
)
from bottega.memory.patterns.pattern import (
    Application,
    Evidence,
    Lifecycle,
    Pattern,
    PatternState,
    check_applicability,
)
from bottega.memory.patterns.refinement import MOST_MERGED, merged, started_over

_SAYS = frozenset(("applicability", "content", "name", "summary", "description", "guide"))
"""Fields that a run reads, or that decide whether it gets the pattern. A change of them voids the
evidence."""
MOST_GIVEN = 20_000
"""Most patterns of a tenant that were not mined."""

# Transactions that add patterns of a tenant wait for each other, so that two equal patterns that
# are added at the same time become one.
_ALONE = "SELECT pg_advisory_xact_lock(hashtextextended('patterns ' || $1::uuid, 0))"
_KNOWN = """
SELECT id FROM (
    SELECT 0 AS rank, p.id FROM patterns p WHERE p.tenant_id = $1 AND p.fingerprint = $5
    UNION ALL
    SELECT 1, p.id FROM patterns p
    WHERE p.tenant_id = $1 AND p.state <> 'DEPRECATED' AND p.category = $2 AND p.trust = $4
      AND p.meaning = jsonb_hash_extended(
          $3::jsonb -> 'content', jsonb_hash_extended($3::jsonb -> 'applicability', 0))
      AND p.document -> 'content' = $3::jsonb -> 'content'
      AND p.document -> 'applicability' = $3::jsonb -> 'applicability') found
ORDER BY rank, id LIMIT 1
"""
_GIVEN = "SELECT count(*) FROM patterns WHERE tenant_id = $1 AND fingerprint IS NULL"
_NEWER = "SELECT count(*) FROM episodes WHERE tenant_id = $1 AND id = ANY ($2) AND at > $3"
# An episode that applied several of the patterns counts once.
_POOL = f"""
INSERT INTO pattern_applications (tenant_id, pattern_id, version, {application_rows.SAID})
SELECT $1, $3, 1, {application_rows.SAID}
FROM (
    SELECT DISTINCT ON (coalesce(a.episode_id, a.id)) a.* FROM pattern_applications a
    JOIN patterns p ON p.tenant_id = $1 AND p.id = a.pattern_id AND p.version = a.version
    WHERE a.tenant_id = $1 AND a.pattern_id = ANY ($2)
      AND NOT EXISTS (
          SELECT FROM pattern_sources s
          WHERE s.tenant_id = $1 AND s.pattern_id = $3 AND s.episode_id = a.episode_id)
    ORDER BY coalesce(a.episode_id, a.id), a.good IS NULL, a.arm = ANY ($4) DESC, a.at, a.id) a
ORDER BY a.at, a.id
"""  # noqa: S608
_POOL_USES = """
UPDATE patterns p SET uses = o.uses, last_used = o.last_used
FROM (SELECT least(sum(uses), 2147483647) AS uses, max(last_used) AS last_used FROM patterns
      WHERE tenant_id = $1 AND id = ANY ($2)) o
WHERE p.tenant_id = $1 AND p.id = $3
"""
_CARRY = """
UPDATE pattern_applications SET version = $4
WHERE tenant_id = $1 AND pattern_id = $2 AND version = $3
"""


@dataclass(frozen=True, slots=True)
class PatternStore:
    """The patterns of a tenant in one transaction. Changes lock the rows that they change."""

    connection: asyncpg.Connection  # acts as the tenant
    tenant_id: UUID
    now: datetime  # the time of the changes

    async def add(self, pattern: Pattern) -> Pattern:
        """Store a new pattern as a candidate of version 1, or return an existing equal pattern.

        An existing pattern with the same fingerprint stays unchanged. But if the night deprecated
        it, it gets a new version as soon as enough of the sources ended after that. A twin (a
        pattern in use with equal category, trust, applicability and content) gets the new pattern's
        sources.

        Raises:
            InvalidInputError: a condition is invalid; the pointer locates it.
            ConflictError: ``too_many``: the tenant has too many patterns that were not mined.
        """
        check_applicability(pattern.applicability)
        await self._do(_ALONE)
        said = to_json(pattern.document).decode()
        what = pattern.category, said, pattern.trust, pattern.fingerprint
        known: UUID | None = await self._do(_KNOWN, *what)
        if known is not None:
            await self._found_again(known, pattern)
            return await self._read(known)
        if pattern.fingerprint is None and await self._do(_GIVEN) >= MOST_GIVEN:
            raise ConflictError(
                f"a tenant may have at most {MOST_GIVEN} patterns that were not mined: change an "
                "existing pattern instead",
                code="too_many",
            )
        return await self._read(await self._insert(pattern))

    async def _found_again(self, pattern_id: UUID, found: Pattern) -> None:
        was = (await self.get_many([pattern_id], lock=True))[pattern_id]
        sources = found.evidence.mined_from
        is_twin = found.fingerprint is None or found.fingerprint != was.fingerprint
        if not is_twin:
            if was.state is not PatternState.DEPRECATED or was.lifecycle.replaced_by is not None:
                return
            newer = await self._do(_NEWER, sources, was.updated_at)
            if "deprecated_by" in was.origin or newer < LEAST_APPLICATIONS:
                return
            await self.write(started_over(was))
        await self._do(application_rows.SOURCES, pattern_id, sources)

    async def update(
        self,
        pattern_id: UUID,
        version: int,
        changes: Mapping[str, Any],
        *,
        reason: str | None = None,
    ) -> Pattern:
        """Change a pattern, as a new version; without a real change the version stays.

        If the advice or its wording changes, the new version is a candidate without evidence.

        Args:
            version: the version that the changes are based on.
            changes: new values by field of :class:`Pattern`, except evidence, lifecycle and
                identity.
            reason: stored if the pattern starts over as a candidate.

        Raises:
            NotFoundError: the pattern is unknown, or another tenant's.
            ConflictError: ``stale_version``: the pattern has another version now.
            InvalidInputError: a condition is invalid; the pointer locates it.
        """
        if "applicability" in changes:
            check_applicability(changes["applicability"])
        was = (await self.get_many([pattern_id], lock=True))[pattern_id]
        if was.version != version:
            raise ConflictError(
                f"pattern {pattern_id} has version {was.version} now, not {version}: read it again "
                "and repeat the change",
                code="stale_version",
            )
        new = {name: value for name, value in changes.items() if getattr(was, name) != value}
        if _SAYS & new.keys():
            await self.write(started_over(was.but(**new), reason))
        elif new:
            await self.write(was.but(version=version + 1, **new))
            await self._do(_CARRY, pattern_id, version, version + 1)
        return await self._read(pattern_id)

    async def deprecate(
        self,
        pattern_id: UUID,
        reason: str,
        replaced_by: UUID | None = None,
        by: str | None = None,
    ) -> Pattern:
        """Deprecate a pattern: it stays stored, but runs do not get it any more.

        Args:
            by: person or key that decides it. Then mining does not revive the pattern.

        Raises:
            NotFoundError: the pattern or its replacement is unknown, or another tenant's.
            InvalidInputError: the replacement is the pattern itself, or deprecated.
        """
        ids = [pattern_id, *([] if replaced_by is None else [replaced_by])]
        held = await self.get_many(ids, lock=True)
        if replaced_by is not None and (
            replaced_by == pattern_id or held[replaced_by].state is PatternState.DEPRECATED
        ):
            raise InvalidInputError(
                "the replacement must be another pattern that is not deprecated",
                pointer="/replaced_by",
            )
        given_up = held[pattern_id].moved(PatternState.DEPRECATED, reason, replaced_by)
        if by is not None:
            given_up = given_up.but(origin={**given_up.origin, "deprecated_by": by})
        if given_up != held[pattern_id]:
            await self.write(given_up)
        return await self._read(pattern_id)

    async def merge(self, ids: Collection[UUID]) -> Pattern:
        """Merge patterns of one category into a new pattern, validate it, and deprecate the others.

        See :func:`merged`. The new pattern gets the applications of all patterns, each episode
        once, without episodes in which a pattern was found.

        Raises:
            NotFoundError: a pattern is unknown, or another tenant's.
            InvalidInputError: there are too few or too many patterns, they have several categories,
                one is deprecated, or the merged condition exceeds the limits of a pattern.
        """
        ids = sorted(set(ids))
        if not 2 <= len(ids) <= MOST_MERGED:
            raise InvalidInputError(
                f"2 to {MOST_MERGED} different patterns can be merged", pointer="/ids"
            )
        await self.get_many(ids, lock=True)
        held = await self.get_many(ids)  # again, for sources that were added before the lock
        if len({each.category for each in held.values()}) > 1:
            raise InvalidInputError("only patterns of one category can be merged", pointer="/ids")
        for each in held.values():
            if each.state is PatternState.DEPRECATED:
                raise InvalidInputError(
                    f"pattern {each.key} is deprecated: leave it out", pointer="/ids"
                )
        one = merged([held[each] for each in ids])
        check_applicability(one.applicability)
        stored = await self._insert(one)
        await self._do(_POOL, ids, stored, application_rows.GIVEN_ARMS)
        await self._do(_POOL_USES, ids, stored)
        for each in held.values():
            await self.write(each.moved(PatternState.DEPRECATED, f"merged into {stored}", stored))
        await self.judge([stored])
        return await self._read(stored)

    async def judge(self, ids: Sequence[UUID]) -> list[Validation]:
        """Validate patterns, store changed patterns, and return the results."""
        return await self._judge((await self.get_many(ids, lock=True)).values())

    async def _judge(self, held: Iterable[Pattern]) -> list[Validation]:
        """Validate locked patterns by their applications, and make the looks that are due."""
        since = self.now - timedelta(days=EVIDENCE_DAYS)
        of = {each.key: each for each in held}
        groups = await application_rows.groups(self.connection, self.tenant_id, [*of], since)
        found = []
        for pattern_id, was in of.items():
            found.append(validation := validated(was, groups.get(pattern_id, ()), self.now))
            if (after := validation.now) != was:
                await self.write(after, notify=after.state is not was.state)
        return found

    async def record_application(self, applications: Iterable[Application]) -> int:
        """Store applications of patterns. Return the number of new or changed applications.

        A repeated application changes nothing. A later outcome of an episode replaces the earlier
        outcome. Applications are ignored if they are no evidence: if the pattern was found in the
        episode, if the episode has trust 1 or is cancelled, quarantined or deleted, or if the
        pattern or version is unknown. Afterwards the patterns are validated at once.
        """
        of: dict[tuple[UUID, UUID | int], Application] = {
            (each.pattern_id, each.episode_id or n): each for n, each in enumerate(applications)
        }
        if not of:
            return 0
        held = await self._load({each.pattern_id for each in of.values()}, lock=True)
        touched = await application_rows.record(self.connection, self.tenant_id, [*of.values()])
        await self._judge(held[each] for each in sorted(set(touched)))
        return len(touched)

    async def get_many(self, ids: Collection[UUID], *, lock: bool = False) -> dict[UUID, Pattern]:
        """Return complete patterns by id.

        Args:
            lock: lock the rows until the transaction ends.

        Raises:
            NotFoundError: a pattern is unknown, or another tenant's.
        """
        found = await self._load(ids, lock=lock)
        for each in ids:
            if each not in found:
                raise NotFoundError(f"there is no pattern {each}")
        return found

    async def _load(self, ids: Collection[UUID], *, lock: bool) -> dict[UUID, Pattern]:
        # Locks are taken in the order of ids, so that transactions do not deadlock.
        query = (
            f"{application_rows.LOAD} ORDER BY p.id FOR NO KEY UPDATE OF p"
            if lock
            else application_rows.LOAD
        )
        found = await self.connection.fetch(
            query, self.tenant_id, application_rows.GIVEN_ARMS, list(ids)
        )
        return {row["id"]: application_rows.pattern(row) for row in found}

    async def _insert(self, new: Pattern) -> UUID:
        fresh = new.but(version=1, evidence=Evidence(), lifecycle=Lifecycle())
        row = application_rows.row_of(fresh, self.now)
        stored: UUID = await self._do(application_rows.INSERT, new.id, row, self.now)
        await self._do(application_rows.SOURCES, stored, new.evidence.mined_from)
        return stored

    async def _read(self, pattern_id: UUID) -> Pattern:
        return (await self.get_many([pattern_id]))[pattern_id]

    async def _do(self, query: str, *args: Any) -> Any:
        """Execute a statement with the tenant's id first; return its only value."""
        return await self.connection.fetchval(query, self.tenant_id, *args)

    async def write(self, changed: Pattern, *, notify: bool = True) -> None:
        """Store a locked pattern.

        Args:
            notify: on commit, notify all processes. Needed if the change affects which runs get the
                pattern, or the text that they read.
        """
        row = application_rows.row_of(changed, self.now)
        await self._do(application_rows.WRITE, changed.key, row, notify)
