"""The run queue: the database decides which run of which tenant a worker claims next."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from bottega.db.pool import Database, acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from tests.claims import hand_back, report, sweep, waits
from tests.examples import examples
from tests.waiting import until

CLAIM = "SELECT * FROM claim($1, $2, $3, $4, $5)"
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
        await connection.fetchval("SELECT accept_run($1, $2, '{}', '[]')", tenant, new)
    )
    return UUID(answer["id"])


async def take(
    connection: asyncpg.Connection | asyncpg.Pool,
    most: int = 1,
    *,
    places: int = 1000,
    held: Sequence[UUID] = (),
    ended: Sequence[UUID] = (),
    worker: UUID | None = None,
) -> list[UUID]:
    """Claim the next runs, as a worker with runs of these tenants; return their ids."""
    await report(connection, worker := worker or uuid4())
    rows = await connection.fetch(CLAIM, worker, most, places, held, ended)
    return [row["run"] for row in rows if row["run"] is not None]


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


async def accept_all(database: Database, tenant: UUID, count: int, priority: int = 5) -> list[UUID]:
    """Queue so many runs of a tenant, each in a transaction; return their ids."""
    found = []
    for _ in range(count):
        async with acting_as(database.pool, tenant) as connection:
            found.append(await accept(connection, tenant, priority))
    return found


async def pile_up(owner: asyncpg.Pool, tenant: UUID, count: int) -> None:
    """Queue so many runs of a tenant at once, older than any other."""
    await owner.execute(
        """
        WITH stored AS (
            INSERT INTO runs (tenant_id, mode, input, pinned, timeout_s, created_at, last_seq)
            SELECT $1, 'dag', '"x"', '{}', 60, now() - interval '1 h', 1
            FROM generate_series(1, $2::integer) RETURNING id, created_at)
        INSERT INTO run_queue (tenant_id, run_id, rank, is_child, is_due, due_at, expires_at)
        SELECT $1, id, created_at, false, true, created_at, 'infinity' FROM stored
        """,
        tenant,
        count,
    )


async def test_tenants_with_few_runs_get_them_beside_a_flood(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Check that 15 and 5 runs beside 10,000 older ones are claimed by the first few claims."""
    flooding, some, few = await tenants(owner, 3)
    await pile_up(owner, flooding, 10_000)
    limits = {"concurrent_runs": 1000, "queued_runs": 100_000}
    async with open_database(database_url, limits=limits) as database:
        mine = set(await accept_all(database, some, 15) + await accept_all(database, few, 5))
        claims = [await take(database.pool, 20) for _ in range(3)]
    assert [len(claim) for claim in claims] == [20, 20, 20]
    assert len(mine & set(claims[0])) >= 11  # a third each; what five leave is shared
    assert mine <= {run for claim in claims for run in claim}


async def test_what_one_tenant_leaves_the_others_get(
    database: Database, owner: asyncpg.Pool
) -> None:
    one, other = await tenants(owner, 2)
    few, many = await accept_all(database, one, 2), await accept_all(database, other, 30)
    assert set(await take(database.pool, 10)) == {*few, *many[:8]}


async def test_a_tenant_that_was_served_last_comes_last(
    database: Database, owner: asyncpg.Pool
) -> None:
    names = await tenants(owner, 6)
    waiting = {name: await accept_all(database, name, 3) for name in names}
    claimed = [(await take(database.pool))[0] for _ in range(18)]
    order = [next(name for name in names if run in waiting[name]) for run in claimed]
    assert order == order[:6] * 3
    assert sorted(order[:6]) == sorted(names)


async def test_a_tenant_s_runs_go_by_priority_with_ageing(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Let a run that waited longer go before a later, better one: a priority is worth 30 s."""
    low, high, top = [(await accept_all(database, DEFAULT_TENANT, 1, p))[0] for p in (9, 5, 1)]
    aged = (await accept_all(database, DEFAULT_TENANT, 1, 9))[0]
    await owner.execute("UPDATE run_queue SET rank = rank - interval '1 h' WHERE run_id = $1", aged)
    assert await take(database.pool, 10) == [aged, top, high, low]
    spans = await owner.fetch("SELECT priority, created_at FROM runs ORDER BY created_at LIMIT 3")
    assert [row["priority"] for row in spans] == [9, 5, 1]


async def test_a_run_that_comes_back_goes_first(database: Database, owner: asyncpg.Pool) -> None:
    first, *rest = await accept_all(database, DEFAULT_TENANT, 3)
    assert await take(database.pool) == [first]
    await hand_back(database.pool, DEFAULT_TENANT, first)
    assert await take(database.pool, 10) == [first, *rest]


async def test_eight_workers_keep_exactly_to_the_limit_and_claim_each_run_once(
    database_url: str, owner: asyncpg.Pool
) -> None:
    one, other = await tenants(owner, 2)
    claimed: Counter[UUID] = Counter()
    running: Counter[UUID] = Counter()
    limits = {"concurrent_runs": 7, "queued_runs": 1000}

    async def work(database: Database, of: Mapping[UUID, UUID]) -> None:
        worker, ended = uuid4(), list[UUID]()
        while sum(claimed.values()) < len(of):
            mine = await take(database.pool, 5, ended=ended, worker=worker)
            for run in mine:
                running[of[run]] += 1
                assert running[of[run]] <= limits["concurrent_runs"]
            claimed.update(mine)
            await asyncio.sleep(0)  # others claim while these run
            for run in mine:
                running[of[run]] -= 1  # before the database knows: it may not be later
                async with acting_as(database.pool, of[run]) as connection:
                    await end(connection, of[run], run)
            ended = [of[run] for run in mine]

    async with open_database(database_url, limits=limits, pool_size=8) as database:
        of = {
            run: tenant for tenant in (one, other) for run in await accept_all(database, tenant, 40)
        }
        async with asyncio.timeout(60):
            await asyncio.gather(*(work(database, of) for _ in range(8)))
    assert claimed == Counter(of.keys())
    assert await owner.fetchval("SELECT count(*) FROM run_queue") == 0


async def test_a_limit_that_changes_counts_from_the_next_claim_on(
    database_url: str, owner: asyncpg.Pool
) -> None:
    held: list[UUID] = []
    for limit, expected in ((2, 2), (5, 3), (1, 0), (6, 1)):
        limits = {"concurrent_runs": limit, "queued_runs": 1000}
        async with open_database(database_url, limits=limits) as database:
            if not held:
                await accept_all(database, DEFAULT_TENANT, 10)
            claimed = await take(database.pool, 20)
            assert len(claimed) == expected
            held += claimed


async def test_a_tenant_at_its_limit_is_claimed_again_when_a_run_of_it_ends(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Check it beside five others that always have due runs."""
    full, *others = await tenants(owner, 6)
    async with open_database(database_url, limits={"concurrent_runs": 1}) as database:
        first, second = await accept_all(database, full, 2)
        assert await take(database.pool) == [first]
        for other in others:
            await accept_all(database, other, 1)
        async with acting_as(database.pool, full) as connection:
            await end(connection, full, first)
        claims = [await take(database.pool, 4, ended=[full]) for _ in range(2)]
    assert second in claims[1]


async def test_child_runs_count_in_no_limit_and_wait_for_no_other_run(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async with open_database(database_url, limits={"concurrent_runs": 1}) as database:
        parent, *waiting = await accept_all(database, DEFAULT_TENANT, 40)
        assert await take(database.pool, 10) == [parent]
        new = {"agent": "a", "input": "x", "timeout_s": 60, "task": {}}
        children = [uuid4() for _ in range(3)]
        about = to_json([new | {"id": child} for child in children]).decode()
        await database.pool.execute(
            "SELECT add_children($1, $2, 1, 20, $3)", DEFAULT_TENANT, parent, about
        )
        assert set(await take(database.pool, 10)) == set(children)
        async with acting_as(database.pool, DEFAULT_TENANT) as connection:
            await end(connection, DEFAULT_TENANT, parent)
        assert await take(database.pool, 10, ended=[DEFAULT_TENANT]) == waiting[:1]


async def test_a_run_waits_for_no_child_runs_of_its_tenant(database: Database) -> None:
    """Claim a chat beside a batch at once, however many items are due before it."""
    (parent,) = await accept_all(database, DEFAULT_TENANT, 1)
    assert await take(database.pool, 1) == [parent]
    new = {"agent": "a", "input": "x", "timeout_s": 60, "task": {}}
    about = to_json([new | {"id": uuid4()} for _ in range(60)]).decode()
    await database.pool.execute(
        "SELECT add_children($1, $2, 1, 60, $3)", DEFAULT_TENANT, parent, about
    )
    (chat,) = await accept_all(database, DEFAULT_TENANT, 1)
    assert chat in await take(database.pool, 2)


async def test_the_last_fifth_of_the_places_is_for_tenants_that_hold_none(
    database: Database, owner: asyncpg.Pool
) -> None:
    one, other, third = await tenants(owner, 3)
    await accept_all(database, one, 30)
    assert len(await take(database.pool, 20, places=20)) == 16
    held = [one] * 16
    mine = await accept_all(database, other, 3)
    late = await accept_all(database, third, 3)
    claimed = await take(database.pool, 20, places=20, held=held)
    assert set(claimed) == {mine[0], late[0]}
    assert await take(database.pool, 20, places=20, held=[*held, other, third]) == []


async def test_the_last_fifth_is_reached_though_other_tenants_were_served_before(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Let five tenants hang with more runs, and another one come back after its first run."""
    *hanging, late = await tenants(owner, 6)
    for tenant in hanging:
        await accept_all(database, tenant, 9)
    assert len(await take(database.pool, 16, places=20)) == 16
    held = [tenant for tenant in hanging for _ in range(4)][:16]
    for _ in range(2):
        (run,) = await accept_all(database, late, 1)
        assert run in await take(database.pool, 20, places=20, held=held)


async def test_one_tenant_alone_gets_all_places(database: Database) -> None:
    await accept_all(database, DEFAULT_TENANT, 25)
    assert len(await take(database.pool, 20, places=20)) == 20


async def test_a_claim_says_if_there_is_more_for_this_worker(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async def claim(most: int, places: int, held: Sequence[UUID] = ()) -> tuple[int, bool]:
        rows = await database.pool.fetch(CLAIM, worker, most, places, held, [])
        assert len({row["more"] for row in rows}) <= 1
        return sum(row["run"] is not None for row in rows), any(row["more"] for row in rows)

    worker = uuid4()
    async with open_database(database_url, limits={"concurrent_runs": 6}) as database:
        await accept_all(database, DEFAULT_TENANT, 20)
        assert await claim(2, 50) == (0, False)  # without a lease
        await report(database.pool, worker)
        assert await claim(2, 50) == (2, True)
        assert await claim(9, 3, [DEFAULT_TENANT] * 2) == (1, False)  # its places are taken
        assert await claim(9, 50) == (3, True)  # nobody woke it while it was full
        assert await claim(9, 50) == (0, False)
        (tenant,) = await tenants(owner, 1)
        await accept_all(database, tenant, 1)
        async with owner.acquire() as connection, connection.transaction():
            await connection.execute("SELECT FROM tenant_queues FOR UPDATE")
            assert await claim(9, 50) == (0, True)  # another claim holds it
        assert await claim(9, 50) == (1, False)


async def test_a_claim_of_the_only_tenant_waits_for_a_different_claim(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Check that a claim then gets the runs that were queued meanwhile."""
    first, *others = await accept_all(database, DEFAULT_TENANT, 4)
    claiming = await database.connect()
    async with claiming.transaction():
        assert await take(claiming) == [first]
        late = asyncio.ensure_future(take(database.pool, 20))
        await until(
            lambda: owner.fetchval(
                "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND datname = current_database() AND query LIKE '%claim(%')"
            )
        )
        others += await accept_all(database, DEFAULT_TENANT, 1)
        assert not late.done()
    assert await asyncio.wait_for(late, 20) == others
    await claiming.close()


async def test_requests_and_ends_wait_for_no_claim(database_url: str, owner: asyncpg.Pool) -> None:
    async with open_database(database_url, limits={"concurrent_runs": 5}) as database:
        first, second = await accept_all(database, DEFAULT_TENANT, 2)
        assert await take(database.pool) == [first]
        claiming = await database.connect()
        async with claiming.transaction(), asyncio.timeout(20):
            assert await take(claiming) == [second]
            await accept_all(database, DEFAULT_TENANT, 3)
            async with acting_as(database.pool, DEFAULT_TENANT) as connection:
                await end(connection, DEFAULT_TENANT, first)
        await claiming.close()


async def test_claims_of_different_tenants_wait_for_none(
    database: Database, owner: asyncpg.Pool
) -> None:
    """Check it though a row that refers to the tenant is being inserted."""
    names = await tenants(owner, 6)
    for name in names:
        await accept_all(database, name, 1)
    first, second = [await database.connect() for _ in range(2)]
    async with asyncio.timeout(20), owner.acquire() as other, other.transaction():
        await other.execute(
            "INSERT INTO sessions (tenant_id, id) SELECT unnest($1::uuid[]), 's'", names
        )
        async with first.transaction():
            claimed = await take(first, 20)
            assert len(claimed) == 4
            assert len(await take(second, 20)) == 2
    for connection in (first, second):
        await connection.close()


async def test_a_run_that_waits_for_a_time_is_not_claimed_before(
    database: Database, owner: asyncpg.Pool
) -> None:
    (run,) = await accept_all(database, DEFAULT_TENANT, 1)
    await take(database.pool)
    await hand_back(database.pool, DEFAULT_TENANT, run, "model", wait=waits("model", 600.0))
    assert await take(database.pool) == []
    await owner.execute("UPDATE run_waits SET until = now()")
    await sweep(database.pool)
    assert await take(database.pool) == [run]
    cause = await owner.fetchval("SELECT attempts #>> '{-1,cause}' FROM runs")
    assert cause == "model"


async def test_cancelled_and_waiting_runs_are_not_claimed(
    database: Database, owner: asyncpg.Pool
) -> None:
    cancelled, kept = await accept_all(database, DEFAULT_TENANT, 2)
    await database.pool.execute("SELECT cancel_run($1, $2)", DEFAULT_TENANT, cancelled)
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        spoken = {**NEW, "priority": 1, "session_id": "s", "conversation": "continue"}
        query = "SELECT accept_run($1, $2, '{}', '[]')"
        answers = [
            from_json(await connection.fetchval(query, DEFAULT_TENANT, to_json(spoken).decode()))
            for _ in range(2)
        ]
    before, behind = [UUID(answer["id"]) for answer in answers]
    assert set(await take(database.pool, 10)) == {kept, before}
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await end(connection, DEFAULT_TENANT, before)
    assert await take(database.pool, 10) == [behind]


async def test_the_quota_counts_runs_that_wait_for_others(
    database_url: str, owner: asyncpg.Pool
) -> None:
    limits = {"concurrent_runs": 2, "queued_runs": 3}
    async with open_database(database_url, limits=limits) as database:
        first, *_ = await accept_all(database, DEFAULT_TENANT, 5)
        with pytest.raises(KeyError):  # refused: no id
            await accept_all(database, DEFAULT_TENANT, 1)
        assert len(await take(database.pool, 5)) == 2
        with pytest.raises(KeyError):
            await accept_all(database, DEFAULT_TENANT, 1)
        async with acting_as(database.pool, DEFAULT_TENANT) as connection:
            await end(connection, DEFAULT_TENANT, first)
        await accept_all(database, DEFAULT_TENANT, 1)


READ = """
SELECT sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))
FROM pg_class c WHERE c.relkind IN ('r', 'i') AND c.relnamespace = 'public'::regnamespace
"""


async def test_a_claim_reads_no_more_of_a_long_queue(
    database_url: str, owner: asyncpg.Pool
) -> None:
    """Check it with plans and statistics of an empty table."""
    await owner.execute("VACUUM ANALYZE")
    limits = {"concurrent_runs": 1000, "queued_runs": 100_000}
    found, read = [], 0
    async with open_database(database_url, limits=limits) as database:
        connection = await database.connect()
        for size in (50, 5000):
            await pile_up(owner, DEFAULT_TENANT, size)
            for _ in range(7):  # plans are cached from the sixth time on
                async with connection.transaction():
                    before = await connection.fetchval(READ)
                    assert len(await take(connection, 2)) == 2
                    read = await connection.fetchval(READ) - before
            found.append(read)
        await connection.close()
    assert found[1] < found[0] + 100, found


async def test_upkeep_looks_at_no_run_that_is_due(owner: asyncpg.Pool) -> None:
    """Check that the search for runs whose conversation is free costs nothing for other runs."""
    (tenant,) = await tenants(owner, 1)
    await pile_up(owner, tenant, 300)
    async with owner.acquire() as connection:
        await connection.execute("SET track_functions = 'all'")
        await connection.execute("SELECT do_upkeep(), pg_stat_force_next_flush()")
        calls = {
            row["funcname"]: row["calls"]
            for row in await connection.fetch("SELECT * FROM pg_stat_user_functions")
        }
    assert calls["do_upkeep"] == 1
    assert "unfinished_in" not in calls


@settings(
    max_examples=examples(16),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=st.lists(
        st.one_of(st.tuples(st.integers(0, 3), st.integers(1, 4)), st.none()), max_size=60
    ),
)
async def test_tenants_take_turns_in_any_sequence(
    database_url: str, owner: asyncpg.Pool, steps: list[tuple[int, int] | None]
) -> None:
    """Check fairness and order after random steps.

    Between two claims of a tenant with more waiting, no other tenant is claimed twice. A tenant's
    own runs are claimed in order. A step is some runs of a tenant, or a claim.
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
    connection = await limited(database_url)
    transaction = connection.transaction()
    await transaction.start()
    worker = uuid4()
    for step in [*steps, *[None] * 250]:
        if step is not None:
            tenant, count = names[step[0]], step[1]
            for _ in range(count):
                waiting[tenant].append(await accept(connection, tenant))
            continue
        if not (runs := await take(connection, worker=worker)):
            continue
        (run_id,) = runs
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
            query = "SELECT accept_run($1, $2, '{}', '[]')"
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
