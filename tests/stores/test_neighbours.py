"""Work of a worker for many tenants at once, where none may delay the others."""

from collections import Counter
from uuid import UUID, uuid4

import asyncpg
from pydantic_core import to_json

from bottega.db.pool import Database, acting_as
from bottega.engine.claim import ClaimedRun
from tests.claims import claim, end_leases, leased, report, store_head
from tests.stores.test_queue import NEW, accept, take, tenants


async def impatient(database: Database) -> asyncpg.Connection:
    """Open a connection that fails instead of waiting for a lock."""
    connection = await database.connect()
    await connection.execute("SET lock_timeout = '1s'")
    return connection


async def claimed(database: Database, tenant: UUID, worker: UUID | None = None) -> ClaimedRun:
    """Return a new run of a tenant, claimed by a worker."""
    async with acting_as(database.pool, tenant) as connection:
        run_id = await accept(connection, tenant)
    run = await claim(database.pool, run_id, tenant, worker=worker)
    assert run is not None
    return run


async def test_a_lease_is_renewed_though_a_run_is_being_deleted(
    database: Database, owner: asyncpg.Pool
) -> None:
    names, worker = await tenants(owner, 2), uuid4()
    runs = [(await claimed(database, tenant, worker)).run_id for tenant in names]
    await end_leases(owner)
    renewing = await impatient(database)
    async with acting_as(database.pool, names[0]) as deleting:
        await deleting.execute("SELECT FROM runs WHERE id = $1 FOR UPDATE", runs[0])
        await deleting.execute("SELECT FROM run_heads WHERE run_id = $1 FOR UPDATE", runs[0])
        own = await report(renewing, worker, list(zip(names, runs, (1, 1), strict=True)))
    assert own == set(runs)  # this worker still has both
    assert await owner.fetchval("SELECT leased_until > now() FROM workers")
    assert await report(renewing, worker, list(zip(names, runs, (1, 2), strict=True))) == {runs[0]}
    await renewing.close()


async def test_runs_are_claimed_though_one_of_them_is_being_deleted(
    database: Database, owner: asyncpg.Pool
) -> None:
    runs = []
    for tenant in (names := await tenants(owner, 2)):
        async with acting_as(database.pool, tenant) as connection:
            runs.append(await accept(connection, tenant))
    taking = await impatient(database)
    async with acting_as(database.pool, names[0]) as deleting:
        await deleting.execute("SELECT FROM runs WHERE id = $1 FOR UPDATE", runs[0])
        assert await take(taking, 10) == runs[1:]
    assert await take(taking, 10) == runs[:1]
    await taking.close()


async def test_live_text_is_cleared_though_another_tenant_s_is_being_deleted(
    database: Database, owner: asyncpg.Pool
) -> None:
    one, other = await tenants(owner, 2)
    calls = [one, other], [uuid4(), uuid4()], [None, None]
    said = *calls, [None, None], ["a", "a"], [1, 1], [1, 1], [0, 0], ["x", "x"], [None, None]
    for tenant, run_id in zip(*calls[:2], strict=True):
        await store_head(owner, run_id, tenant)
    write = "SELECT write_live_text($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
    await database.pool.execute(write, *said)
    clearing = await impatient(database)
    async with acting_as(database.pool, one) as deleting:
        await deleting.execute("SELECT FROM live_text FOR UPDATE")
        gone = *calls, [1, 1], [1, 1], [None, None]
        await clearing.execute("SELECT clear_live_text($1, $2, $3, $4, $5, $6)", *gone)
    assert [row[0] for row in await owner.fetch("SELECT tenant_id FROM live_text")] == [one]
    await clearing.close()


async def test_background_work_gives_each_tenant_its_turn(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Claim webhooks of four tenants with many, and of one with a single webhook."""
    names = [UUID(int=number) for number in range(1, 6)]
    new = to_json({**NEW, "priority": 5, "webhook_url": "http://example.com/"}).decode()
    for name, count in zip(names, (50, 50, 50, 50, 1), strict=True):
        await owner.execute("INSERT INTO tenants (id, name) VALUES ($1, gen_random_uuid())", name)
        async with acting_as(database.pool, name) as connection:
            for _ in range(count):
                accepted = "SELECT accept_run($1, $2, '{}', '[]') ->> 'id'"
                run_id = await connection.fetchval(accepted, name, new)
                ended = "SELECT end_unclaimed($1, $2, 'cancelled', NULL)"
                await connection.execute(ended, name, run_id)
    many, one = names[:-1], names[-1]
    assert Counter(await leased(database.pool, "webhook", most=5, each=4)) == Counter(names)
    rest = await leased(database.pool, "webhook", most=16, each=4, busy=names)
    assert Counter(rest) == Counter(many * 3)
    # Those whose places are taken, or that pause, leave them to the others.
    first, second, *others = many
    full, paused = [first] * 4, [second]
    rest = await leased(database.pool, "webhook", most=3, each=4, busy=full, out=paused)
    assert set(rest) == set(others)
    busy = [*[each for each in others for _ in range(3)], first, first]
    assert await leased(database.pool, "webhook", most=1, each=4, busy=busy) == [second]
    due = "SELECT next_due_s('webhook', $1)"
    assert await database.pool.fetchval(due, many) > 0  # the lease of the only one
    assert await database.pool.fetchval(due, [one]) <= 0
