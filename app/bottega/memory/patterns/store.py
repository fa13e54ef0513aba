"""Patterns in a transaction: the rows of patterns, and operations on the rows.

After the transaction, the caller must call
:meth:`bottega.memory.patterns.cache.PatternCache.forget`, so that the process reloads the patterns.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.db.sessions import decoded
from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.memory.episodes.episode import IMPORTED
from bottega.memory.episodes.scope import owner_of
from bottega.memory.patterns.evidence import (
    EVIDENCE_DAYS,
    LEAST_APPLICATIONS,
    Judged,
    Side,
    Sides,
    Tally,
    Validation,
    validated,
)
from bottega.memory.patterns.pattern import (
    APPLIED,
    Application,
    Arm,
    Evidence,
    Lifecycle,
    Pattern,
    PatternState,
    check_applicability,
    pattern_of,
)
from bottega.memory.patterns.refinement import MOST_MERGED, Applied, merged, started_over

CHANNEL = "bottega_patterns"
"""Channel to which a tenant's id is sent when a change affects which patterns runs get."""
GIVEN_ARMS = sorted(arm.value for arm in APPLIED)
"""Arms of runs that got a pattern."""

_NOTIFIED = f"send_signal('{CHANNEL}', $1::uuid::text)"

_EPISODES = ("mined_from", "supporting", "contrary")
_MEASURED = [each.name for each in fields(Evidence) if each.name not in _EPISODES]
_LIFE = ("replaced_by", "reason", "looks", "looks_since", "decision")
_WRITTEN = ("name", "category", "state", "version", "trust", "fingerprint", "document", "origin")
_CHANGED = ", ".join((*_WRITTEN, "updated_at", *_LIFE, *_MEASURED))
"""Columns that a change of a pattern writes."""
COLUMNS = f"id, created_at, uses, last_used, {_CHANGED}"
"""Columns of ``patterns`` that :func:`from_row` reads."""

_EPISODES_OF = """
    ARRAY(SELECT a.episode_id FROM pattern_applications a
          WHERE a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
            AND a.good = {good} AND a.arm = ANY ($2) AND a.episode_id IS NOT NULL
          ORDER BY a.at DESC, a.id DESC LIMIT 20) AS {name}
"""
_COLUMNS = f"""
SELECT {COLUMNS},
    ARRAY(SELECT s.episode_id FROM pattern_sources s
          WHERE s.tenant_id = p.tenant_id AND s.pattern_id = p.id
          ORDER BY s.episode_id) AS mined_from,
    {_EPISODES_OF.format(good="true", name="supporting")},
    {_EPISODES_OF.format(good="false", name="contrary")}
"""  # noqa: S608 (texts of ours)
_LOAD = f"{_COLUMNS} FROM patterns p WHERE p.tenant_id = $1 AND p.id = ANY ($3)"
"""Query for complete patterns; its arguments are the tenant, :data:`GIVEN_ARMS` and ids."""
# The query finds the first ids of each state by an index, then reads the rows by id.
PAGE = f"""
{_COLUMNS} FROM (
    SELECT f.id FROM unnest($3::text[]) AS s(state) CROSS JOIN LATERAL (
        SELECT o.id FROM patterns o
        WHERE o.tenant_id = $1 AND o.state = s.state AND o.category = ANY ($4)
          AND o.id {{than}} coalesce($5::uuid, CASE '{{than}}'
              WHEN '<' THEN 'ffffffff-ffff-ffff-ffff-ffffffffffff' ELSE repeat('0', 32) END::uuid)
        ORDER BY o.id {{order}} LIMIT $6) AS f
    ORDER BY f.id {{order}} LIMIT $6) AS n(key)
CROSS JOIN LATERAL (
    SELECT * FROM patterns o WHERE o.tenant_id = $1 AND o.id = n.key LIMIT 1) AS p
ORDER BY p.id {{order}}
"""  # noqa: S608 (texts of ours)
"""Query for a page of patterns; its arguments are the tenant, :data:`GIVEN_ARMS`, states,
categories, the id after which the page begins, and the limit."""
_INSERT = f"""
INSERT INTO patterns (tenant_id, id, created_at, {_CHANGED})
SELECT $1, coalesce($2, uuidv7()), $4, {_CHANGED}
FROM jsonb_populate_record(NULL::patterns, $3::jsonb)
RETURNING id, {_NOTIFIED}
"""  # noqa: S608
"""Insert a new pattern from :func:`row_of`, and notify all processes at commit."""
# The query skips episodes that were erased in the meantime, and episodes that are already evidence.
_SOURCES = """
WITH there AS (
    SELECT held.episode_id FROM (
        SELECT DISTINCT id FROM unnest($3::uuid[]) AS u(id) ORDER BY id) AS n
    CROSS JOIN LATERAL (
        SELECT s.episode_id FROM episode_state s
        WHERE s.tenant_id = $1 AND s.episode_id = n.id FOR KEY SHARE) AS held)
INSERT INTO pattern_sources (tenant_id, pattern_id, episode_id)
SELECT $1, $2, episode_id FROM there WHERE NOT EXISTS (
    SELECT FROM pattern_applications a
    WHERE a.tenant_id = $1 AND a.pattern_id = $2 AND a.episode_id = there.episode_id)
ON CONFLICT DO NOTHING
"""
_WRITE = f"""
UPDATE patterns SET ({_CHANGED}) = (
    SELECT {_CHANGED} FROM jsonb_populate_record(NULL::patterns, $3::jsonb))
WHERE tenant_id = $1 AND id = $2
RETURNING CASE WHEN $4::boolean THEN {_NOTIFIED} END
"""  # noqa: S608
"""Update a locked pattern from :func:`row_of`; if the last argument is true, notify all processes
at commit. Other statements write the pattern's uses and the episodes of its evidence."""


def from_row(row: Mapping[str, Any]) -> Pattern:
    """Build a pattern from a row with :data:`COLUMNS`; the evidence's episodes may be missing."""
    flat = dict(row)
    document, origin, baseline = (
        decoded(flat[each]) for each in ("document", "origin", "baseline")
    )
    flat |= {"origin": origin, "baseline": baseline}
    return pattern_of({**document, **flat, "evidence": flat, "lifecycle": flat})


def row_of(pattern: Pattern, at: datetime) -> str:
    """Return the columns that a change of a pattern writes, as JSON."""
    of = {name: getattr(pattern, name) for name in _WRITTEN}
    of |= {name: getattr(pattern.evidence, name) for name in _MEASURED}
    of |= {name: getattr(pattern.lifecycle, name) for name in _LIFE}
    return to_json(of | {"updated_at": at}).decode()


_SAID = "arm, at, episode_id, baseline_rate, followed, good, features, duration_s, tokens"
# The query locks the episodes, so that a concurrent erasure waits. It skips erased episodes.
_STAY = """
SELECT FROM (SELECT DISTINCT id FROM unnest($2::uuid[]) AS u(id) ORDER BY id) AS n
CROSS JOIN LATERAL (
    SELECT FROM episode_state s
    WHERE s.tenant_id = $1 AND s.episode_id = n.id FOR KEY SHARE) AS held
"""
# Selects applications that count as evidence. An application does not count if the pattern was
# found in the application's episode, or if this episode is untrusted, quarantined or deleted. A
# client's report cannot override the outcome of an assigned pattern. A run that retries an earlier
# run is not independent evidence. The query reads each row by its key: a join is slow if
# the planner expects one row per tenant.
_GIVEN = """
SELECT n.* FROM reported n
CROSS JOIN LATERAL (
    SELECT p.version FROM patterns p WHERE p.tenant_id = $1 AND p.id = n.pattern_id LIMIT 1) AS p
LEFT JOIN LATERAL (
    SELECT * FROM episodes e WHERE e.tenant_id = $1 AND e.id = n.episode_id LIMIT 1) AS e ON true
LEFT JOIN LATERAL (
    SELECT s.state FROM episode_state s
    WHERE s.tenant_id = $1 AND s.episode_id = n.episode_id LIMIT 1) AS s ON true
LEFT JOIN LATERAL (
    SELECT f.outcome FROM episode_feedback f
    WHERE f.tenant_id = $1 AND f.run_id = e.run_id LIMIT 1) AS f ON true
WHERE n.version BETWEEN 1 AND p.version AND (n.episode_id IS NULL OR (
    e.trust >= 2 AND coalesce(f.outcome, e.outcome) <> 'CANCELLED'
    AND s.state NOT IN ('quarantined', 'deleted')
    AND (
        SELECT o.episode_id FROM pattern_sources o
        WHERE o.tenant_id = $1 AND o.pattern_id = n.pattern_id AND o.episode_id = n.episode_id
    ) IS NULL
    AND NOT (n.arm LIKE 'reported%' AND e.metadata @> jsonb_build_object(
        'patterns', jsonb_build_array(jsonb_build_object('id', n.pattern_id))))
    AND NOT EXISTS (
        WITH RECURSIVE earlier AS (
            SELECT coalesce(r.retry_of, (r.fork_of ->> 'run_id')::uuid) AS run_id FROM runs r
            WHERE r.tenant_id = $1 AND r.id = e.run_id
            UNION
            SELECT r.of FROM earlier t CROSS JOIN LATERAL (
                SELECT coalesce(r.retry_of, (r.fork_of ->> 'run_id')::uuid) AS of FROM runs r
                WHERE r.tenant_id = $1 AND r.id = t.run_id LIMIT 1) AS r)
        SELECT FROM earlier t CROSS JOIN LATERAL unnest(ARRAY(
            SELECT e.id FROM episodes e WHERE e.tenant_id = $1 AND e.run_id = t.run_id)) AS o(id)
        WHERE EXISTS (
            SELECT FROM pattern_applications a
            WHERE a.tenant_id = $1 AND a.pattern_id = n.pattern_id AND a.episode_id = o.id
              AND a.good IS NOT NULL)
          OR EXISTS (
            SELECT FROM reported b
            WHERE b.pattern_id = n.pattern_id AND b.episode_id = o.id AND b.good IS NOT NULL))))
"""
# A run gets only one version of a pattern, so pattern and episode identify an application, even if
# the application was carried over to a new version.
_RECORD = f"""
WITH reported AS MATERIALIZED (
    SELECT * FROM jsonb_populate_recordset(NULL::pattern_applications, $2::jsonb)
    WITH ORDINALITY),
given AS MATERIALIZED ({_GIVEN}),
changed AS (
    UPDATE pattern_applications a
    SET good = g.good, followed = g.followed, duration_s = g.duration_s, tokens = g.tokens
    FROM given g
    WHERE a.tenant_id = $1 AND a.pattern_id = g.pattern_id AND a.episode_id = g.episode_id
      AND (a.arm LIKE 'reported%' OR g.arm NOT LIKE 'reported%')
      AND (a.good, a.followed, a.duration_s, a.tokens)
          IS DISTINCT FROM (g.good, g.followed, g.duration_s, g.tokens)
    RETURNING a.pattern_id
),
added AS (
    INSERT INTO pattern_applications (tenant_id, pattern_id, version, {_SAID})
    SELECT $1, g.pattern_id, g.version, {_SAID}
    FROM given g
    WHERE NOT EXISTS (
        SELECT FROM pattern_applications a
        WHERE a.tenant_id = $1 AND a.pattern_id = g.pattern_id AND a.episode_id = g.episode_id)
    ORDER BY g.ordinality
    RETURNING pattern_id, arm, at
),
used AS (
    UPDATE patterns p SET uses = p.uses + u.n, last_used = greatest(p.last_used, u.at)
    FROM (SELECT pattern_id, count(*) AS n, max(at) AS at FROM added
          WHERE arm = ANY ($3) GROUP BY pattern_id) u
    WHERE p.tenant_id = $1 AND p.id = u.pattern_id
      AND p.id = ANY (ARRAY(SELECT pattern_id FROM added))
)
SELECT pattern_id FROM changed UNION ALL SELECT pattern_id FROM added
"""  # noqa: S608
_SIDES = """
SELECT pattern_id, arm = ANY ($4) AS is_given,
    count(*) FILTER (WHERE good AND a.at > $3) AS lately_good,
    count(*) FILTER (WHERE a.at > $3) AS lately,
    count(*) FILTER (WHERE good AND a.at > coalesce(p.looks_since, '-infinity')) AS since_good,
    count(*) FILTER (WHERE a.at > coalesce(p.looks_since, '-infinity')) AS since,
    CASE WHEN count(a.baseline_rate) = count(*) THEN avg(a.baseline_rate)::float END AS known_rate,
    avg(a.duration_s)::float AS seconds, avg(a.tokens)::float AS tokens
FROM patterns p JOIN pattern_applications a
    ON a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
WHERE p.tenant_id = $1 AND p.id = ANY ($2) AND a.good IS NOT NULL
GROUP BY 1, 2
"""
_APPLIED = """
SELECT a.arm, a.features, a.good, e.id AS of_episode, e.user_id, e.session_id, e.agent
FROM pattern_applications a
LEFT JOIN episodes e ON e.tenant_id = a.tenant_id AND e.id = a.episode_id
WHERE a.tenant_id = $1 AND a.pattern_id = $2 AND a.version = $3
  AND a.good IS NOT NULL AND a.arm = ANY ($4)
ORDER BY a.at DESC, a.id DESC LIMIT $5
"""
_NEWEST = """
SELECT a.at, a.arm, a.good, a.baseline_rate
FROM patterns p JOIN pattern_applications a
  ON a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
WHERE p.tenant_id = $1 AND p.id = $2 AND a.good IS NOT NULL
ORDER BY a.at DESC, a.id DESC LIMIT $3
"""

_SAYS = frozenset(("applicability", "content", "name", "summary", "description", "guide"))
"""Fields that a run reads, or that decide whether a run gets the pattern. A change of these fields
makes the evidence invalid."""
MOST_GIVEN = 20_000
"""Maximum number of a tenant's patterns that were not mined."""

# Only one transaction at a time adds patterns of a tenant. Otherwise concurrent transactions could
# store equal patterns.
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
# An episode that applied several of the merged patterns counts only once.
_POOL = f"""
INSERT INTO pattern_applications (tenant_id, pattern_id, version, {_SAID})
SELECT $1, $3, 1, {_SAID}
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
    """The patterns of a tenant in one transaction; a change locks the changed rows."""

    connection: asyncpg.Connection  # this connection acts as the tenant
    tenant_id: UUID
    now: datetime  # the time of the changes

    async def add(self, pattern: Pattern) -> Pattern:
        """Store a new pattern as a candidate of version 1, or return an existing equal pattern.

        The sources of a pattern are the episodes in which it was found. A stored pattern with the
        same fingerprint does not change. But if maintenance has deprecated it, and at least
        ``LEAST_APPLICATIONS`` sources of the new pattern ended later, it gets a new version and the
        new sources. A pattern in use with equal category, trust, applicability and content also
        gets the new sources.

        Raises:
            InvalidInputError: a condition is invalid; the error's pointer locates the condition.
            ConflictError: the tenant has too many patterns that were not mined (``too_many``).
        """
        check_applicability(pattern.applicability)
        await self._do(_ALONE)
        document = to_json(pattern.document).decode()
        what = pattern.category, document, pattern.trust, pattern.fingerprint
        pattern_id: UUID | None = await self._do(_KNOWN, *what)
        if pattern_id is not None:
            await self._found_again(pattern_id, pattern)
            return await self._read(pattern_id)
        if pattern.fingerprint is None and await self._do(_GIVEN) >= MOST_GIVEN:
            raise ConflictError(
                f"a tenant may have at most {MOST_GIVEN} patterns that were not mined: change an "
                "existing pattern instead",
                code="too_many",
            )
        return await self._read(await self._insert(pattern))

    async def _found_again(self, pattern_id: UUID, pattern: Pattern) -> None:
        was = (await self.get_many([pattern_id], lock=True))[pattern_id]
        sources = pattern.evidence.mined_from
        is_twin = pattern.fingerprint is None or pattern.fingerprint != was.fingerprint
        if not is_twin:
            if was.state is not PatternState.DEPRECATED or was.lifecycle.replaced_by is not None:
                return
            newer = await self._do(_NEWER, sources, was.updated_at)
            if "deprecated_by" in was.origin or newer < LEAST_APPLICATIONS:
                return
            await self.write(started_over(was))
        await self._do(_SOURCES, pattern_id, sources)

    async def update(
        self,
        pattern_id: UUID,
        version: int,
        changes: Mapping[str, Any],
        *,
        reason: str | None = None,
    ) -> Pattern:
        """Store changes of a pattern as a new version; if no field changes, store nothing.

        If the advice, its wording or the applicability changes, the new version is a candidate
        without evidence.

        Args:
            version: the version on which the changes are based.
            changes: new values by field of :class:`Pattern`, except evidence, lifecycle and
                identity.
            reason: text that is stored if the pattern becomes a candidate again.

        Raises:
            NotFoundError: the tenant has no such pattern.
            ConflictError: the pattern now has a version other than ``version`` (``stale_version``).
            InvalidInputError: a condition is invalid; the error's pointer locates the condition.
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
            await self.write(started_over(was.with_changes(**new), reason))
        elif new:
            await self.write(was.with_changes(version=version + 1, **new))
            await self._do(_CARRY, pattern_id, version, version + 1)
        return await self._read(pattern_id)

    async def deprecate(
        self,
        pattern_id: UUID,
        reason: str,
        replaced_by: UUID | None = None,
        by: str | None = None,
    ) -> Pattern:
        """Deprecate a pattern: the pattern remains stored, but no run gets it any more.

        Args:
            by: person or key that deprecates the pattern. Then mining never revives the pattern.
                ``None``: maintenance deprecates the pattern.

        Raises:
            NotFoundError: the tenant does not have the pattern or the replacement.
            InvalidInputError: the replacement is the pattern itself, or is deprecated.
        """
        ids = [pattern_id, *([] if replaced_by is None else [replaced_by])]
        patterns = await self.get_many(ids, lock=True)
        if replaced_by is not None and (
            replaced_by == pattern_id or patterns[replaced_by].state is PatternState.DEPRECATED
        ):
            raise InvalidInputError(
                "the replacement must be a different pattern, and not deprecated",
                pointer="/replaced_by",
            )
        given_up = patterns[pattern_id].moved(PatternState.DEPRECATED, reason, replaced_by)
        if by is not None:
            given_up = given_up.with_changes(origin={**given_up.origin, "deprecated_by": by})
        if given_up != patterns[pattern_id]:
            await self.write(given_up)
        return await self._read(pattern_id)

    async def merge(self, ids: Collection[UUID]) -> Pattern:
        """Merge patterns of one category into a new pattern; deprecate the merged patterns.

        See :func:`merged`. The new pattern gets the applications of all merged patterns, but only
        one for each episode, and none for an episode in which a merged pattern was found. Then the
        new pattern is validated.

        Raises:
            NotFoundError: the tenant does not have one of the patterns.
            InvalidInputError: there are too few or too many patterns, the patterns have several
                categories, a pattern is deprecated, or the merged condition exceeds the limits of a
                pattern.
        """
        ids = sorted(set(ids))
        if not 2 <= len(ids) <= MOST_MERGED:
            raise InvalidInputError(
                f"2 to {MOST_MERGED} different patterns can be merged", pointer="/ids"
            )
        await self.get_many(ids, lock=True)
        held = await self.get_many(ids)  # again, because sources may be new since the first query
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
        await self._do(_POOL, ids, stored, GIVEN_ARMS)
        await self._do(_POOL_USES, ids, stored)
        for each in held.values():
            await self.write(each.moved(PatternState.DEPRECATED, f"merged into {stored}", stored))
        await self.judge([stored])
        return await self._read(stored)

    async def judge(self, ids: Sequence[UUID]) -> list[Validation]:
        """Validate patterns, store changed patterns, and return the results."""
        return await self._judge((await self.get_many(ids, lock=True)).values())

    async def _judge(self, patterns: Iterable[Pattern]) -> list[Validation]:
        """Validate locked patterns by their applications; make the interim tests that are due."""
        since = self.now - timedelta(days=EVIDENCE_DAYS)
        of = {each.key: each for each in patterns}
        sides: dict[UUID, dict[bool, Side]] = defaultdict(dict)
        rows = await self.connection.fetch(_SIDES, self.tenant_id, [*of], since, GIVEN_ARMS)
        for key, is_given, good, n, good_since, n_since, *means in rows:
            sides[key][is_given] = Side(Tally(good, n), Tally(good_since, n_since), *means)
        validations = []
        for pattern_id, was in of.items():
            of_it = (sides[pattern_id].get(each, Side()) for each in (True, False))
            validations.append(validation := validated(was, Sides(*of_it), self.now))
            if (after := validation.now) != was:
                await self.write(after, notify=after.state is not was.state)
        return validations

    async def record_application(self, applications: Iterable[Application]) -> int:
        """Store applications of patterns; return the number of new or changed applications.

        A repeated application changes nothing. A later outcome of an episode replaces the earlier
        outcome. The method ignores an application that is not evidence: the pattern was found in
        the episode, the episode has trust 1 or is cancelled, quarantined or deleted, or the pattern
        or version is unknown. At the end, the method validates the patterns.
        """
        of: dict[tuple[UUID, UUID | int], Application] = {
            (each.pattern_id, each.episode_id or n): each for n, each in enumerate(applications)
        }
        if not of:
            return 0
        patterns = await self._load({each.pattern_id for each in of.values()}, lock=True)
        episodes = [each.episode_id for each in of.values() if each.episode_id is not None]
        await self.connection.execute(_STAY, self.tenant_id, episodes)
        records = to_json([*map(_application, of.values())]).decode()
        rows = await self.connection.fetch(_RECORD, self.tenant_id, records, GIVEN_ARMS)
        touched = [row["pattern_id"] for row in rows]
        await self._judge(patterns[each] for each in sorted(set(touched)))
        return len(touched)

    async def newest(self, pattern_id: UUID, most: int) -> list[Judged]:
        """Return a pattern version's newest applications whose outcome is known.

        The oldest of these applications is first."""
        rows = await self.connection.fetch(_NEWEST, self.tenant_id, pattern_id, most)
        return [Judged(*row) for row in reversed(rows)]

    async def applied(self, of: Pattern, most: int) -> list[Applied]:
        """Return the last runs that got this version of a pattern."""
        params = of.key, of.version, GIVEN_ARMS, most
        rows = await self.connection.fetch(_APPLIED, self.tenant_id, *params)
        return [
            Applied(from_json(row["features"]), row["good"], _owner(row, of.trust), row["agent"])
            for row in rows
        ]

    async def notify(self) -> None:
        """Notify all processes, at commit, that the tenant's patterns have changed."""
        await self._do(f"SELECT {_NOTIFIED}")

    async def get_many(self, ids: Collection[UUID], *, lock: bool = False) -> dict[UUID, Pattern]:
        """Return complete patterns by id.

        Args:
            lock: true: lock the rows until the transaction ends.

        Raises:
            NotFoundError: the tenant does not have one of the patterns.
        """
        patterns = await self._load(ids, lock=lock)
        for each in ids:
            if each not in patterns:
                raise NotFoundError(f"there is no pattern {each}")
        return patterns

    async def _load(self, ids: Collection[UUID], *, lock: bool) -> dict[UUID, Pattern]:
        # The method locks rows in the order of ids, to prevent deadlocks between transactions.
        query = f"{_LOAD} ORDER BY p.id FOR NO KEY UPDATE OF p" if lock else _LOAD
        rows = await self.connection.fetch(query, self.tenant_id, GIVEN_ARMS, list(ids))
        return {row["id"]: from_row(row) for row in rows}

    async def _insert(self, new: Pattern) -> UUID:
        fresh = new.with_changes(version=1, evidence=Evidence(), lifecycle=Lifecycle())
        row = row_of(fresh, self.now)
        version_id: UUID = await self._do(_INSERT, new.id, row, self.now)
        await self._do(_SOURCES, version_id, new.evidence.mined_from)
        return version_id

    async def _read(self, pattern_id: UUID) -> Pattern:
        return (await self.get_many([pattern_id]))[pattern_id]

    async def _do(self, query: str, *args: Any) -> Any:
        return await self.connection.fetchval(query, self.tenant_id, *args)

    async def write(self, changed: Pattern, *, notify: bool = True) -> None:
        """Store the changes of a locked pattern.

        Args:
            notify: true: notify all processes at commit. A notification is necessary if the change
                affects which runs get the pattern, or the text that these runs read.
        """
        row = row_of(changed, self.now)
        await self._do(_WRITE, changed.key, row, notify)


def _owner(row: asyncpg.Record, trust: int) -> str | None:
    """Return the owner of the texts in an application's features; ``None``: the texts are public.

    Texts without an episode are public. A client may name any episode in a report. So all reported
    texts have the same owner, except in applications of a pattern that a client wrote.
    """
    if trust > IMPORTED and row["arm"] in (Arm.REPORTED, Arm.REPORTED_WITHOUT):
        return owner_of(None, None)
    return owner_of(row["user_id"], row["session_id"]) if row["of_episode"] else None


def _application(application: Application) -> dict[str, Any]:
    row = {each.name: getattr(application, each.name) for each in fields(application)}
    return row | {"features": dict(application.features)}
