"""Rows that statements read where the planner knows nothing of a tenant, or only of others.

It may then expect one row of each tenant in each table, and read all of them for each row of a
join. So these tests count rows.
"""

from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import from_json, to_json

from bottega.db.connect import connect
from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.memory.episodes import embedding_worker, maintenance
from bottega.memory.patterns import store as pattern_store
from tests.claims import leased
from tests.stores.test_child_runs import ADD, new
from tests.stores.test_neighbours import claimed
from tests.stores.test_queue import tenants

_READ = """
SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = $1
"""
_SENT = "SELECT * FROM sent_to_runs($1, $2, array_fill(0, ARRAY[50]))"
_MANY = 3000
_RUNS = """
INSERT INTO runs (tenant_id, id, timeout_s, mode, input, pinned, status, ended_at)
SELECT $1, uuidv7(), 60, 'orchestrated', '"x"', '{}', 'completed', now() - interval '2 days'
FROM generate_series(1, $2) RETURNING id
"""
_EPISODES = """
WITH one AS (
    INSERT INTO episodes (tenant_id, run_id, at, outcome, trust, task, summary)
    SELECT $1, uuidv7(), now() - i * interval '1 hour', 'SUCCESS', 3, '{}', '{"task": "x"}'
    FROM generate_series(1, $2) AS i RETURNING id, at
), held AS (
    INSERT INTO episode_state (tenant_id, episode_id, state, at, task_key)
    SELECT $1, id, 'mature', at, decode(md5(id::text), 'hex') FROM one
), found AS (
    INSERT INTO episode_search (tenant_id, episode_id, at, outcome, trust, terms)
    SELECT $1, id, at, 'SUCCESS', 3, '' FROM one
), near AS (
    INSERT INTO episode_vectors (tenant_id, episode_id, embedder, at, outcome, task, result, whole)
    SELECT $1, id, 'one', at, 'SUCCESS', '[1,2]', '', '' FROM one
), kept AS (
    INSERT INTO episode_bodies (tenant_id, episode_id, part, object_key, bytes)
    SELECT $1, id, 'trace', 'x', 1 FROM one
)
SELECT id FROM one
"""


@pytest.fixture
async def acting(database_url: str) -> Any:
    """A new session of the service, in a transaction of the default tenant."""
    connection = await connect(database_url)
    async with connection.transaction():
        query = "SELECT set_config('bottega.tenant', $1, true)"
        await connection.execute(query, str(DEFAULT_TENANT))
        yield connection
    await connection.close()


@pytest.fixture(autouse=True)
async def nothing_analysed(owner: asyncpg.Pool) -> None:
    tables = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = $1::regnamespace"
    for (table,) in await owner.fetch(tables, "public"):
        await owner.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")


async def filled(owner: asyncpg.Pool, query: str, count: int, *tenant: UUID) -> list[UUID]:
    """Insert rows of a tenant, the default one or another; return their ids."""
    rows = await owner.fetch(query, *(tenant or (DEFAULT_TENANT,)), count)
    return [row["id"] for row in rows]


async def read(connection: asyncpg.Connection, table: str) -> int:
    found: int = await connection.fetchval(_READ, table)
    return found


@pytest.mark.parametrize(
    ("query", "table"),
    [
        ("SELECT * FROM ended_children($1, $2)", "runs"),
        (_SENT, "interrupts"),
        (_SENT, "run_messages"),
    ],
)
async def test_statistics_of_another_tenant_make_no_statement_slow(
    owner: asyncpg.Pool, acting: asyncpg.Connection, query: str, table: str
) -> None:
    (other,) = await tenants(owner, 1)
    runs: list[UUID] = []
    for tenant in (other, DEFAULT_TENANT):
        runs = await filled(owner, _RUNS, _MANY, tenant)
        await owner.execute(
            "INSERT INTO run_messages (tenant_id, run_id, number, content) "
            "SELECT $1, id, 1, '\"x\"' FROM unnest($2::uuid[]) AS id",
            *(tenant, runs),
        )
        await owner.execute(
            "INSERT INTO interrupts (tenant_id, id, run_id, kind, call, tool, tool_call_id, "
            "arguments, status, created_at, expires_at) SELECT $1, uuidv7(), id, 'approval', 1, "
            "'x', 'x', '{}', 'resolved', now(), now() FROM unnest($2::uuid[]) AS id",
            *(tenant, runs),
        )
        if tenant == other:
            await owner.execute("ANALYZE")
    await acting.fetch(query, [DEFAULT_TENANT] * 50, runs[::60])
    assert await read(acting, table) <= 200


@pytest.mark.parametrize(
    ("table", "rows", "work"),
    [
        ("run_checks", "run_id, status) SELECT $1, id, 'pending'", "check"),
        (
            "run_learning",
            "run_id, episode_id, status) SELECT $1, id, uuidv7(), 'pending'",
            "learn",
        ),
    ],
)
async def test_a_claim_of_work_compares_no_row_with_all(
    owner: asyncpg.Pool, acting: asyncpg.Connection, table: str, rows: str, work: str
) -> None:
    """Check a backlog that began after the last ANALYZE, which saw that nothing was due."""
    runs = await filled(owner, _RUNS, _MANY)
    insert = f"INSERT INTO {table} (tenant_id, {rows} FROM unnest($2::uuid[]) AS id"
    await owner.execute(insert, DEFAULT_TENANT, runs)
    await owner.execute(f"UPDATE {table} SET status = 'done'")
    await owner.execute("ANALYZE")
    await owner.execute(f"UPDATE {table} SET status = 'pending', next_at = '-infinity'")
    assert len(await leased(acting, work, most=20, each=20)) == 20
    assert await read(acting, table) <= 4.5 * _MANY  # to find tenants and their first ones


async def test_links_and_live_text_read_no_other_runs(
    database: Database, owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    run = await claimed(database, DEFAULT_TENANT)
    await filled(owner, _RUNS, _MANY)
    await owner.execute(
        "INSERT INTO live_text (tenant_id, run_id, call, attempt, at, text) "
        "VALUES ($1, $2, 1, 1, 0, 'x')",
        *(DEFAULT_TENANT, run.run_id),
    )
    known = [uuid4() for _ in range(5)]
    for _ in range(2):
        texts = ",".join(map(new, known))
        await acting.fetchval(ADD, DEFAULT_TENANT, run.run_id, f"[{texts}]")
    assert await read(acting, "runs") <= 100
    await acting.fetchval("SELECT sweep(60)")
    assert await read(acting, "runs") <= 200


async def test_live_text_of_ended_calls_is_found_by_run(
    database: Database, owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    """Analysed while one run had text, as happens with few runs at night."""
    runs = [(await claimed(database, DEFAULT_TENANT)).run_id for _ in range(20)]
    write = (
        "INSERT INTO live_text (tenant_id, run_id, call, attempt, at, text) SELECT $1, id, 1, 1, "
        "0, 'x' FROM unnest($2::uuid[]) AS id CROSS JOIN generate_series(1, 50)"
    )
    await owner.execute(write, DEFAULT_TENANT, runs[:1] * 10)
    await owner.execute("ANALYZE live_text")
    await owner.execute(write, DEFAULT_TENANT, runs[1:])
    calls = len(runs) - 1
    await acting.execute(
        "SELECT clear_live_text($1, $2, $3, $4, $4, $5)",
        *([DEFAULT_TENANT] * calls, runs[1:], [None] * calls, [1] * calls, [None] * calls),
    )
    assert await acting.fetchval("SELECT count(*) FROM live_text") == 500
    assert await read(acting, "live_text") <= 500 + 3 * 50 * calls


async def test_ageing_compares_no_episode_with_all(
    owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    ids = await filled(owner, _EPISODES, 500)
    waiting = "SELECT count(*) FROM episode_state WHERE task_key IS NOT NULL"
    assert await acting.fetchval(waiting) == 500
    await acting.execute("SELECT dismiss_lonely_episodes(now(), '1 day', 500)")
    assert await acting.fetchval(waiting) == 0
    assert await read(acting, "episode_state") <= 10_000
    aged = await acting.fetchval("SELECT age_episodes($1, 'aged', now(), '[]')", ids[:100])
    assert aged == 100
    assert await read(acting, "episode_bodies") <= 2_000


async def test_episodes_that_mature_are_read_by_key(
    owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    (other,) = await tenants(owner, 1)
    await filled(owner, _EPISODES, 500, other)
    await owner.execute("ANALYZE")
    await filled(owner, _EPISODES, 500)
    await owner.execute("UPDATE episode_state SET state = 'active'")
    now = await owner.fetchval("SELECT now()")
    assert len(await acting.fetch(maintenance._MATURING, DEFAULT_TENANT, now, 100)) == 100
    for table in ("episodes", "episode_bodies"):
        assert await read(acting, table) <= 200, table


async def test_a_background_is_measured_without_a_comparison_of_all_rows(
    owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    await filled(owner, _EPISODES, 500)
    rows = await acting.fetch(embedding_worker._SAMPLE, DEFAULT_TENANT, "one")
    assert len(rows) > 90
    assert await read(acting, "episode_vectors") <= 200
    assert await read(acting, "episodes") <= 200
    assert await read(acting, "episode_search") <= 17 * 500


async def test_a_page_of_vectors_is_read_and_stored_by_key(
    owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    (other,) = await tenants(owner, 1)
    await filled(owner, _EPISODES, 500, other)
    await owner.execute("ANALYZE")
    ids = (await filled(owner, _EPISODES, 500))[:40]
    assert len(await acting.fetch(embedding_worker._READ, DEFAULT_TENANT, ids)) == 40
    vectors = ["[1,2]"] * 40, [b""] * 40, [b""] * 40
    await acting.execute(embedding_worker._INSERT, DEFAULT_TENANT, "two", ids, *vectors)
    assert await read(acting, "episodes") <= 200
    assert await read(acting, "episode_search") <= 200


@pytest.mark.deep
async def test_the_size_of_a_large_memory_is_estimated_from_a_sample(
    owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    (other,) = await tenants(owner, 1)
    for tenant in (other, DEFAULT_TENANT):
        await filled(owner, _EPISODES, 20_000, tenant)
    await owner.execute(
        "UPDATE episode_state SET label = 'PARTIAL', label_source = 'check'"
        " WHERE hashtext(episode_id::text) % 4 = 0"
    )
    query = "SELECT episodes FROM memory_gauges()"
    counted = from_json(await acting.fetchval(query))
    assert await read(acting, "episode_state") <= 20_000
    assert await read(acting, "episodes") <= 20_000
    found = counted["mature"]
    assert found["SUCCESS"] + found["PARTIAL"] == pytest.approx(40_000, rel=0.3)
    assert found["PARTIAL"] / found["SUCCESS"] == pytest.approx(1 / 3, rel=0.1)
    assert from_json(await acting.fetchval(query)) == counted, "the same pages each time"


async def test_applications_are_recorded_by_key(
    owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    patterns = [
        row["id"]
        for row in await owner.fetch(
            "INSERT INTO patterns (tenant_id, name, category, document) "
            "SELECT $1, 'x', 'domain', '{}' FROM generate_series(1, 500) RETURNING id",
            DEFAULT_TENANT,
        )
    ]
    episodes = await filled(owner, _EPISODES, 500)
    about = {"version": 1, "arm": "used", "at": "2026-01-01T00:00:00Z", "baseline_name": "x"}
    about |= {"baseline_rate": 0.5, "baseline_n": 1, "good": True, "features": {}}
    given = [
        about | {"pattern_id": pattern, "episode_id": episode}
        for pattern, episode in zip(patterns[:20], episodes[:20], strict=True)
    ]
    query = pattern_store._RECORD
    rows = await acting.fetch(query, DEFAULT_TENANT, to_json(given).decode(), ["used"])
    assert len(rows) == 20
    for table in ("patterns", "episodes", "episode_state"):
        assert await read(acting, table) <= 200, table


async def test_a_page_of_expired_runs_reads_no_other_conversation(
    owner: asyncpg.Pool, acting: asyncpg.Connection
) -> None:
    await owner.execute(
        "INSERT INTO sessions (tenant_id, id) SELECT $1, i::text FROM generate_series(1, 1250) i",
        DEFAULT_TENANT,
    )
    await owner.execute(
        "INSERT INTO conversations (tenant_id, session_id, mode, graph, agent) "
        "SELECT tenant_id, id, 'orchestrated', '', 'a' FROM sessions"
    )
    await filled(owner, _RUNS, 1250)
    await owner.execute(
        "UPDATE runs r SET conversation_id = c.id, session_id = c.session_id FROM ("
        "SELECT id, session_id, row_number() OVER () AS n FROM conversations) AS c, ("
        "SELECT id, row_number() OVER () AS n FROM runs) AS o WHERE c.n = o.n AND r.id = o.id"
    )
    page = await acting.fetchrow(
        "SELECT * FROM lock_expired_runs(now(), '-infinity', $1, 100)", UUID(int=0)
    )
    assert len(page["ids"]) == 100
    assert await read(acting, "conversations") <= 3_000


@pytest.mark.parametrize(
    "query",
    [
        "SELECT status FROM runs WHERE tenant_id = $1 AND id = $2",
        "SELECT unfinished_in($1, $2)",
        "SELECT * FROM ended_children(ARRAY[$1::uuid], ARRAY[$2::uuid])",
        # As end_run finds the child runs of a run.
        "SELECT id FROM runs WHERE tenant_id = $1 AND parent_run_id = $2 AND ended_at IS NULL",
        "SELECT request_cancel($1, ARRAY[$2::uuid])",
    ],
)
async def test_plans_made_while_tables_were_empty_read_no_table_that_has_grown(
    owner: asyncpg.Pool, acting: asyncpg.Connection, query: str
) -> None:
    await owner.execute("ANALYZE")
    for _ in range(10):  # from the sixth time on it keeps the plan
        await acting.fetch(query, DEFAULT_TENANT, uuid4())
    runs = await filled(owner, _RUNS, _MANY)
    await acting.fetch(query, DEFAULT_TENANT, runs[0])
    assert await read(acting, "runs") <= 10
