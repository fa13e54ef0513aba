"""The rollups of ended runs: buckets, bounds, and that each run counts once."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from operator import not_
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bottega.db.tables import DEFAULT_TENANT
from tests.examples import examples
from tests.waiting import until

NOON = datetime(2026, 11, 2, 12, 30, 10, tzinfo=UTC)
SHARES = (0.5, 0.95, 0.99)
INSERT = """
INSERT INTO runs (tenant_id, timeout_s, mode, agent, input, pinned, created_at, started_at)
SELECT $1, 60, 'orchestrated', a, '"x"', jsonb_build_object('agents', jsonb_build_object(a, 1)),
       $3::timestamptz, $3::timestamptz + interval '1 second'
FROM unnest($2::text[]) AS a RETURNING id
"""
END = """
UPDATE runs SET status = 'completed', ended_at = started_at + interval '2 seconds',
       spent = '[{"agent": "a", "model": "m", "input": 3, "output": 4,
       "cost": {"amount": "0.5"}}]'
WHERE id = ANY ($1)
"""


@pytest.fixture
async def owner(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def store(owner: asyncpg.Connection, *agents: str, at: datetime = NOON) -> list[Any]:
    rows = await owner.fetch(INSERT, DEFAULT_TENANT, agents, at)
    return [row["id"] for row in rows]


async def add_up(owner: asyncpg.Connection) -> None:
    await until(lambda: owner.fetchval("SELECT sum_storage(0)"), not_)


async def rollups(owner: asyncpg.Connection, by: str, span: str = "minute") -> dict[str, Any]:
    rows = await owner.fetch(
        "SELECT at, key, sums FROM metric_rollups WHERE by = $1 AND span = $2", by, span
    )
    assert len({row["at"] for row in rows}) <= 1
    return {row["key"]: json.loads(row["sums"]) for row in rows}


async def test_each_run_counts_once_in_its_minute_and_hour(owner: asyncpg.Connection) -> None:
    ids = await store(owner, "a", "a", "b")
    await owner.execute(END, ids[:2])
    await add_up(owner)
    await add_up(owner)
    await owner.execute("UPDATE runs SET bytes = bytes + 1")  # not another end
    await owner.execute(END, ids[2:])
    await add_up(owner)
    for span, at in (
        ("minute", NOON.replace(second=0)),
        ("hour", NOON.replace(minute=0, second=0)),
    ):
        assert (
            await owner.fetchval("SELECT max(at) FROM metric_rollups WHERE span = $1", span) == at
        )
        sums = (await rollups(owner, "all", span))["all"]
        assert sums == {"runs": 3, "tokens": 21, "cost": 1.5, "duration:4": 3, "queue_wait:0": 3}
    by_agent = await rollups(owner, "agent")
    assert {key: (sums.get("runs"), sums.get("tokens")) for key, sums in by_agent.items()} == {
        "a": (2, 21),
        "b": (1, None),
    }


async def test_what_checks_and_memory_spend_counts_once_whenever_they_do(
    owner: asyncpg.Connection,
) -> None:
    judged = (
        '[{"agent": "a", "model": "judge", "own": false, "input": 100, "output": 5,'
        ' "cached": 0, "reasoning": 0, "estimated": false,'
        ' "cost": {"amount": "1", "currency": "USD", "complete": true}}]'
    )
    (run,) = await store(owner, "a")
    call = "SELECT count_call($1, $2, $3::jsonb)"
    await owner.execute(call, DEFAULT_TENANT, run, judged)
    await owner.execute(END, [run])
    await add_up(owner)
    assert (await rollups(owner, "all"))["all"]["tokens"] == 112
    await owner.execute(call, DEFAULT_TENANT, run, judged)
    await owner.execute(call, DEFAULT_TENANT, None, judged)  # of no run
    await add_up(owner)
    sums = (await rollups(owner, "all"))["all"]
    assert (sums["runs"], sums["tokens"], sums["cost"]) == (1, 217, 2.5)
    assert (await rollups(owner, "model"))["judge"] == {"tokens": 210, "cost": 2}


async def test_drafts_and_batches_do_not_count(owner: asyncpg.Connection) -> None:
    draft, batch, run = await store(owner, "a", "a", "a")
    await owner.execute("UPDATE runs SET pinned = pinned || '{\"draft\": {}}' WHERE id = $1", draft)
    await owner.execute("UPDATE runs SET mode = 'batch' WHERE id = $1", batch)
    await owner.execute(END, [draft, batch, run])
    await add_up(owner)
    assert (await rollups(owner, "all"))["all"]["runs"] == 1


async def test_of_one_minute_two_hundred_keys_have_rows(owner: asyncpg.Connection) -> None:
    names = [f"agent-{number:03}" for number in range(150)]
    await owner.execute(END, await store(owner, *names))
    await add_up(owner)
    await owner.execute(
        END, await store(owner, "agent-000", *(f"later-{n:03}" for n in range(150)))
    )
    await add_up(owner)
    for span in ("minute", "hour"):
        by_agent = await rollups(owner, "version", span)
        assert len(by_agent) == 200
        assert by_agent["agent-000@1"]["runs"] == 2
        assert by_agent["other"]["runs"] == 101
        assert sum(sums.get("runs", 0) for sums in by_agent.values()) == 301


async def test_two_processes_and_one_killed_in_the_middle_lose_nothing(
    owner: asyncpg.Connection, database_url: str
) -> None:
    victim, other = [await asyncpg.connect(database_url) for _ in range(2)]
    await owner.execute(END, await store(owner, *["a"] * 30))
    held = victim.transaction()
    await held.start()
    assert await victim.fetchval("SELECT sum_storage(0)") is False
    assert await other.fetchval("SELECT sum_storage(0)") is False  # one process at a time
    assert await rollups(owner, "all") == {}
    pid = victim.get_server_pid()
    await owner.execute("SELECT pg_terminate_backend($1, 10000)", pid)
    both = asyncio.gather(*(each.fetchval("SELECT sum_storage(0)") for each in (other, owner)))
    await both
    await add_up(owner)
    assert (await rollups(owner, "all"))["all"]["runs"] == 30
    await other.close()
    victim.terminate()


async def test_many_ends_are_added_in_pages(owner: asyncpg.Connection) -> None:
    await owner.execute(END, await store(owner, *["a"] * 1500))
    assert await owner.fetchval("SELECT sum_storage(3600)") is True
    assert await owner.fetchval("SELECT sum_storage(3600)") in (True, False)
    await add_up(owner)
    assert (await rollups(owner, "all"))["all"]["runs"] == 1500


async def test_old_rollups_are_removed(owner: asyncpg.Connection) -> None:
    await owner.execute(
        "INSERT INTO metric_rollups (tenant_id, span, by, at, key, sums)"
        " SELECT $1, span, 'all', now() - make_interval(days => age), 'all', '{}'"
        " FROM unnest('{minute,hour}'::text[]) AS span, unnest('{29,31,365,367}'::int[]) AS age",
        DEFAULT_TENANT,
    )
    await owner.execute("SELECT do_upkeep()")
    kept = await owner.fetch(
        "SELECT span, round(extract(epoch FROM now() - at) / 86400)::int AS age"
        " FROM metric_rollups ORDER BY 1 DESC, 2"
    )
    assert [tuple(row) for row in kept] == [
        *(("minute", 29), ("hour", 29), ("hour", 31), ("hour", 365)),
    ]


TIMES = st.floats(1e-6, 1e8) | st.floats(0.001, 100.0)


async def test_quantiles_of_buckets_are_within_a_tenth(owner: asyncpg.Connection) -> None:
    loop = asyncio.get_running_loop()
    checked = 0

    async def check(times: list[float]) -> None:
        nonlocal checked
        row = await owner.fetchrow(
            "WITH b AS (SELECT jsonb_object_agg('t:' || bucket, n) AS sums FROM ("
            " SELECT time_bucket(t) AS bucket, count(*) AS n FROM unnest($1::float8[]) AS t"
            " GROUP BY 1) AS c)"
            " SELECT ARRAY(SELECT bucket_quantile(sums, 't', s) FROM unnest($2::float8[]) AS s)"
            " AS told FROM b",
            times,
            SHARES,
        )
        assert row is not None
        exact = await owner.fetchval(
            "SELECT percentile_disc($2::float8[]) WITHIN GROUP (ORDER BY t)"
            " FROM unnest($1::float8[]) AS t",
            times,
            SHARES,
        )
        assert row["told"] == pytest.approx(exact, rel=0.1)
        checked += 1

    @settings(
        max_examples=examples(100),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.lists(TIMES, min_size=1, max_size=60))
    def holds(times: list[float]) -> None:
        asyncio.run_coroutine_threadsafe(check(times), loop).result(30)

    await asyncio.to_thread(holds)
    assert checked > 10


LOG = """
INSERT INTO run_steps (tenant_id, run_id, first_seq, last_seq, attempt, at, events)
SELECT tenant_id, id, 2, 30, 1, ended_at, (
    SELECT string_agg(event_line(
        CASE WHEN n % 4 = 0 THEN 'llm.completed' WHEN n % 4 = 1 THEN 'llm.started'
        ELSE 'tool.completed' END,
        jsonb_build_object('model', 'm', 'provider', 'p', 'first_token_ms', 100 + n, 'message',
                           jsonb_build_object('content', repeat('word ', 100))),
        NULL, NULL, 'a'), E'\\n')
    FROM generate_series(1, 28) AS n)
FROM runs
"""
MONTH = """
INSERT INTO metric_rollups (tenant_id, span, by, at, key, sums)
SELECT $1, s.span, k.by, t, k.key, '{"runs": 9, "duration:7": 4, "duration:9": 5, "tokens": 900}'
FROM (VALUES ('minute', interval '1 minute'), ('hour', interval '1 hour')) AS s(span, width)
CROSS JOIN (
    SELECT 'all' AS by, 'all' AS key
    UNION ALL SELECT 'agent', 'agent-' || n FROM generate_series(1, $2) AS n) AS k
CROSS JOIN generate_series($3::timestamptz, $3::timestamptz + interval '30 days', s.width) AS t
ORDER BY t
"""


@pytest.mark.deep
async def test_what_rollups_cost(owner: asyncpg.Connection) -> None:
    """Measure a thousand ended runs of seven model calls: one statement for all of them."""
    await owner.execute(END, await store(owner, *[f"agent-{n % 20}" for n in range(1000)]))
    await owner.execute(LOG)
    await owner.execute("DELETE FROM storage_changes WHERE of_run IS NULL; ANALYZE")
    plan = await owner.fetchval("EXPLAIN (ANALYZE, FORMAT JSON) SELECT sum_storage(0)")
    took_ms = json.loads(plan)[0]["Execution Time"]
    print(f"1,000 ended runs: {took_ms:.0f} ms in one statement")
    assert (await rollups(owner, "all"))["all"]["runs"] == 1000
    assert took_ms < 5000  # on a busy machine


@pytest.mark.deep
async def test_reading_a_month_is_bounded(owner: asyncpg.Connection) -> None:
    """Read thirty days of a busy tenant with 20 agents: no more rows than its points need."""
    await owner.execute(MONTH, DEFAULT_TENANT, 20, NOON)
    await owner.execute("ANALYZE metric_rollups; SET enable_sort = off")  # as the route does
    await owner.execute("SELECT set_config('bottega.tenant', $1, false)", str(DEFAULT_TENANT))
    for span, by, step, most in (
        ("minute", "all", "5 minutes", 55_000),
        ("minute", "agent", "5 minutes", 55_000),
        ("hour", "agent", "1 day", 264_000),
    ):
        plan = await owner.fetchval(
            "EXPLAIN (ANALYZE, FORMAT JSON) SELECT key, at, bucket_quantile(sums, 'duration', 0.95)"
            f" FROM read_rollups('{DEFAULT_TENANT}', '{span}', '{by}', 'duration:%',"
            f" '{NOON}', '{NOON}'::timestamptz + interval '30 days', interval '{step}', {most})"
        )
        took_ms = json.loads(plan)[0]["Execution Time"]
        print(f"30 days of {span}s by {by}: {took_ms:.0f} ms")
        assert took_ms < 10_000
        assert _most_rows(json.loads(plan)[0]["Plan"]) <= 4 * (most + 1)


def _most_rows(plan: dict[str, Any]) -> float:
    """Return the largest number of rows that a part of a plan gave."""
    own = float(plan["Actual Rows"]) * float(plan["Actual Loops"])
    return max([own, *(_most_rows(each) for each in plan.get("Plans", ()))])
