"""Heartbeats of workers: presence, load and absence."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import from_json

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import Database
from bottega.execution.load.heartbeat import Snapshot, alive, any_alive, heartbeats
from tests.claims import sweep
from tests.stores.test_turns import tenants
from tests.waiting import until

SOON = 0.01
SILENT = "UPDATE {} SET seen_at = now() - interval '31 seconds'"


class Busy:
    """A worker's state, which a test changes.

    Attributes:
        asked: how often somebody looked at it.
    """

    def __init__(self, pool: Mapping[str, Any], *own: UUID) -> None:
        self.pool = pool
        self.tenants = {tenant: {"running": 1} for tenant in own}
        self.error: Exception | None = None
        self.asked = 0

    def __call__(self) -> Snapshot:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return Snapshot(self.pool, dict(self.tenants))


async def loads(owner: asyncpg.Pool) -> list[Any]:
    return [from_json(row["pool"]) for row in await owner.fetch("SELECT pool FROM workers")]


async def until_loads(owner: asyncpg.Pool, *pools: Mapping[str, Any]) -> None:
    await until(lambda: loads(owner), lambda seen: seen == list(pools))


async def test_a_worker_is_listed_while_it_works(database: Database, owner: asyncpg.Pool) -> None:
    assert not await any_alive(database.pool)
    busy = Busy({"runs": 1}, DEFAULT_TENANT)
    async with heartbeats(database.pool, busy, SOON):
        assert await loads(owner) == [{"runs": 1}]
        assert await any_alive(database.pool)
        (first,) = await owner.fetch("SELECT * FROM workers")
        busy.pool = {"runs": 2}
        await until_loads(owner, {"runs": 2})
        (then,) = await owner.fetch("SELECT * FROM workers")
        assert (then["id"], then["started_at"]) == (first["id"], first["started_at"])
        assert then["seen_at"] > first["seen_at"] > first["started_at"]
        async with database.begin(DEFAULT_TENANT) as tx:
            (row,) = await alive(tx, DEFAULT_TENANT)
        assert row["state"] == {"running": 1}
    assert await loads(owner) == []
    assert await owner.fetch("SELECT FROM worker_tenants") == []
    assert not await any_alive(database.pool)


async def test_a_worker_keeps_its_age_after_its_row_was_deleted(
    database: Database, owner: asyncpg.Pool
) -> None:
    worker = uuid4()
    for age in (100, 102):
        await owner.execute("DELETE FROM workers")
        await database.pool.execute(
            "SELECT worker_heartbeat($1, $2, '{}', '{}', '{}')", worker, age
        )
        found = await owner.fetchval("SELECT seen_at - started_at FROM workers")
        assert found.total_seconds() == age


async def test_only_tenants_with_work_have_a_share_of_a_worker(
    database: Database, owner: asyncpg.Pool
) -> None:
    one, other = await tenants(owner, 2)
    busy = Busy({"runs": 0}, one, other, uuid4())  # the last one was deleted meanwhile
    async with (
        heartbeats(database.pool, busy, SOON),
        heartbeats(database.pool, Busy({}, one), 600),
    ):
        of_tenants = "SELECT tenant_id FROM worker_tenants ORDER BY tenant_id"

        async def ids() -> list[UUID]:
            return [row["tenant_id"] for row in await owner.fetch(of_tenants)]

        assert await ids() == sorted([one, one, other])
        busy.tenants = {other: {"running": 1}}
        # The other worker's share is still there.
        await until(ids, lambda found: found == sorted([one, other]))
        await owner.execute("DELETE FROM tenants WHERE id = $1", other)
        await owner.execute("DELETE FROM worker_tenants")
        asked = busy.asked
        await until(lambda: busy.asked >= asked + 2)
        assert await ids() == []


async def test_heartbeats_continue_after_errors(database: Database, owner: asyncpg.Pool) -> None:
    busy = Busy({"runs": 1})
    async with heartbeats(database.pool, busy, SOON):
        await owner.execute("ALTER TABLE workers RENAME TO away")
        await owner.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        asked = busy.asked
        await until(lambda: busy.asked >= asked + 3)
        await owner.execute("ALTER TABLE away RENAME TO workers")
        await owner.execute("DELETE FROM workers")
        await until_loads(owner, {"runs": 1})
        busy.error = ValueError("a bug")
        asked = busy.asked
        await until(lambda: busy.asked >= asked + 3)
        busy.pool, busy.error = {"runs": 2}, None
        await until_loads(owner, {"runs": 2})
        assert await any_alive(database.pool)
    assert await loads(owner) == []


async def test_a_worker_starts_although_its_first_heartbeat_fails(
    database: Database, owner: asyncpg.Pool
) -> None:
    await owner.execute("ALTER TABLE workers RENAME TO away")
    async with heartbeats(database.pool, Busy({"runs": 1}), SOON):
        await owner.execute("ALTER TABLE away RENAME TO workers")
        await until_loads(owner, {"runs": 1})
        assert await any_alive(database.pool)
        await owner.execute("ALTER TABLE workers RENAME TO away")


async def test_a_worker_without_recent_heartbeats_is_removed(
    database: Database, owner: asyncpg.Pool
) -> None:
    beat = "SELECT worker_heartbeat($1, 0, '{}', $2, $3)"
    silent, lively = uuid4(), uuid4()
    await database.pool.execute(beat, silent, [DEFAULT_TENANT], ["{}"])
    for table in ("workers", "worker_tenants"):
        await owner.execute(SILENT.format(table))
    assert not await any_alive(database.pool)
    await database.pool.execute(beat, lively, [DEFAULT_TENANT], ["{}"])
    assert await any_alive(database.pool)
    async with database.begin(DEFAULT_TENANT) as tx:
        assert [row["id"] for row in await alive(tx, DEFAULT_TENANT)] == [lively]
    assert len(await owner.fetch("SELECT FROM workers")) == 2
    await sweep(database.pool)
    for table, column in (("workers", "id"), ("worker_tenants", "worker_id")):
        rows = await owner.fetch(f"SELECT {column} AS id FROM {table}")
        assert [row["id"] for row in rows] == [lively], table


async def test_the_application_sees_sums_and_cannot_change_them(database: Database) -> None:
    for change in ("UPDATE workers SET pool = '{}'", "DELETE FROM workers"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await database.pool.execute(change)
