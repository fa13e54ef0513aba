"""Plans that a session made while its tables were empty must not read whole tables later.

A session keeps such a plan until the statistics of a table change, which may take a minute.
"""

from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import from_json, to_json

from benchmarks.engine_statements import STORED, statements
from bottega.db.connect import connect
from bottega.db.tables import DEFAULT_TENANT
from bottega.runs import evals

_RUNS = 500
_READ = """
SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0)::bigint FROM pg_stat_xact_user_tables
"""
_ABOUT = '{"age_s": 1, "version": "1", "pool": {}, "tenants": {}}'
_REPORT = f"SELECT * FROM report($1, 9, 9, $2, $3, $4, '{_ABOUT}')"
_BATCH = """
WITH batch AS (
    UPDATE runs SET mode = 'batch', child_limit = 1 WHERE id = $1 RETURNING tenant_id
), open AS (
    UPDATE runs SET parent_run_id = $1 WHERE id = $2
), ended AS (
    UPDATE runs SET parent_run_id = $1, status = 'completed', ended_at = now() WHERE id = ANY ($3)
), children AS (
    INSERT INTO run_children (tenant_id, run_id, number, child_id, request, is_held, status)
    SELECT r.tenant_id, $1, row_number() OVER (ORDER BY r.id), r.id, '{}', false,
           CASE WHEN r.id <> $2 AND r.id <> ALL ($3) THEN 'completed' END
    FROM runs r JOIN batch USING (tenant_id) WHERE r.id <> $1
    ON CONFLICT DO NOTHING
)
INSERT INTO run_inbox (tenant_id, run_id, kind, subject)
SELECT b.tenant_id, $1, 'child', s FROM batch b, unnest($3::uuid[]) AS s
"""


@pytest.fixture
async def session(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session of the service."""
    session = await connect(database_url)
    yield session
    await session.close()


async def stored_runs(owner: asyncpg.Pool) -> list[UUID]:
    """Store many runs of a tenant; return their ids."""
    for statement in STORED:
        await owner.execute(statement, *([_RUNS] if "$1" in statement else []))
    query = "SELECT id FROM runs WHERE tenant_id = $1 ORDER BY id"
    return [row["id"] for row in await owner.fetch(query, DEFAULT_TENANT)]


async def rows_read(session: asyncpg.Connection, query: str, *arguments: object) -> int:
    """Return the number of rows that a statement reads."""
    tenant = str(DEFAULT_TENANT)
    async with session.transaction():
        await session.execute("SELECT set_config('bottega.tenant', $1, true)", tenant)
        before: int = await session.fetchval(_READ)
        await session.fetch(query, *arguments)
        after: int = await session.fetchval(_READ)
    return after - before


@pytest.mark.parametrize("name", list(statements([DEFAULT_TENANT], [DEFAULT_TENANT])))
async def test_statements_read_only_the_rows_of_their_runs(
    session: asyncpg.Connection, owner: asyncpg.Pool, name: str
) -> None:
    query, *arguments = statements([DEFAULT_TENANT], [uuid4()])[name]
    for _ in range(6):
        await session.fetch(query, *arguments)
    runs = await stored_runs(owner)
    query, *arguments = statements([DEFAULT_TENANT] * 2, runs[:2])[name]
    assert await rows_read(session, query, *arguments) < _RUNS / 2


async def test_a_report_reads_only_the_rows_of_its_runs(
    session: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    for _ in range(6):
        await session.fetch(_REPORT, uuid4(), [DEFAULT_TENANT], [uuid4()], [1])
    runs = await stored_runs(owner)
    read = await rows_read(session, _REPORT, uuid4(), [DEFAULT_TENANT] * 2, runs[:2], [1, 1])
    assert read < _RUNS / 2


async def test_a_batch_reads_only_the_items_that_ended(
    session: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    arrive = "SELECT arrive($1, $2)"
    batch, open_item, *items = await stored_runs(owner)
    for _ in range(6):
        await session.fetch(arrive, DEFAULT_TENANT, batch)
    await owner.execute("DELETE FROM run_steps WHERE run_id = $1", batch)
    await owner.execute(_BATCH, batch, open_item, items[:2])
    assert await rows_read(session, arrive, DEFAULT_TENANT, batch) < _RUNS / 2


async def test_the_report_of_an_eval_reads_each_run_once(
    session: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    query = str(evals.RUNS).replace(":tenant", "$1").replace(":batch", "$2")
    for _ in range(6):
        await rows_read(session, query, DEFAULT_TENANT, uuid4())
    batch, open_item, *_ = await stored_runs(owner)
    await owner.execute(_BATCH, batch, open_item, [])
    await owner.execute("INSERT INTO run_checks (tenant_id, run_id) SELECT tenant_id, id FROM runs")
    assert await rows_read(session, query, DEFAULT_TENANT, batch) < 4 * _RUNS


async def test_a_claim_reads_only_the_rows_of_its_runs(
    session: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    claim = "SELECT c.*, claimed_run(c.tenant, c.run) FROM claim($1, 2, 20, '{}', '{}') AS c"
    await session.fetch(_REPORT, worker := uuid4(), [], [], [])
    runs = await stored_runs(owner)
    await owner.execute("UPDATE runs SET status = 'queued', attempt = 0 WHERE id = ANY ($1)", runs)
    await owner.execute("DELETE FROM run_heads")
    enqueue = "SELECT enqueue_run($1, r) FROM unnest($2::uuid[]) AS r"
    await owner.execute(enqueue, DEFAULT_TENANT, runs[:12])
    for _ in range(6):
        assert len(await session.fetch(claim, worker)) == 2
    await owner.execute(enqueue, DEFAULT_TENANT, runs[12:])
    assert await rows_read(session, claim, worker) < _RUNS / 2


@pytest.mark.parametrize("queued", [10, _RUNS])
async def test_the_acceptance_of_a_run_reads_neither_runs_nor_the_queue(
    session: asyncpg.Connection, owner: asyncpg.Pool, queued: int
) -> None:
    submit = "SELECT submit_run($1, $2, (SELECT epoch FROM definition_epochs), NULL, NULL)"
    new = {"mode": "orchestrated", "input": "x", "metadata": {}, "pinned": {}, "priority": 5}
    new |= {"timeout_s": 60, "queue_timeout_s": 60}
    tenant = str(DEFAULT_TENANT)
    await session.execute("SELECT set_config('bottega.tenant', $1, false)", tenant)
    sent = to_json(new).decode()
    for _ in range(6):
        assert "id" in from_json(await session.fetchval(submit, DEFAULT_TENANT, sent))
    await stored_runs(owner)
    for _ in range(queued):
        await session.fetch(submit, DEFAULT_TENANT, sent)
    assert await rows_read(session, submit, DEFAULT_TENANT, sent) < _RUNS / 2
