"""Rows of patterns, in transactions of their tenant (:func:`bottega.db.engine.acting_as`)."""

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega.db.driver import decoded
from bottega.memory.patterns.pattern import (
    APPLIED,
    Evidence,
    Pattern,
    pattern_of,
)

CHANNEL = "bottega_patterns"
"""Channel that receives a tenant's id when a change affects the assignment of patterns."""
GIVEN_ARMS = sorted(arm.value for arm in APPLIED)
"""Arms of runs that were given a pattern."""

_NOTIFIED = f"pg_notify('{CHANNEL}', $1::uuid::text)"
_KEPT_EPISODES = 20

_EPISODES = ("mined_from", "supporting", "contrary")
_MEASURED = [each.name for each in fields(Evidence) if each.name not in _EPISODES]
_WRITTEN = ("name", "category", "state", "version", "trust", "fingerprint", "document", "origin")
_CHANGED = ", ".join((*_WRITTEN, "updated_at", "replaced_by", "reason", *_MEASURED))
"""Columns that a change of a pattern writes."""
COLUMNS = f"id, created_at, uses, last_used, {_CHANGED}"
"""Columns of ``patterns`` that :func:`pattern` reads."""

_EPISODES_OF = """
    ARRAY(SELECT a.episode_id FROM pattern_applications a
          WHERE a.tenant_id = p.tenant_id AND a.pattern_id = p.id AND a.version = p.version
            AND a.good = {good} AND a.arm = ANY ($2) AND a.episode_id IS NOT NULL
          ORDER BY a.at DESC, a.id DESC LIMIT {most}) AS {name}
"""
_COLUMNS = f"""
SELECT {COLUMNS},
    ARRAY(SELECT s.episode_id FROM pattern_sources s
          WHERE s.tenant_id = p.tenant_id AND s.pattern_id = p.id
          ORDER BY s.episode_id) AS mined_from,
    {_EPISODES_OF.format(good="true", most=_KEPT_EPISODES, name="supporting")},
    {_EPISODES_OF.format(good="false", most=_KEPT_EPISODES, name="contrary")}
"""  # noqa: S608 (texts of ours)
LOAD = f"{_COLUMNS} FROM patterns p WHERE p.tenant_id = $1 AND p.id = ANY ($3)"
"""Complete patterns: arguments are the tenant, :data:`GIVEN_ARMS` and ids."""
# The first of each state by its index, then those by their keys.
PAGE = f"""
{_COLUMNS} FROM (
    SELECT f.id FROM unnest($3::text[]) AS s(state) CROSS JOIN LATERAL (
        SELECT o.id FROM patterns o
        WHERE o.tenant_id = $1 AND o.state = s.state AND o.category = ANY ($4)
          AND o.id {{beyond}} coalesce($5::uuid, CASE '{{beyond}}'
              WHEN '<' THEN 'ffffffff-ffff-ffff-ffff-ffffffffffff' ELSE repeat('0', 32) END::uuid)
        ORDER BY o.id {{order}} LIMIT $6) AS f
    ORDER BY f.id {{order}} LIMIT $6) AS n(key)
CROSS JOIN LATERAL (
    SELECT * FROM patterns o WHERE o.tenant_id = $1 AND o.id = n.key LIMIT 1) AS p
ORDER BY p.id {{order}}
"""  # noqa: S608 (texts of ours)
"""Page of patterns: the first two arguments, then states, categories, and a place."""
INSERT = f"""
INSERT INTO patterns (tenant_id, id, created_at, {_CHANGED})
SELECT $1, coalesce($2, uuidv7()), $4, {_CHANGED}
FROM jsonb_populate_record(NULL::patterns, $3::jsonb)
RETURNING id, {_NOTIFIED}
"""  # noqa: S608
"""Insert :func:`row_of` a pattern whose fingerprint is new, and notify all processes on commit."""
# Skips episodes that were erased meanwhile, and those that are evidence already.
SOURCES = """
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
WRITE = f"""
UPDATE patterns SET ({_CHANGED}) = (
    SELECT {_CHANGED} FROM jsonb_populate_record(NULL::patterns, $3::jsonb))
WHERE tenant_id = $1 AND id = $2 RETURNING {_NOTIFIED}
"""  # noqa: S608
"""Write :func:`row_of` a locked pattern, and notify all processes on commit. Its uses and the
episodes of its evidence are written elsewhere."""


async def notify_change(connection: asyncpg.Connection, tenant_id: UUID) -> None:
    """Notify all processes, on commit, that the tenant's patterns changed."""
    await connection.execute(f"SELECT {_NOTIFIED}", tenant_id)


def pattern(row: Mapping[str, Any]) -> Pattern:
    """Build a pattern from a row with :data:`COLUMNS`, and perhaps its evidence's episodes."""
    flat = dict(row)
    document, origin, baseline = (
        decoded(flat[each]) for each in ("document", "origin", "baseline")
    )
    flat |= {"origin": origin, "baseline": baseline}
    return pattern_of({**document, **flat, "evidence": flat, "lifecycle": flat})


def row_of(pattern: Pattern, at: datetime) -> str:
    """Return the columns of a pattern that it stores, as JSON."""
    of = {name: getattr(pattern, name) for name in _WRITTEN}
    of |= {name: getattr(pattern.evidence, name) for name in _MEASURED}
    of |= {name: getattr(pattern.lifecycle, name) for name in ("replaced_by", "reason")}
    return to_json(of | {"updated_at": at}).decode()
