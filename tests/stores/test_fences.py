"""The fence: a worker that lost a run changes nothing of it, and the sweep ends expired runs."""

from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import FencedError
from tests.claims import claim, end_leases, hand_back, report, sweep
from tests.steps import append
from tests.stores.test_neighbours import claimed

WARNING: dict[str, Any] = {
    "type": "warning",
    "task_id": None,
    "parent_task_id": None,
    "agent": None,
    "depth": None,
    "data": {},
}
QUEUED = "SELECT count(*) FROM run_queue"
ROW = """
SELECT r.status, r.attempt, h.worker_id
FROM runs r LEFT JOIN run_heads h ON h.run_id = r.id
"""


@pytest.fixture
async def lost(database: Database, owner: asyncpg.Pool) -> UUID:
    """Make a run whose lease ended under its first worker; a second worker claimed it."""
    run_id = (await claimed(database, DEFAULT_TENANT)).run_id
    await end_leases(owner)
    await sweep(database.pool)
    second = await claim(database.pool, run_id, lease_s=0)
    assert second is not None
    assert second.attempt == 2
    return run_id


async def test_step_of_an_older_attempt_is_refused_though_the_newer_stored_its_equal(
    database: Database, owner: asyncpg.Pool, lost: UUID
) -> None:
    """Both attempts write a warning after the same event, as a replay does."""
    run = (database.pool, DEFAULT_TENANT, lost)
    after = await owner.fetchval("SELECT last_seq FROM run_heads")
    await append(*run, attempt=2, after=after, events=[WARNING])
    await append(*run, attempt=2, after=after, events=[WARNING])
    for seq in (after, after + 1):
        with pytest.raises(FencedError):
            await append(*run, attempt=1, after=seq, events=[WARNING])
    assert await owner.fetchval("SELECT count(*) FROM run_events") == after + 1


async def test_worker_that_lost_a_run_does_not_hand_it_back(
    database: Database, owner: asyncpg.Pool, lost: UUID
) -> None:
    before = await owner.fetchrow(ROW)
    await hand_back(database.pool, DEFAULT_TENANT, lost, attempt=1)
    assert await owner.fetchrow(ROW) == before
    await hand_back(database.pool, DEFAULT_TENANT, lost, attempt=2)
    assert (await owner.fetchrow(ROW))["status"] == "queued"


async def test_worker_that_lost_a_run_does_not_extend_its_lease(
    database: Database, owner: asyncpg.Pool, lost: UUID
) -> None:
    first, second = uuid4(), await owner.fetchval("SELECT worker_id FROM run_heads")
    assert await report(database.pool, first, [(DEFAULT_TENANT, lost, 1)]) == set()
    assert await report(database.pool, second, [(DEFAULT_TENANT, lost, 2)]) == {lost}
    await sweep(database.pool)
    assert await owner.fetchval(QUEUED) == 0
    await end_leases(owner)  # the first one's report does not count for it
    await report(database.pool, first, [(DEFAULT_TENANT, lost, 1)])
    await sweep(database.pool)
    assert await owner.fetchval(QUEUED) == 1


@pytest.mark.parametrize("passed", ["deadline", "queue_timeout_s"])
async def test_run_that_began_and_waits_again_ends_by_its_deadline(
    database: Database, owner: asyncpg.Pool, passed: str
) -> None:
    run_id = (await claimed(database, DEFAULT_TENANT)).run_id
    await hand_back(database.pool, DEFAULT_TENANT, run_id, attempt=1)
    if passed == "deadline":
        await owner.execute("UPDATE run_queue SET expires_at = now() - interval '1 s'")
    else:
        await owner.execute("UPDATE runs SET created_at = now() - interval '1 hour'")
    await sweep(database.pool)
    row = await owner.fetchrow("SELECT status, error ->> 'code' AS code FROM runs")
    over = passed == "deadline"
    assert tuple(row) == (("timeout", "timeout") if over else ("queued", None))


async def test_head_exists_while_the_run_is_running(
    database: Database, owner: asyncpg.Pool, lost: UUID
) -> None:
    """Check that a claim goes on from the head after a crash, else from the run's row."""
    head = "SELECT attempt, last_seq FROM run_heads"
    last = "SELECT max(seq) FROM run_events"
    assert tuple(await owner.fetchrow(head)) == (2, await owner.fetchval(last))
    await append(database.pool, DEFAULT_TENANT, lost, attempt=2, after=3, events=[WARNING])
    await hand_back(database.pool, DEFAULT_TENANT, lost, attempt=2)
    assert await owner.fetchrow(head) is None
    assert await owner.fetchval("SELECT last_seq FROM runs") == 4
    with pytest.raises(FencedError):
        await append(database.pool, DEFAULT_TENANT, lost, attempt=2, after=4, events=[WARNING])
    assert await claim(database.pool, lost, lease_s=0) is not None
    assert tuple(await owner.fetchrow(head)) == (3, 5)
    await database.pool.execute("SELECT cancel_run($1, $2)", DEFAULT_TENANT, lost)
    assert await owner.fetchrow(head) is None
    assert await owner.fetchval("SELECT last_seq FROM runs") == await owner.fetchval(last)


async def test_a_run_that_cannot_be_ended_keeps_no_other_from_its_end(
    database: Database, owner: asyncpg.Pool
) -> None:
    runs = [(await claimed(database, DEFAULT_TENANT)).run_id for _ in range(3)]
    for run_id in runs:
        await hand_back(database.pool, DEFAULT_TENANT, run_id, attempt=1)
    await owner.execute("UPDATE run_queue SET expires_at = now() - interval '1 s'")
    await owner.execute(
        "CREATE FUNCTION break_end() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'broken'; END $$"
    )
    await owner.execute(
        "CREATE TRIGGER break_end BEFORE UPDATE OF ended_at ON runs FOR EACH ROW "
        f"WHEN (NEW.id = '{runs[1]}') EXECUTE FUNCTION break_end()"
    )
    await sweep(database.pool)
    rows = await owner.fetch("SELECT id, status FROM runs")
    ended = {row["id"]: row["status"] == "timeout" for row in rows}
    assert ended == {runs[0]: True, runs[1]: False, runs[2]: True}
