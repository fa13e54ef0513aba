"""Maintenance jobs of the memory: ordered once, leased by one worker, resumed after a stop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from operator import not_
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.db import migrate
from bottega.db.connect import connect
from bottega.db.migrate import maintain_indexes
from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.errors import NotFoundError, UnavailableError
from bottega.memory.learning import maintenance as jobs
from bottega.memory.learning.maintenance import Job, Maintenance, Nights, Stages
from tests.claims import leased
from tests.memories import day, make_episode, store_episodes
from tests.waiting import until

NAMES = ("episodes", "mining", "validation", "refinement", "indices", "report")
NIGHT = timedelta(days=1)


def nights(at: datetime) -> Nights:
    """Return a nightly schedule at that hour."""

    def around(now: datetime) -> tuple[datetime, datetime]:
        previous = at + NIGHT * ((now - at) // NIGHT)
        return previous, previous + NIGHT

    return around


class Done:
    """Stages that record their execution."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.before: dict[str, Callable[[Job], Awaitable[None]]] = {}

    def stages(self) -> Stages:
        return {name: self._work(name) for name in NAMES}

    def _work(self, name: str) -> Callable[[Job], Awaitable[Mapping[str, Any]]]:
        async def work(job: Job) -> Mapping[str, Any]:
            if name in self.before:
                await self.before[name](job)
            self.done.append(name)
            return {"seen": len(self.done)}

        return work


@pytest.fixture
def done() -> Done:
    return Done()


@pytest.fixture
def maintenance(database: Database, done: Done) -> Maintenance:
    return Maintenance(database.pool, done.stages(), first_pause_s=0.0)


async def order(database: Database, tenant_id: UUID) -> UUID:
    async with acting_as(database.pool, tenant_id) as connection:
        return (await jobs.order(connection, tenant_id))[0]


async def job(database: Database, job_id: UUID) -> Job:
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        return await jobs.get(connection, DEFAULT_TENANT, job_id)


async def test_a_job_does_all_stages_in_order_and_keeps_its_report(
    database: Database, maintenance: Maintenance, done: Done
) -> None:
    ordered = await order(database, DEFAULT_TENANT)
    waiting = await job(database, ordered)
    assert (waiting.status, waiting.cause, waiting.stage) == ("pending", "demand", 0)

    assert await maintenance.leased().do_due() == 0.0
    assert await maintenance.leased().do_due() == float("inf")

    assert done.done == list(NAMES)
    ended = await job(database, ordered)
    assert (ended.status, ended.stage, ended.error) == ("done", 6, None)
    assert set(ended.progress) == set(NAMES)
    assert (ended.report or {})["seen"] == 6
    assert all(ended.progress[name]["ms"] >= 0 for name in NAMES)
    assert None not in (ended.started_at, ended.ended_at)


async def test_a_second_order_returns_the_unfinished_job(
    database: Database, maintenance: Maintenance
) -> None:
    several = await asyncio.gather(*(order(database, DEFAULT_TENANT) for _ in range(5)))
    assert len(set(several)) == 1
    await maintenance.leased().do_due()
    assert await order(database, DEFAULT_TENANT) not in several


async def test_a_running_job_shows_its_progress(
    database: Database, maintenance: Maintenance, done: Done
) -> None:
    ordered = await order(database, DEFAULT_TENANT)
    seen: list[Job] = []

    async def look(_: Job) -> None:
        seen.append(await job(database, ordered))

    done.before["refinement"] = look
    await maintenance.leased().do_due()
    assert [(each.status, each.stage) for each in seen] == [("running", 3)]
    assert set(seen[0].progress) == {"episodes", "mining", "validation"}
    assert await order(database, DEFAULT_TENANT) != ordered


@pytest.mark.parametrize("name", NAMES)
async def test_a_job_resumes_at_the_failed_stage(
    database: Database, maintenance: Maintenance, done: Done, name: str
) -> None:
    ordered = await order(database, DEFAULT_TENANT)

    async def fail(_: Job) -> None:
        raise UnavailableError("the store is down")

    done.before[name] = fail
    assert await maintenance.leased().do_due() == 0.0
    failed = await job(database, ordered)
    number = NAMES.index(name)
    assert (failed.status, failed.stage, failed.error) == ("running", number, "the store is down")
    assert await order(database, DEFAULT_TENANT) == ordered

    del done.before[name]
    await maintenance.leased().do_due()
    assert done.done == list(NAMES)
    ended = await job(database, ordered)
    assert (ended.status, ended.tries, ended.error) == ("done", 2, None)


async def test_a_job_that_always_fails_ends_with_the_reason(
    database: Database, maintenance: Maintenance, done: Done
) -> None:
    ordered = await order(database, DEFAULT_TENANT)

    async def fail(_: Job) -> None:
        raise KeyError("a bug")

    done.before["mining"] = fail
    for _ in range(8):
        assert await maintenance.leased().do_due() == 0.0
    ended = await job(database, ordered)
    assert (ended.status, ended.stage, ended.report) == ("failed", 1, None)
    assert ended.error == "an internal error; see the worker's log"
    assert await maintenance.leased().do_due() == float("inf")
    assert await order(database, DEFAULT_TENANT) != ordered


async def test_each_stage_begins_a_new_lease(
    database: Database, owner: asyncpg.Pool, maintenance: Maintenance, done: Done
) -> None:
    await order(database, DEFAULT_TENANT)
    ends: list[datetime] = []

    async def look(_: Job) -> None:
        ends.append(await owner.fetchval("SELECT next_at FROM memory_jobs"))

    done.before |= {"mining": look, "report": look}
    await maintenance.leased().do_due()
    assert ends[0] < ends[1]


async def test_a_job_whose_workers_all_die_fails(
    database: Database, owner: asyncpg.Pool, maintenance: Maintenance
) -> None:
    ordered = await order(database, DEFAULT_TENANT)
    await owner.execute("UPDATE memory_jobs SET status = 'running', tries = 8, next_at = now()")
    await maintenance.leased().do_due()
    ended = await job(database, ordered)
    assert (ended.status, ended.error) == ("failed", "each worker that claimed the job died")


async def test_worker_whose_job_another_one_claimed_writes_nothing(
    database: Database, owner: asyncpg.Pool, maintenance: Maintenance, done: Done
) -> None:
    """Show that the claim is the fence, though the job is open."""
    ordered = await order(database, DEFAULT_TENANT)

    async def stall(_: Job) -> None:
        await owner.execute("UPDATE memory_jobs SET next_at = now()")
        assert len(await leased(owner, "maintain")) == 1

    done.before["mining"] = stall
    await maintenance.leased().do_due()
    assert done.done == ["episodes", "mining"]
    held = await job(database, ordered)
    assert (held.status, held.tries, held.stage) == ("running", 2, 1)
    assert "mining" not in held.progress


# --- Nights -------------------------------------------------------------------------------------


async def tenants(owner: asyncpg.Pool, *names: str) -> list[UUID]:
    made = [
        await owner.fetchval("INSERT INTO tenants (name) VALUES ($1) RETURNING id", name)
        for name in names
    ]
    await owner.execute("UPDATE tenants SET created_at = $1", day(0))
    return made


async def test_each_tick_orders_one_job_per_tenant_with_episodes(
    database: Database, owner: asyncpg.Pool, done: Done
) -> None:
    full, late, _ = await tenants(owner, "full", "late", "empty")
    await store_episodes(database.pool, make_episode("export", day(1)), tenant=full)
    await store_episodes(database.pool, make_episode("export", day(3.5)), tenant=late)
    now = day(3.25)
    several = [
        Maintenance(database.pool, done.stages(), nights=nights(day(0)), now=lambda: now)
        for _ in range(3)
    ]
    assert 0.0 in await asyncio.gather(*(each.begin_nights() for each in several))
    assert await several[0].begin_nights() == timedelta(days=0.75).total_seconds()
    rows = await owner.fetch("SELECT tenant_id, cause, tick FROM memory_jobs")
    assert [tuple(row) for row in rows] == [(full, "nightly", day(3))]

    await until(lambda: several[0].leased().do_due(), lambda seen: seen != 0.0)
    now = day(6.5)  # no worker ran for two nights
    await several[1].begin_nights()
    rows = await owner.fetch("SELECT tenant_id, tick FROM memory_jobs WHERE status = 'pending'")
    assert {tuple(row) for row in rows} == {(full, day(6)), (late, day(6))}


async def test_a_nightly_job_waits_for_an_ordered_one(
    database: Database, owner: asyncpg.Pool, done: Done
) -> None:
    (tenant,) = await tenants(owner, "full")
    await store_episodes(database.pool, make_episode("export", day(1)), tenant=tenant)
    maintenance = Maintenance(
        database.pool, done.stages(), nights=nights(day(0)), now=lambda: day(3.5)
    )
    await order(database, tenant)
    assert await maintenance.begin_nights() > 60
    await maintenance.leased().do_due()
    assert await maintenance.begin_nights() == 0.0
    ticks = await owner.fetch("SELECT tick FROM memory_jobs ORDER BY id")
    assert [row["tick"] for row in ticks] == [None, day(3)]


async def test_without_a_schedule_no_job_starts(
    database: Database, maintenance: Maintenance
) -> None:
    assert await maintenance.begin_nights() == float("inf")


# --- Reading them -------------------------------------------------------------------------------


async def test_jobs_are_listed_and_the_oldest_are_deleted(
    database: Database, owner: asyncpg.Pool, maintenance: Maintenance
) -> None:
    await owner.execute(
        "INSERT INTO memory_jobs (tenant_id, cause, status, ended_at)"
        " SELECT $1, 'demand', 'done', now() FROM generate_series(1, 410)",
        DEFAULT_TENANT,
    )
    ordered = await order(database, DEFAULT_TENANT)
    await maintenance.leased().do_due()
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        newest = await jobs.page(connection, DEFAULT_TENANT, after=None, descending=True, limit=500)
        assert len(newest) == 400
        assert newest[0].id == ordered
        oldest = await jobs.page(
            connection, DEFAULT_TENANT, after=newest[-1].id, descending=False, limit=2
        )
        assert [each.id for each in oldest] == [newest[-2].id, newest[-3].id]
        with pytest.raises(NotFoundError):
            await jobs.get(connection, DEFAULT_TENANT, uuid4())


# --- Indexes ------------------------------------------------------------------------------------


Care = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture
def as_maintenance(database: Database, database_url: str) -> Callable[[], Awaitable[Any]]:
    return partial(connect, database_url, role=migrate.ROLE, longest_s=None)


@pytest.fixture
def care(as_maintenance: Callable[[], Awaitable[Any]]) -> Care:
    return partial(maintain_indexes, as_maintenance, least_changes=50)


async def test_tables_are_analysed_nightly_and_bloated_indexes_rebuilt(
    database: Database, owner: asyncpg.Pool, care: Care
) -> None:
    await store_episodes(database.pool, *(make_episode(f"export {n}", day(1)) for n in range(20)))
    await owner.execute("SELECT pg_stat_reset()")
    first = await care()
    assert first["analysed"] >= 15
    assert (first["rebuilt"], first["broken"]) == ([], 0)
    assert await care() == {"analysed": 0, "rebuilt": [], "broken": 0}

    async with owner.acquire() as connection:
        for _ in range(4):
            await connection.execute("UPDATE episode_state SET at = at + interval '1 second'")
        await connection.execute("SELECT pg_stat_force_next_flush()")
    await owner.execute("UPDATE index_maintenance SET at = now() - interval '1 day'")
    before = await filenodes(owner)
    again = await care()
    assert "pk_episode_state" in again["rebuilt"]
    assert all("episode_state" in name for name in again["rebuilt"])
    after = await filenodes(owner)
    assert {name for name in before if before[name] != after[name]} == set(again["rebuilt"])

    await owner.execute("UPDATE index_maintenance SET at = now() - interval '1 day'")
    assert (await care())["rebuilt"] == []


async def filenodes(owner: asyncpg.Pool) -> dict[str, int]:
    rows = await owner.fetch(
        "SELECT relname, relfilenode FROM pg_class"
        " WHERE relkind = 'i' AND relnamespace = 'public'::regnamespace"
    )
    return {row["relname"]: row["relfilenode"] for row in rows}


async def test_one_process_rebuilds_and_leftovers_of_a_killed_one_are_dropped(
    owner: asyncpg.Pool, care: Care, as_maintenance: Callable[[], Awaitable[Any]]
) -> None:
    holder = await as_maintenance()
    await holder.execute("SELECT pg_advisory_lock(4871019230)")
    assert await care() == {"skipped": "another process maintains the indexes now"}
    await holder.close()
    await until(
        lambda: owner.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), not_
    )
    await owner.execute("CREATE INDEX ix_patterns_state_ccnew ON patterns (tenant_id)")
    await owner.execute(
        "UPDATE pg_index SET indisvalid = false"
        " WHERE indexrelid = 'ix_patterns_state_ccnew'::regclass"
    )
    assert (await care())["broken"] == 1
    assert "ix_patterns_state_ccnew" not in await filenodes(owner)


async def test_a_locked_table_waits_for_another_night(owner: asyncpg.Pool, care: Care) -> None:
    impatient = partial(care, patience_s=0.01)
    async with owner.acquire() as connection, connection.transaction():
        await connection.execute("LOCK TABLE episode_tags IN SHARE UPDATE EXCLUSIVE MODE")
        first = await impatient()
    assert first["analysed"] >= 10
    assert (await impatient())["analysed"] == 1, "that one, now that nobody is"


async def test_a_long_transaction_delays_a_rebuild_until_another_night(
    owner: asyncpg.Pool, care: Care
) -> None:
    impatient = partial(care, least_changes=0, patience_s=0.01)
    await owner.execute("SELECT pg_stat_reset()")
    await impatient()
    await owner.execute("INSERT INTO tenants (id, name) VALUES (uuidv7(), 'other')")
    await owner.execute("INSERT INTO tenant_memory (tenant_id) SELECT id FROM tenants")
    async with owner.acquire() as connection:
        await connection.execute("UPDATE tenant_memory SET embedder = 'one'")
        await connection.execute("DELETE FROM tenant_memory")
        await connection.execute("SELECT pg_stat_force_next_flush()")
    await owner.execute("UPDATE index_maintenance SET at = now() - interval '1 day'")
    async with owner.acquire() as connection, connection.transaction():
        await connection.execute("LOCK TABLE tenant_memory IN ROW EXCLUSIVE MODE")
        first = await impatient()
        assert first["analysed"] >= 15
        assert first["rebuilt"] == []
        # As for the next tenant in the same night.
        assert await impatient() == {"analysed": 0, "rebuilt": [], "broken": 0}
    await owner.execute("UPDATE index_maintenance SET at = now() - interval '1 day'")
    assert (await care())["broken"] == 1
    broken = "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid"
    assert await owner.fetch(broken) == []


async def test_the_index_role_reads_no_rows_and_is_optional(
    database_url: str, as_maintenance: Callable[[], Awaitable[Any]]
) -> None:
    connection = await as_maintenance()
    await connection.execute(f"SET bottega.tenant = '{DEFAULT_TENANT}'")
    for table in ("episodes", "patterns", "runs", "tenants"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetch(f"SELECT * FROM {table}")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("REINDEX TABLE CONCURRENTLY runs")
    await connection.close()

    async def refused() -> asyncpg.Connection:
        return await connect(database_url, role="nobody_made_it")

    assert "bottega migrate" in (await maintain_indexes(refused))["skipped"]
