"""Slots and turns: the database decides which run of which tenant is next."""

import asyncio
from collections import defaultdict
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import acting_as, open_database
from tests.claims import sweep
from tests.examples import examples
from tests.waiting import until

NEW: dict[str, Any] = {
    "mode": "dag",
    "input": "x",
    "pinned": {},
    "timeout_s": 60,
    "queue_timeout_s": 60,
    "metadata": {},
}


async def accept(
    connection: asyncpg.Connection, tenant: UUID, priority: int = 5, session: str | None = None
) -> UUID:
    """Accept a run of a tenant; return its id."""
    await connection.execute("SELECT set_config('bottega.tenant', $1, true)", str(tenant))
    new = to_json({**NEW, "priority": priority, "session_id": session}).decode()
    answer = from_json(
        await connection.fetchval("SELECT accept_run($1, $2, '[]', '[]')", tenant, new)
    )
    return UUID(answer["id"])


async def take(connection: asyncpg.Connection) -> UUID | None:
    """Take the next run, as a worker of its own."""
    query = "SELECT run FROM take_runs($1, $2, 1, 60, false)"
    run_id: UUID | None = await connection.fetchval(query, uuid4(), uuid4())
    return run_id


async def end(connection: asyncpg.Connection, tenant: UUID, run_id: UUID) -> None:
    await connection.execute("SELECT set_config('bottega.tenant', $1, true)", str(tenant))
    await connection.execute("SELECT end_unclaimed($1, $2, 'cancelled', NULL)", tenant, run_id)


async def tenants(owner: asyncpg.Pool, count: int) -> list[UUID]:
    rows = await owner.fetch(
        "INSERT INTO tenants (name) SELECT 'tenant-' || n FROM generate_series(1, $1::integer) n"
        " RETURNING id",
        count,
    )
    return [row["id"] for row in rows]


async def limited(url: str, **limits: int) -> asyncpg.Connection:
    """Open a connection of the service with these limits."""
    async with open_database(url, limits=limits) as database:
        return await database.connect()


async def test_a_flood_delays_another_tenant_only_by_runs_taken_already(
    database_url: str, owner: asyncpg.Pool
) -> None:
    flooding, other, third = await tenants(owner, 3)
    connection = await limited(database_url, concurrent_runs=100)
    async with connection.transaction():
        flood = [
            await accept(connection, flooding) for _ in range(150)
        ]  # more than there are slots
        assert [await take(connection) for _ in range(3)] == flood[:3]
        first, second = [await accept(connection, other) for _ in range(2)]
        late = await accept(connection, third)
        # In turns: the run that was next already, then the other tenants' first ones.
        taken = [await take(connection) for _ in range(6)]
    assert taken == [flood[3], first, late, flood[4], second, flood[5]]
    await connection.close()


async def test_runs_that_come_at_the_same_moment_get_a_turn_each(
    database_url: str, owner: asyncpg.Pool
) -> None:
    flooding, other = await tenants(owner, 2)
    connections = [await limited(database_url, concurrent_runs=100) for _ in range(8)]
    transactions = [connection.transaction() for connection in connections]
    for connection, transaction in zip(connections, transactions, strict=True):
        await transaction.start()
        await accept(connection, flooding)  # neither transaction sees the other
    for transaction in transactions:
        await transaction.commit()
    connection = connections[0]
    async with connection.transaction():
        first = await accept(connection, other)
        taken = [await take(connection) for _ in range(9)]
    assert taken.index(first) == 1
    for connection in connections:
        await connection.close()


async def test_a_new_run_does_not_inherit_the_turn_of_a_returned_one(
    database_url: str, owner: asyncpg.Pool
) -> None:
    flooding, other, late = await tenants(owner, 3)
    connection = await limited(database_url, concurrent_runs=100)
    async with connection.transaction():
        flood = [await accept(connection, flooding) for _ in range(10)]
        assert [await take(connection) for _ in range(5)] == flood[:5]
        first = await accept(connection, other)
        await connection.execute("SELECT hand_back($1, $2, 1)", flooding, flood[0])
        for _ in range(5):
            await accept(connection, late)
        taken = [await take(connection) for _ in range(12)]
    assert taken[0] == flood[0]
    assert taken.index(first) <= 2
    await connection.close()


async def test_slots_are_filled_by_priority_then_by_age(
    database_url: str, owner: asyncpg.Pool
) -> None:
    connection = await limited(database_url, concurrent_runs=2)
    async with connection.transaction():
        runs = [await accept(connection, DEFAULT_TENANT, p) for p in (5, 5, 5, 9, 5, 9, 1)]
        order = []
        while run_id := await take(connection):
            order.append(runs.index(run_id))
            held = await connection.fetchval(
                "SELECT count(*) FROM runs WHERE slot IS NOT NULL AND ended_at IS NULL"
            )
            assert held <= 2
            await end(connection, DEFAULT_TENANT, run_id)
    assert order == [0, 3, 5, 1, 2, 4, 6]
    await connection.close()


async def test_priority_orders_runs_within_a_tenant_only(
    database_url: str, owner: asyncpg.Pool
) -> None:
    mine, theirs = await tenants(owner, 2)
    connection = await limited(database_url, concurrent_runs=10)
    async with connection.transaction():
        low = [await accept(connection, mine, 2) for _ in range(3)]
        other = [await accept(connection, theirs, 2) for _ in range(3)]
        high = [await accept(connection, mine, 8) for _ in range(2)]
        taken = [await take(connection) for _ in range(8)]
    assert [run for run in taken if run in other] == other
    assert [run for run in taken if run not in other] == [*high, *low]
    assert taken.index(other[0]) <= 1
    assert taken.index(other[2]) <= 5
    await connection.close()


@settings(
    max_examples=examples(16),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 3), st.integers(1, 4)),
            st.none(),
        ),
        max_size=60,
    ),
    places=st.integers(1, 5),
)
async def test_tenants_take_turns_in_any_sequence(
    database_url: str, owner: asyncpg.Pool, steps: list[tuple[int, int] | None], places: int
) -> None:
    """Check fairness and order after random steps.

    Between two takes of a tenant with more waiting, no other tenant is taken three times. A
    tenant's own runs are taken in order. A step is some runs of a tenant, or a take.
    """
    names = [UUID(int=n) for n in range(1, 5)]
    for number, name in enumerate(names):
        await owner.execute(
            "INSERT INTO tenants (id, name) VALUES ($1, $2) ON CONFLICT DO NOTHING",
            name,
            f"turn-{number}",
        )
    waiting: dict[UUID, list[UUID]] = defaultdict(list)
    overtaken: dict[UUID, list[UUID]] = defaultdict(list)
    connection = await limited(database_url, concurrent_runs=places)
    transaction = connection.transaction()
    await transaction.start()
    for step in [*steps, *[None] * 250]:
        if step is not None:
            tenant, count = names[step[0]], step[1]
            for _ in range(count):
                waiting[tenant].append(await accept(connection, tenant))
            continue
        run_id = await take(connection)
        if run_id is None:
            continue
        taken = next(name for name, runs in waiting.items() if run_id in runs)
        assert waiting[taken].pop(0) == run_id
        await end(connection, taken, run_id)
        overtaken[taken].clear()
        for name in names:
            if name != taken and waiting[name]:
                overtaken[name].append(taken)
                assert overtaken[name].count(taken) <= 2
    assert not any(waiting.values())
    await transaction.rollback()
    await connection.close()


async def test_slots_are_never_given_twice(database_url: str, owner: asyncpg.Pool) -> None:
    """Check it with runs accepted concurrently, and that no slot stays unused for long."""

    async def one(pool: asyncpg.Pool) -> None:
        async with acting_as(pool, DEFAULT_TENANT) as connection:
            await accept(connection, DEFAULT_TENANT)

    async with open_database(database_url, limits={"concurrent_runs": 5}) as database:
        await asyncio.gather(*(one(database.pool) for _ in range(40)))
        await sweep(database.pool)
        await sweep(database.pool)
    rows = await owner.fetch(
        "SELECT slot, (SELECT count(*) FROM run_queue WHERE run_id = r.id) AS n"
        " FROM runs r ORDER BY slot"
    )
    assert [tuple(row) for row in rows] == [(n, 1) for n in range(1, 6)] + [(None, 0)] * 35


async def test_a_changed_limit_takes_effect_as_runs_end(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async def held() -> int:
        query = "SELECT count(*) FROM runs WHERE slot IS NOT NULL AND ended_at IS NULL"
        count: int = await owner.fetchval(query)
        return count

    async with open_database(database_url, limits={"concurrent_runs": 2}) as database:
        for _ in range(9):
            async with acting_as(database.pool, DEFAULT_TENANT) as connection:
                await accept(connection, DEFAULT_TENANT)
        assert await held() == 2
    async with open_database(database_url, limits={"concurrent_runs": 5}) as database:
        await sweep(database.pool)
        assert await held() == 5
    async with open_database(database_url, limits={"concurrent_runs": 1}) as database:
        for expected in (4, 3, 2, 1, 1, 1, 1, 1, 0):
            async with acting_as(database.pool, DEFAULT_TENANT) as connection:
                run_id = await connection.fetchval(
                    "SELECT id FROM runs WHERE slot IS NOT NULL AND ended_at IS NULL"
                    " ORDER BY slot DESC LIMIT 1"
                )
                await end(connection, DEFAULT_TENANT, run_id)
            assert await held() == expected


async def test_a_much_higher_limit_is_filled_in_parts(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Check it because doing all at once would exceed a sweep's locks or time, and fail."""
    async with (
        open_database(database_url, limits={"concurrent_runs": 1}) as database,
        acting_as(database.pool, DEFAULT_TENANT) as connection,
    ):
        for _ in range(250):
            await accept(connection, DEFAULT_TENANT)
    held = []
    async with open_database(database_url, limits={"concurrent_runs": 10_000}) as database:
        for _ in range(3):
            await sweep(database.pool)
            held.append(await owner.fetchval("SELECT count(slot) FROM runs"))
    assert held == [101, 201, 250]


@pytest.mark.parametrize("lost", ["its row in the queue", "a slot that was not assigned"])
async def test_the_sweep_repairs_lost_turns(
    database_url: str, owner: asyncpg.Pool, lost: str
) -> None:
    async with open_database(database_url, limits={"concurrent_runs": 2}) as database:
        for _ in range(4):
            async with acting_as(database.pool, DEFAULT_TENANT) as connection:
                await accept(connection, DEFAULT_TENANT)
        if lost == "its row in the queue":
            await owner.execute("DELETE FROM run_queue")
        else:
            await owner.execute("DELETE FROM run_steps")
            await owner.execute("DELETE FROM runs WHERE slot = 1")
            await owner.execute("DELETE FROM run_queue")
        await sweep(database.pool)
    queued = await owner.fetch("SELECT run_id FROM run_queue")
    placed = await owner.fetch("SELECT id FROM runs WHERE slot IS NOT NULL")
    assert sorted(row[0] for row in queued) == sorted(row[0] for row in placed)
    assert len(queued) == 2


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("SELECT end_unclaimed($1, $2, 'cancelled', NULL)", id="end"),
        pytest.param(
            "SELECT $2::uuid FROM sessions WHERE tenant_id = $1 FOR UPDATE", id="deletion"
        ),
    ],
)
async def test_an_interrupt_waits_for_a_locked_run_without_a_deadlock(
    database_url: str, owner: asyncpg.Pool, then: str
) -> None:
    first, second = [await limited(database_url) for _ in range(2)]
    spoken = {**NEW, "priority": 5, "session_id": "s", "conversation": "continue"}

    async def submit(connection: asyncpg.Connection, if_busy: str) -> UUID:
        new = to_json({**spoken, "if_busy": if_busy}).decode()
        async with connection.transaction():
            await connection.execute(
                "SELECT set_config('bottega.tenant', $1, true)", str(DEFAULT_TENANT)
            )
            query = "SELECT accept_run($1, $2, '[]', '[]')"
            return UUID(from_json(await connection.fetchval(query, DEFAULT_TENANT, new))["id"])

    before = [await submit(first, "queue") for _ in range(3)]
    async with second.transaction():
        await second.execute("SELECT set_config('bottega.tenant', $1, true)", str(DEFAULT_TENANT))
        await second.execute("SELECT FROM runs WHERE id = $1 FOR UPDATE", before[0])
        submitting = asyncio.create_task(submit(first, "interrupt"))
        waits = """SELECT count(*) FROM pg_stat_activity
                   WHERE query LIKE '%accept_run%' AND wait_event_type = 'Lock'"""
        await until(lambda: owner.fetchval(waits))
        await second.execute(then, DEFAULT_TENANT, before[0])
    last = await submitting
    rows = await owner.fetch("SELECT id FROM runs WHERE ended_at IS NULL")
    assert [row["id"] for row in rows] == [last]
    assert await owner.fetchval("SELECT queued_at IS NOT NULL FROM runs WHERE id = $1", last)
    for connection in (first, second):
        await connection.close()
