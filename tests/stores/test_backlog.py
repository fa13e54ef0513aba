"""A backlog of waiting runs: counted exactly, and without cost to the runs that come and go."""

import asyncio
import contextlib
import random
from uuid import UUID

import asyncpg
import pytest

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import Database, acting_as, open_database
from bottega.tenants.erase import erase_session
from tests.claims import claim, sweep
from tests.stores.test_turns import accept, end, take, tenants

PLACES = 100
LIMITS = {"concurrent_runs": PLACES, "queued_runs": 100_000}
READ = """
SELECT sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))
FROM pg_class c WHERE c.relkind IN ('r', 'i')
  AND c.relnamespace = 'public'::regnamespace
"""
WAITING = "SELECT count(*) FROM runs WHERE ended_at IS NULL AND slot IS NULL AND tenant_id = $1"
COUNTED = "SELECT coalesce(sum(runs), 0) FROM waiting_runs WHERE tenant_id = $1"


async def pile_up(owner: asyncpg.Pool, count: int) -> None:
    """Queue so many more runs of the default tenant."""
    for _ in range(count // 500):
        await owner.execute(
            "INSERT INTO runs (tenant_id, mode, input, pinned, timeout_s)"
            " SELECT $1, 'dag', '\"x\"', '{}', 60 FROM generate_series(1, 500)",
            DEFAULT_TENANT,
        )


async def rows_read(url: str) -> dict[str, int]:
    """Count rows and index entries read to accept, take and end one run in a new session."""
    found: dict[str, int] = {}
    async with open_database(url, limits=LIMITS) as database:
        connection = await database.connect()
        for _ in range(7):  # plans are cached from the sixth time on
            for name in ("accept", "end"):
                async with connection.transaction():
                    before = await connection.fetchval(READ)
                    if name == "accept":
                        await accept(connection, DEFAULT_TENANT)
                    else:
                        await connection.execute(
                            "SELECT set_config('bottega.tenant', $1, true)", str(DEFAULT_TENANT)
                        )
                        taken = await take(connection)
                        assert taken is not None
                        await end(connection, DEFAULT_TENANT, taken)
                    found[name] = await connection.fetchval(READ) - before
        await connection.close()
    return found


@pytest.mark.parametrize(
    "analysed",
    ["while it was empty", *(pytest.param(n, marks=pytest.mark.deep) for n in ("never", "now"))],
)
async def test_the_cost_of_a_run_does_not_grow_with_the_backlog(
    database_url: str, owner: asyncpg.Pool, analysed: str
) -> None:
    """Check that it grows with the slots at most, even with old statistics."""
    if analysed == "while it was empty":
        await owner.execute("VACUUM ANALYZE")
    async with open_database(database_url, limits=LIMITS) as database:
        for _ in range(PLACES + 10):
            async with acting_as(database.pool, DEFAULT_TENANT) as connection:
                await accept(connection, DEFAULT_TENANT)
    await pile_up(owner, 5000)
    if analysed == "now":
        await owner.execute("VACUUM ANALYZE")
    found = await rows_read(database_url)
    assert found["accept"] < 5 * PLACES, found
    assert found["end"] < 20 * PLACES, found


async def test_the_quota_counts_runs_that_wait_and_no_others(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async with open_database(database_url, limits={"concurrent_runs": 2, "queued_runs": 3}) as own:
        for _ in range(5):
            async with acting_as(own.pool, DEFAULT_TENANT) as connection:
                await accept(connection, DEFAULT_TENANT)
        with pytest.raises(KeyError):  # refused: no id
            async with acting_as(own.pool, DEFAULT_TENANT) as connection:
                await accept(connection, DEFAULT_TENANT)
        async with acting_as(own.pool, DEFAULT_TENANT) as connection:
            taken = await take(connection)
            assert taken is not None
            await end(connection, DEFAULT_TENANT, taken)
            await accept(connection, DEFAULT_TENANT)


class Moves:
    """Random changes of runs between statuses, each in a transaction of its own."""

    def __init__(self, database: Database, owner: asyncpg.Pool, ids: list[UUID], seed: int) -> None:
        self.database, self.owner, self.ids = database, owner, ids
        self.random = random.Random(seed)

    async def make(self) -> None:
        """Make one change; roll back one in four, as if its process had died."""
        choices = (self.accept, self.accept, self.accept, self.end, self.cancel, self.hand_back)
        tenant = self.random.choice(self.ids)
        move = self.random.choice((*choices, self.expire))
        with contextlib.suppress(ConnectionError):
            async with acting_as(self.database.pool, tenant) as connection:
                await move(connection, tenant)
                if not self.random.randrange(4):
                    raise ConnectionError

    async def accept(self, connection: asyncpg.Connection, tenant: UUID) -> None:
        for _ in range(self.random.randrange(1, 5)):
            session = self.random.choice([None, "s"])
            await accept(connection, tenant, self.random.choice([1, 5, 9]), session)

    async def end(self, connection: asyncpg.Connection, tenant: UUID) -> None:
        run_id = await self._some(connection, "slot IS NOT NULL")
        if run_id is not None:
            await end(connection, tenant, run_id)

    async def cancel(self, connection: asyncpg.Connection, tenant: UUID) -> None:
        run_id = await self._some(connection, "slot IS NULL")
        if run_id is not None:
            await connection.execute("SELECT cancel_run($1, $2)", tenant, run_id)

    async def hand_back(self, connection: asyncpg.Connection, tenant: UUID) -> None:
        run_id = await self._some(connection, "slot IS NOT NULL AND status = 'queued'")
        if run_id is not None:
            await claim(connection, run_id, tenant)
            await connection.execute("SELECT hand_back($1, $2, 1)", tenant, run_id)

    async def expire(self, connection: asyncpg.Connection, tenant: UUID) -> None:
        if (run_id := await self._some(connection, "true")) is not None:
            await connection.execute(
                "UPDATE runs SET queue_timeout_s = -1 WHERE tenant_id = $1 AND id = $2",
                *(tenant, run_id),
            )

    async def _some(self, connection: asyncpg.Connection, which: str) -> UUID | None:
        found: UUID | None = await connection.fetchval(
            f"SELECT id FROM runs WHERE ended_at IS NULL AND {which} ORDER BY random() LIMIT 1"
            " FOR UPDATE SKIP LOCKED"
        )
        return found

    async def agree(self) -> None:
        """Check the counters of all tenants against their runs."""
        for tenant in self.ids:
            async with self.owner.acquire() as connection, connection.transaction():
                counted = await connection.fetchval(COUNTED, tenant)
                assert counted == await connection.fetchval(WAITING, tenant)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2))])
async def test_the_counter_equals_the_count_after_random_changes(
    database_url: str, owner: asyncpg.Pool, seed: int
) -> None:
    ids = await tenants(owner, 2)
    limits = {"concurrent_runs": 3, "queued_runs": 1000}
    async with open_database(database_url, limits=limits) as database:
        moves = Moves(database, owner, ids, seed)
        for step in range(15):
            await asyncio.gather(*(moves.make() for _ in range(8)))
            if step % 4 == 3:
                await sweep(database.pool)
            await moves.agree()
        highest = await owner.fetchval("SELECT count(*) FROM waiting_runs")
        assert 0 < highest <= 8 * len(ids) + len(ids)  # at most the number of concurrent runs
        for tenant in ids:
            await erase_session(database, tenant, "s", "somebody")
        await moves.agree()
    async with open_database(database_url, limits={"concurrent_runs": 50}) as database:
        await sweep(database.pool)
        await moves.agree()


async def test_transactions_of_a_tenant_do_not_wait_for_each_other(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async with open_database(database_url, limits={"concurrent_runs": 1}) as database:
        connections = [await database.connect() for _ in range(8)]
        transactions = [connection.transaction() for connection in connections]
        async with asyncio.timeout(20):
            for connection, transaction in zip(connections, transactions, strict=True):
                await transaction.start()
                await accept(connection, DEFAULT_TENANT)
                await accept(connection, DEFAULT_TENANT)
        for transaction in transactions:
            await transaction.commit()
        for connection in connections:
            await connection.close()
    assert await owner.fetchval(COUNTED, DEFAULT_TENANT) == 15
