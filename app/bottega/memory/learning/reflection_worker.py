"""Learning from finished runs, in the background.

When an episode is stored, its run is enqueued if a model must reflect on the run, or if a pattern
was given to, or withheld from, the run. To lease some runs, a worker moves the time of the runs'
next try into the future. One transaction stores which patterns each run got, which patterns were
withheld, and the results. Then, outside of any transaction, a model reflects on the run, if a model
is configured. At the end, the worker stores the reflection and removes the run from the queue.
Learning does not change the run itself.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import asyncpg
from pydantic_core import from_json, to_json

from bottega.db.failures import is_transient
from bottega.db.pool import acting_as
from bottega.errors import BudgetExhaustedError, ModelError, UnavailableError
from bottega.leased_work import Blame, LeasedWork
from bottega.logger import Logger
from bottega.memory.episodes import search
from bottega.memory.episodes.episode import Episode
from bottega.memory.episodes.scope import EVERYTHING
from bottega.memory.learning.mining import counts
from bottega.memory.learning.reflection import (
    Analyst,
    Reflection,
    applications_of,
    asked_of,
    reflect,
    went_well,
    with_insights,
)
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import OF_RUN

MOST_TRIES = 6
"""Maximum number of model calls for one run, after which learning from the run fails. A maintenance
job on demand enqueues the run again."""

_OF_RUN = sorted(OF_RUN)

log = Logger(__name__)

_TRACES = """
SELECT episode_id, content FROM episode_bodies
WHERE tenant_id = $1 AND episode_id = ANY ($2) AND part = 'trace' AND content IS NOT NULL
"""
# For patterns of the categories OF_RUN, the run's outcome is the result, even after patterns were
# merged. If the run's episode is no longer evidence, none of the run's patterns has a result.
_JUDGED = """
UPDATE pattern_applications a SET good = n.good
FROM unnest($2::uuid[], $3::boolean[], $4::boolean[]) AS n(episode_id, good, counts), patterns p
WHERE a.tenant_id = $1 AND a.episode_id = n.episode_id AND a.good IS DISTINCT FROM n.good
  AND p.tenant_id = $1 AND p.id = a.pattern_id
  AND (NOT n.counts OR (a.arm NOT LIKE 'reported%' AND p.category = ANY ($5)))
"""
_WRITE = """
INSERT INTO episode_reflections (tenant_id, episode_id, reflection)
SELECT $1, n.episode_id, n.reflection
FROM jsonb_to_recordset($2::jsonb) AS n(episode_id uuid, reflection jsonb)
CROSS JOIN LATERAL (
    SELECT FROM episodes e WHERE e.tenant_id = $1 AND e.id = n.episode_id LIMIT 1) AS e
ON CONFLICT DO NOTHING
"""
# This statement matches no row if a concurrent request to learn again has reset ``tries``.
_END = """
UPDATE run_learning l SET status = n.status, error = n.error, result = coalesce(n.result, l.result),
    next_at = clock_timestamp() + make_interval(secs => n.wait_s), updated_at = clock_timestamp()
FROM jsonb_to_recordset($2::jsonb) AS n(
    run_id uuid, tries integer, status text, error text, result jsonb, wait_s double precision)
WHERE l.tenant_id = $1 AND l.run_id = n.run_id AND l.tries = n.tries AND l.status = 'pending'
"""
_AGAIN = """
UPDATE run_learning SET status = 'pending', tries = 0, next_at = clock_timestamp(), error = NULL,
    updated_at = clock_timestamp()
WHERE tenant_id = $1 AND status = 'failed'
"""


class ReflectionWorker:
    """Worker that learns from finished runs; any number of processes may run such a worker.

    Args:
        analyst: a model that reflects on runs; ``None``: only rules reflect.
    """

    def __init__(
        self, pool: asyncpg.Pool, patterns: PatternCache, *, analyst: Analyst | None = None
    ) -> None:
        self._pool = pool
        self._patterns = patterns
        self._analyst = analyst
        self.work = LeasedWork(
            pool=pool,
            name="learn",
            columns="run_id uuid, episode_id uuid, tries integer",
            lease_s=300.0,
            share=16 if analyst is None else 4,
            places=64 if analyst is None else None,
            batch=16 if analyst is None else 1,
            do=self._learn,
            blame=lambda error: None if is_transient(error) else Blame.ROW,
            put_off=self._put_off,
            longest_rest_s=1.0,
            channel=search.CHANNEL,
            poll_s=search.POLL_S,
        )

    async def _put_off(
        self, tenant_id: UUID, claimed: Sequence[asyncpg.Record], error: Exception, _: float | None
    ) -> None:
        (due,) = claimed
        log.error("run.not_learned", run_id=str(due["run_id"]), exc_info=error)
        why = f"an internal error ({type(error).__name__}); see the worker's log"
        async with acting_as(self._pool, tenant_id) as connection:
            await _end(connection, tenant_id, [_failed(due, why)], {})

    async def _learn(self, tenant_id: UUID, due: Sequence[asyncpg.Record]) -> None:
        """Store all results that need no model, in one transaction; then let the model reflect."""
        async with acting_as(self._pool, tenant_id) as connection:
            episodes = await _episodes(connection, tenant_id, [row["episode_id"] for row in due])
            count = await self._count(connection, tenant_id, episodes)
            found = {each: reflect(one) for each, one in episodes.items() if not one.reflection}
            requests, written = ({}, found) if self._analyst is None else (found, {})
            by = {each: (one.reflection or {}).get("by") for each, one in episodes.items()}
            ended = [
                _done(row, str(by.get(each) or "rules"), count[each])
                for row in due
                if (each := row["episode_id"]) not in requests
            ]
            await _end(connection, tenant_id, ended, written)

        async def ask(row: asyncpg.Record, analyst: Analyst) -> None:
            """Store the model's reflection on an episode, or the reason why the model gave none."""
            each = row["episode_id"]
            results: dict[UUID, Reflection] = {}
            try:
                about = asked_of(episodes[each], requests[each])
                reflection = await analyst.reflect((tenant_id, row["run_id"]), about)
            except BudgetExhaustedError:  # no retry, because the reflection by rules is enough
                results[each] = requests[each]
                ended = _done(row, "rules", count[each])
            except (ModelError, UnavailableError) as error:
                log.warning("run.not_learned", run_id=str(row["run_id"]), error=error.detail)
                ended = _failed(row, error.detail)
            else:
                results[each] = with_insights(requests[each], reflection, analyst.name)
                ended = _done(row, analyst.name, count[each])
            async with acting_as(self._pool, tenant_id) as connection:
                await _end(connection, tenant_id, [ended], results)

        if self._analyst is not None:
            asks = [ask(row, self._analyst) for row in due if row["episode_id"] in requests]
            for error in await asyncio.gather(*asks, return_exceptions=True):
                if error is not None:
                    raise error

    async def _count(
        self, connection: asyncpg.Connection, tenant_id: UUID, episodes: Mapping[UUID, Episode]
    ) -> Counter[UUID | None]:
        applications = [each for one in episodes.values() for each in applications_of(one)]
        await self._patterns.store(connection, tenant_id).record_application(applications)
        judged = [
            (each, went_well(one) if counts(one) else None, counts(one))
            for each, one in episodes.items()
            if one.metadata.get("patterns")
        ]
        if judged:
            await connection.execute(_JUDGED, tenant_id, *zip(*judged, strict=True), _OF_RUN)
        return Counter(each.episode_id for each in applications)


def _done(due: asyncpg.Record, by: str, applications: int) -> dict[str, Any]:
    result = {"by": by, "applications": applications}
    return {**due, "status": "done", "result": result, "wait_s": 0.0}


def _failed(due: asyncpg.Record, error: str) -> dict[str, Any]:
    pause_s = min(3600.0, 10.0 * 4.0 ** (due["tries"] - 1))
    status = "pending" if due["tries"] < MOST_TRIES else "failed"
    return {**due, "status": status, "error": error[:500], "wait_s": pause_s}


async def learn_again(connection: asyncpg.Connection, tenant_id: UUID) -> int:
    """Enqueue the runs whose learning failed after all tries; return the number of these runs."""
    result: str = await connection.execute(_AGAIN, tenant_id)
    return int(result.split()[-1])


async def _episodes(
    connection: asyncpg.Connection, tenant_id: UUID, ids: Sequence[UUID]
) -> dict[UUID, Episode]:
    episodes = await search.load(connection, EVERYTHING, ids)
    traces = await connection.fetch(_TRACES, tenant_id, list(episodes))
    for row in traces:
        episode = episodes[row["episode_id"]]
        episodes[row["episode_id"]] = replace(episode, trace=from_json(row["content"]))
    return episodes


async def _end(
    connection: asyncpg.Connection,
    tenant_id: UUID,
    ended: Sequence[Mapping[str, Any]],
    reflections: Mapping[UUID, Reflection],
) -> None:
    if reflections:
        rows = [{"episode_id": each, "reflection": one} for each, one in reflections.items()]
        await connection.execute(_WRITE, tenant_id, to_json(rows).decode())
    if ended:
        await connection.execute(_END, tenant_id, to_json(ended).decode())
