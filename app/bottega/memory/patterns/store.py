"""Changes of patterns: add, update, deprecate, merge, prune, judge.

After the transaction :meth:`bottega.memory.patterns.cache.PatternCache.forget` reloads the patterns
in this process.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.memory.episodes.options import LearningOptions
from bottega.memory.patterns import application_rows, baselines, rows
from bottega.memory.patterns.evidence import (
    Validation,
    WeighedEvidence,
    evidence_of,
    falling,
    validated,
    weigh,
)
from bottega.memory.patterns.merging import MOST_MERGED, merged
from bottega.memory.patterns.pattern import Pattern, PatternState, check_applicability
from bottega.memory.patterns.refinement import of_low_value, started_over
from bottega.memory.patterns.validation import Tally

_DOCUMENT = ("description", "summary", "detail", "applicability", "content", "guide", "relations")
CHANGEABLE = frozenset((*_DOCUMENT, "name", "origin", "trust"))
_SAYS = frozenset(("applicability", "content", "name", "summary", "description", "guide"))
"""Content that a run reads, and conditions of use: a change of these voids the evidence."""
MOST_GIVEN = 20_000
"""Limit on patterns of a tenant that were not mined."""


@dataclass(frozen=True, slots=True)
class PatternStore:
    """Changes of a tenant's patterns in one transaction; they lock the rows that they change.

    Attributes:
        connection: acts as the tenant.
        now: the time of the changes.
    """

    connection: asyncpg.Connection
    tenant_id: UUID
    options: LearningOptions
    now: datetime

    async def add(self, pattern: Pattern) -> Pattern:
        """Store a new pattern as a candidate of version 1. Return the stored one.

        If its fingerprint exists, nothing changes. But one that is deprecated, with all its
        replacements, gets a next version, if enough of the new source episodes ended after that.
        Else, if it has a twin in use (equal category, trust, applicability and content), that one
        is returned, with the new source episodes added to its own.

        Raises:
            InvalidInputError: a condition is invalid; the pointer locates it.
            ConflictError: ``too_many`` patterns that were not mined.
        """
        connection, tenant_id = self.connection, self.tenant_id
        check_applicability(pattern.applicability)
        await rows.alone(connection, tenant_id)
        known = await rows.same(connection, tenant_id, pattern.fingerprint)
        if known is not None:
            await self._found_again(known, pattern)
            return await self._read(known)
        twin = await rows.twin(connection, tenant_id, pattern)
        if twin is not None:
            await rows.add_sources(connection, tenant_id, twin, pattern.evidence.mined_from)
            return await self._read(twin)
        if pattern.fingerprint is None and await rows.given(connection, tenant_id) >= MOST_GIVEN:
            raise ConflictError(
                f"a tenant may have at most {MOST_GIVEN} patterns that were not mined: change one "
                "of those instead",
                code="too_many",
            )
        stored = await rows.insert(connection, tenant_id, pattern, self.now)
        await rows.notify_change(connection, tenant_id)
        return await self._read(stored)

    async def _found_again(self, pattern_id: UUID, found: Pattern) -> None:
        """Make a deprecated pattern a candidate again if enough new episodes have it."""
        was = (await self._held([pattern_id]))[pattern_id]
        gone_at = await rows.out_of_use(self.connection, self.tenant_id, pattern_id)
        if gone_at is None:
            return
        found_in = found.evidence.mined_from
        since = await baselines.ended_after(self.connection, self.tenant_id, found_in, gone_at)
        if len(since) >= self.options.min_applications:
            await rows.add_sources(self.connection, self.tenant_id, pattern_id, found_in)
            await self._write(started_over(was))

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
            changes: by field of :class:`Pattern`; only those of ``CHANGEABLE``.
            reason: stored if the pattern starts over as a candidate.

        Raises:
            NotFoundError: unknown, or another tenant's.
            ConflictError: ``stale_version``: it was changed meanwhile.
            InvalidInputError: a condition is invalid; the pointer locates it.
        """
        assert changes.keys() <= CHANGEABLE, f"cannot change {changes.keys() - CHANGEABLE}"
        if "applicability" in changes:
            check_applicability(changes["applicability"])
        was = (await self._held([pattern_id]))[pattern_id]
        if was.version != version:
            raise ConflictError(
                f"pattern {pattern_id} has version {was.version} now, not {version}: read it again "
                "and repeat the change",
                code="stale_version",
            )
        new = {name: value for name, value in changes.items() if getattr(was, name) != value}
        if _SAYS & new.keys():
            await self.start_over(was.but(**new), reason)
        elif new:
            await self._write(was.but(version=version + 1, **new))
            await application_rows.carry(
                self.connection, self.tenant_id, pattern_id, version, version + 1
            )
        return await self._read(pattern_id)

    async def start_over(self, pattern: Pattern, reason: str | None) -> None:
        """Make a locked pattern a candidate without evidence, in a next version."""
        again = started_over(pattern)
        await self._write(again.but(lifecycle=replace(again.lifecycle, reason=reason)))

    async def deprecate(
        self, pattern_id: UUID, reason: str, replaced_by: UUID | None = None
    ) -> Pattern:
        """Deprecate a pattern: it stays stored, and is never used again.

        Raises:
            NotFoundError: it or its replacement is unknown, or another tenant's.
            InvalidInputError: the replacement is the pattern itself, or deprecated.
        """
        held = await self._held([pattern_id, *([] if replaced_by is None else [replaced_by])])
        if replaced_by is not None and (
            replaced_by == pattern_id or held[replaced_by].state is PatternState.DEPRECATED
        ):
            raise InvalidInputError(
                "a pattern can only be replaced by another one that is not deprecated",
                pointer="/replaced_by",
            )
        given_up = _given_up(held[pattern_id], reason, replaced_by)
        if given_up != held[pattern_id]:
            await self._write(given_up)
        return await self._read(pattern_id)

    async def merge(self, ids: Collection[UUID]) -> Pattern:
        """Merge several patterns of one category into a new one, judge it, and deprecate them.

        It has the advice of the best-known one, and applies wherever one of them did. Its evidence
        is theirs, each episode once, but for episodes that one of them was found in.

        Raises:
            NotFoundError: one of them is unknown, or another tenant's.
            InvalidInputError: too few or too many, of several categories, one is deprecated, or the
                merged condition would exceed the limits of one pattern.
        """
        connection, tenant_id = self.connection, self.tenant_id
        ids = sorted(set(ids))
        if not 2 <= len(ids) <= MOST_MERGED:
            raise InvalidInputError(
                f"2 to {MOST_MERGED} different patterns can be merged", pointer="/ids"
            )
        held = await self._held(ids)
        if len({each.category for each in held.values()}) > 1:
            raise InvalidInputError("only patterns of one category can be merged", pointer="/ids")
        for each in held.values():
            if each.state is PatternState.DEPRECATED:
                raise InvalidInputError(
                    f"pattern {each.key} is deprecated: leave it out", pointer="/ids"
                )
        whole = await rows.load(connection, tenant_id, ids)
        one = merged([whole[each] for each in ids])
        check_applicability(one.applicability)
        stored = await rows.insert(connection, tenant_id, one, self.now)
        await application_rows.pool(connection, tenant_id, ids, stored)
        for each in held.values():
            given_up = _given_up(each, f"merged into {stored}", stored)
            await rows.write(connection, tenant_id, given_up, self.now)
        await self.judge([stored])
        await rows.notify_change(connection, tenant_id)
        return await self._read(stored)

    async def prune(self, ids: Sequence[UUID]) -> list[UUID]:
        """Deprecate patterns of low value; return their ids."""
        pruned = []
        for each in (await rows.hold(self.connection, self.tenant_id, ids)).values():
            why = of_low_value(each, self.now, self.options)
            if why is not None:
                await self._write(_given_up(each, why))
                pruned.append(each.key)
        return pruned

    # --- Evidence -----------------------------------------------------------------------------

    async def judge(self, ids: Sequence[UUID]) -> list[Validation]:
        """Validate patterns, store what changed, and return the results; skip unknown ids."""
        held = await rows.hold(self.connection, self.tenant_id, ids)
        evidence_for = await self.weighed(list(held))
        found, changed = [], False
        for pattern_id, was in held.items():
            weighed = evidence_for[pattern_id]
            says = validated(pattern_id, was.version, was.state, weighed, self.options)
            found.append(says)
            reason = was.lifecycle.reason if says.state is was.state else says.reason
            after = was.but(
                evidence=evidence_of(was.evidence, says, weighed, self.now),
                lifecycle=replace(was.lifecycle, state=says.state, reason=reason),
            )
            if after != was:
                await rows.write(self.connection, self.tenant_id, after, self.now)
                changed = True
        if changed:
            await rows.notify_change(self.connection, self.tenant_id)
        return found

    async def let_fall(self, patterns: Sequence[Pattern]) -> None:
        """Put validated patterns that decline or harm into review; the caller has locked them."""
        used = [each for each in patterns if each.state is PatternState.VALIDATED]
        if not used:
            return
        ids = [each.key for each in used]
        weighed = await self.weighed(ids)
        for each in used:
            why = falling(weighed[each.key], self.options)
            if why is not None:
                life = replace(each.lifecycle, state=PatternState.IN_REVIEW, reason=why)
                await self._write(each.but(lifecycle=life))

    async def weighed(self, ids: Sequence[UUID]) -> dict[UUID, WeighedEvidence]:
        """Weigh the evidence of patterns; return it by id."""
        if not ids:
            return {}
        since = self.now - timedelta(days=self.options.evidence_days)
        groups = await application_rows.groups(self.connection, self.tenant_id, ids, since)
        latest = await self._latest(ids)
        return {each: weigh(groups.get(each, ()), latest.get(each)) for each in ids}

    async def _latest(self, ids: Sequence[UUID]) -> dict[UUID, Tally]:
        most = self.options.decline_each
        return await application_rows.latest(self.connection, self.tenant_id, ids, most)

    # --- Rows ---------------------------------------------------------------------------------

    async def _held(self, ids: Sequence[UUID]) -> dict[UUID, Pattern]:
        held = await rows.hold(self.connection, self.tenant_id, ids)
        all_of(held, ids)
        return held

    async def _read(self, pattern_id: UUID) -> Pattern:
        return (await rows.load(self.connection, self.tenant_id, [pattern_id]))[pattern_id]

    async def _write(self, changed: Pattern) -> None:
        await rows.write(self.connection, self.tenant_id, changed, self.now)
        await rows.notify_change(self.connection, self.tenant_id)


def all_of(found: Container[UUID], ids: Iterable[UUID]) -> None:
    """Raise :class:`NotFoundError` if a pattern is missing."""
    for each in ids:
        if each not in found:
            raise NotFoundError(f"there is no pattern {each}")


def _given_up(pattern: Pattern, reason: str, replaced_by: UUID | None = None) -> Pattern:
    life = replace(
        pattern.lifecycle, state=PatternState.DEPRECATED, reason=reason, replaced_by=replaced_by
    )
    return pattern.but(lifecycle=life)
