"""Rows of patterns. Every function runs in a transaction of the tenant's
(:func:`bottega.db.engine.acting_as`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega.db.driver import decoded
from bottega.db.pages import PageItems, fetch_rows
from bottega.memory.patterns.pattern import (
    APPLIED,
    Baseline,
    Category,
    Evidence,
    Lifecycle,
    Pattern,
    PatternState,
)

CHANNEL = "bottega_patterns"
"""Channel that receives a tenant's id when a change affects the assignment of patterns."""

_NOTIFY = f"SELECT pg_notify('{CHANNEL}', $1)"
_KEPT_EPISODES = 20

COLUMNS = """
    p.id, p.name, p.category, p.state, p.version, p.trust, p.fingerprint, p.document, p.origin,
    p.created_at, p.updated_at, p.uses, p.last_used, p.replaced_by, p.reason, p.applications,
    p.success_rate, p.time_saved_s, p.tokens_saved, p.uplift, p.confidence, p.p_value, p.e_value,
    p.baseline, p.verdict, p.validated_at
"""
"""Columns of ``patterns p`` that :func:`pattern` reads."""

_EPISODES_OF = """
    ARRAY(SELECT a.episode_id FROM pattern_applications a
          WHERE a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
            AND a.good = {good} AND a.arm = ANY ($3) AND a.episode_id IS NOT NULL
          ORDER BY a.at DESC, a.id DESC LIMIT {most}) AS {name}
"""
_WHOLE = f"""
SELECT {COLUMNS},
    ARRAY(SELECT s.episode_id FROM pattern_sources s
          WHERE s.tenant_id = p.tenant_id AND s.pattern_id = p.id
          ORDER BY s.episode_id) AS mined_from,
    {_EPISODES_OF.format(good="true", most=_KEPT_EPISODES, name="supporting")},
    {_EPISODES_OF.format(good="false", most=_KEPT_EPISODES, name="contrary")}
FROM patterns p WHERE p.tenant_id = $1 AND p.id = ANY ($2)
"""  # noqa: S608 (texts of ours)
_HELD = f"""
SELECT {COLUMNS} FROM patterns p WHERE p.tenant_id = $1 AND p.id = ANY ($2)
ORDER BY p.id FOR NO KEY UPDATE
"""  # noqa: S608
_PAGE = """
SELECT p.id FROM patterns p
WHERE p.tenant_id = $1 AND (cardinality($2::text[]) = 0 OR p.state = ANY ($2))
  AND (cardinality($3::text[]) = 0 OR p.category = ANY ($3))
  AND ($4::uuid IS NULL OR p.id {beyond} $4)
ORDER BY p.id {order} LIMIT $5
"""
# Adding waits for others that add for the tenant: two equal patterns at once are one.
_ALONE = "SELECT pg_advisory_xact_lock(hashtextextended('patterns ' || $1::uuid, 0))"
_TWIN = """
SELECT p.id FROM patterns p
WHERE p.tenant_id = $1 AND p.state <> 'DEPRECATED' AND p.category = $2 AND p.trust = $4
  AND p.meaning = jsonb_hash_extended(
      $3::jsonb -> 'content', jsonb_hash_extended($3::jsonb -> 'applicability', 0))
  AND p.document -> 'content' = $3::jsonb -> 'content'
  AND p.document -> 'applicability' = $3::jsonb -> 'applicability'
ORDER BY p.id LIMIT 1
"""
_SAME = "SELECT p.id FROM patterns p WHERE p.tenant_id = $1 AND p.fingerprint = $2"
# The pattern, its replacement, that one's replacement, and so on.
_OUT_OF_USE = """
WITH RECURSIVE chain AS (
    SELECT p.id, p.replaced_by, p.state, p.updated_at FROM patterns p
    WHERE p.tenant_id = $1 AND p.id = $2
    UNION
    SELECT p.id, p.replaced_by, p.state, p.updated_at
    FROM chain c JOIN patterns p ON p.tenant_id = $1 AND p.id = c.replaced_by)
SELECT max(updated_at) FROM chain HAVING bool_and(state = 'DEPRECATED')
"""
_INSERT = """
INSERT INTO patterns (tenant_id, id, name, category, state, version, trust, fingerprint, document,
                      origin, created_at, updated_at)
VALUES ($1, coalesce($2, uuidv7()), $3, $4, 'CANDIDATE', 1, $5, $6, $7::jsonb, $8::jsonb, $9, $9)
RETURNING id
"""
_GIVEN = "SELECT count(*) FROM patterns WHERE tenant_id = $1 AND fingerprint IS NULL"
# Skips episodes that were erased meanwhile, and those that are evidence already.
_SOURCES = """
WITH there AS (
    SELECT episode_id FROM episode_state WHERE tenant_id = $1 AND episode_id = ANY ($3)
    ORDER BY episode_id FOR KEY SHARE)
INSERT INTO pattern_sources (tenant_id, pattern_id, episode_id)
SELECT $1, $2, episode_id FROM there WHERE NOT EXISTS (
    SELECT FROM pattern_applications a
    WHERE a.tenant_id = $1 AND a.pattern_id = $2 AND a.episode_id = there.episode_id)
ON CONFLICT DO NOTHING
"""
_WRITE = """
UPDATE patterns SET name = $3, category = $4, state = $5, version = $6, trust = $7,
    document = $8::jsonb, origin = $9::jsonb, updated_at = $10, replaced_by = $11, reason = $12,
    applications = $13, success_rate = $14, time_saved_s = $15, tokens_saved = $16, uplift = $17,
    confidence = $18, p_value = $19, e_value = $20, baseline = $21::jsonb, verdict = $22,
    validated_at = $23
WHERE tenant_id = $1 AND id = $2
"""
_GIVEN_ARMS = sorted(arm.value for arm in APPLIED)


@dataclass(frozen=True, slots=True)
class PatternFilter:
    """Filter of patterns; an empty field matches all."""

    states: tuple[PatternState, ...] = ()
    categories: tuple[Category, ...] = ()


EVERY_PATTERN = PatternFilter()


async def notify_change(connection: asyncpg.Connection, tenant_id: UUID) -> None:
    """Notify all processes, on commit, that the tenant's patterns changed."""
    await connection.execute(_NOTIFY, str(tenant_id))


async def load(
    connection: asyncpg.Connection, tenant_id: UUID, ids: Sequence[UUID]
) -> dict[UUID, Pattern]:
    """Return complete patterns by id; unknown ones are missing."""
    rows = await connection.fetch(_WHOLE, tenant_id, ids, _GIVEN_ARMS)
    return {row["id"]: pattern(row) for row in rows}


async def load_page(
    connection: asyncpg.Connection, tenant_id: UUID, ids: Sequence[UUID], *, limit: int
) -> PageItems[Pattern]:
    """Load as many of the patterns as fit in a page, in the order of ``ids``."""
    query = f"{_WHOLE} ORDER BY array_position($2, p.id) LIMIT $4"
    rows = await fetch_rows(connection, query, tenant_id, ids, _GIVEN_ARMS, limit=limit)
    return PageItems(map(pattern, rows), more=rows.more)


async def hold(
    connection: asyncpg.Connection, tenant_id: UUID, ids: Iterable[UUID]
) -> dict[UUID, Pattern]:
    """Lock patterns until the transaction ends; return them by id, without the episodes in their
    evidence. Locks are taken in the order of ids, so that transactions do not deadlock."""
    rows = await connection.fetch(_HELD, tenant_id, list(ids))
    return {row["id"]: pattern(row) for row in rows}


async def page(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    where: PatternFilter,
    *,
    limit: int,
    after: UUID | None = None,
    descending: bool = False,
) -> list[UUID]:
    """Return at most ``limit`` ids of matching patterns in the order of their creation."""
    order = {"beyond": "<", "order": "DESC"} if descending else {"beyond": ">", "order": ""}
    statement = _PAGE.format(**order)
    rows = await connection.fetch(
        statement, tenant_id, list(where.states), list(where.categories), after, limit
    )
    return [row["id"] for row in rows]


async def given(connection: asyncpg.Connection, tenant_id: UUID) -> int:
    """Return the number of patterns that clients wrote."""
    count: int = await connection.fetchval(_GIVEN, tenant_id)
    return count


async def alone(connection: asyncpg.Connection, tenant_id: UUID) -> None:
    """Wait until no other transaction adds patterns of the tenant; it keeps others waiting."""
    await connection.execute(_ALONE, tenant_id)


async def twin(connection: asyncpg.Connection, tenant_id: UUID, new: Pattern) -> UUID | None:
    """Return a pattern in use of equal category, trust, applicability and content."""
    found: UUID | None = await connection.fetchval(
        _TWIN, tenant_id, new.category, _json(new.document), new.trust
    )
    return found


async def same(
    connection: asyncpg.Connection, tenant_id: UUID, fingerprint: str | None
) -> UUID | None:
    """Return the id of the pattern with a fingerprint; ``None`` without one."""
    found: UUID | None = await connection.fetchval(_SAME, tenant_id, fingerprint)
    return found


async def out_of_use(
    connection: asyncpg.Connection, tenant_id: UUID, pattern_id: UUID
) -> datetime | None:
    """Return the time since which a pattern and its replacements are all deprecated."""
    since: datetime | None = await connection.fetchval(_OUT_OF_USE, tenant_id, pattern_id)
    return since


async def insert(
    connection: asyncpg.Connection, tenant_id: UUID, new: Pattern, at: datetime
) -> UUID:
    """Insert a new candidate, whose fingerprint must not exist; return its id."""
    stored: UUID = await connection.fetchval(
        _INSERT,
        *(tenant_id, new.id, new.name, new.category, new.trust, new.fingerprint),
        *(_json(new.document), _json(new.origin), at),
    )
    await add_sources(connection, tenant_id, stored, new.evidence.mined_from)
    return stored


async def add_sources(
    connection: asyncpg.Connection, tenant_id: UUID, pattern_id: UUID, ids: Sequence[UUID]
) -> None:
    await connection.execute(_SOURCES, tenant_id, pattern_id, ids)


async def write(
    connection: asyncpg.Connection, tenant_id: UUID, changed: Pattern, at: datetime
) -> None:
    """Update a pattern that :func:`hold` locked. Its uses and episodes are written elsewhere."""
    evidence, life = changed.evidence, changed.lifecycle
    await connection.execute(
        _WRITE,
        *(tenant_id, changed.key, changed.name, changed.category, life.state, changed.version),
        *(changed.trust, _json(changed.document), _json(changed.origin), at),
        *(life.replaced_by, life.reason, evidence.applications, evidence.success_rate),
        *(
            evidence.time_saved_s,
            evidence.tokens_saved,
            evidence.uplift,
            evidence.confidence,
            evidence.p_value,
        ),
        *(
            evidence.e_value,
            _json(asdict(evidence.baseline)),
            evidence.verdict,
            evidence.validated_at,
        ),
    )


def pattern(row: Mapping[str, Any]) -> Pattern:
    """Build a pattern from a row with :data:`COLUMNS`, and perhaps its evidence's episodes."""
    baseline = decoded(row["baseline"])
    measured = {name: row[name] for name in _MEASURED}
    measured |= {name: tuple(row[name]) for name in _EPISODES if name in row.keys()}  # noqa: SIM118
    return Pattern.from_document(
        decoded(row["document"]),
        **{name: row[name] for name in _PLAIN},
        category=Category(row["category"]),
        origin=decoded(row["origin"]),
        evidence=Evidence(**measured, baseline=Baseline(**baseline) if baseline else Baseline()),
        lifecycle=Lifecycle(PatternState(row["state"]), **{name: row[name] for name in _LIVED}),
    )


_PLAIN = ("id", "name", "version", "created_at", "updated_at", "trust", "fingerprint")
_MEASURED = (
    "applications",
    "success_rate",
    "time_saved_s",
    "tokens_saved",
    "uplift",
    "confidence",
    "p_value",
    "e_value",
    "verdict",
    "validated_at",
)
_LIVED = ("uses", "last_used", "replaced_by", "reason")
_EPISODES = ("mined_from", "supporting", "contrary")


def _json(value: Any) -> str:
    return to_json(value).decode()
