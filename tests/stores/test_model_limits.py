"""Limits of model servers over several workers, each with its own connections, on one database."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic_core import to_json

from bottega.clock import monotonic
from bottega.db.engine import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import NotifyListener
from bottega.llm.gates import Traffic
from bottega.llm.limits import ServerKey, ServerLimits
from bottega.services import background
from tests.claims import report, sweep
from tests.waiting import until

KEY = ServerKey(DEFAULT_TENANT, False, "vendor")


class Crew:
    """Workers that share the limits of one server.

    Attributes:
        under_way, most: calls at this moment, and the most at one moment, of all workers.
    """

    def __init__(self, workers: list[Traffic]) -> None:
        self.workers = workers
        self.under_way = self.most = 0
        self.done: Counter[UUID] = Counter()

    async def call(
        self, worker: Traffic, limits: ServerLimits, key: ServerKey = KEY, tokens: int = 1
    ) -> None:
        """Make one call as soon as the limits allow it."""
        admission = await worker.shares.enter(key, limits, tokens, monotonic(), 60.0)
        assert admission is not None
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(50):
            await asyncio.sleep(0)
        self.under_way -= 1
        self.done[key.tenant_id] += 1
        worker.shares.leave(key, admission, tokens)


@asynccontextmanager
async def crew(database: Database, listener: NotifyListener, size: int) -> AsyncIterator[Crew]:
    async with AsyncExitStack() as stack:
        workers = []
        for _ in range(size):
            worker_id = uuid4()
            await report(database.pool, worker_id)
            workers.append(Traffic(database.pool, worker_id, listener))
        shares = (each.shares.run for each in workers)
        await stack.enter_async_context(background(listener.run, *shares))
        yield Crew(workers)


@pytest.fixture
async def listener(database: Database) -> NotifyListener:
    return NotifyListener(database.connect)


async def test_eight_workers_never_make_more_calls_at_once_than_allowed(
    database: Database, listener: NotifyListener, owner: asyncpg.Pool
) -> None:
    limits = ServerLimits(4, None, None)
    async with crew(database, listener, 8) as all_:
        await asyncio.gather(
            *(all_.call(worker, limits) for worker in all_.workers for _ in range(10))
        )
        assert (all_.most, sum(all_.done.values())) == (4, 80)
        left = "SELECT count(*) FROM model_shares"
        await until(lambda: owner.fetchval(left), lambda rows: rows == 0, within=3)


async def test_one_worker_needs_few_queries_while_it_holds_a_block(
    database: Database, listener: NotifyListener, owner: asyncpg.Pool
) -> None:
    async with crew(database, listener, 1) as all_:
        (worker,) = all_.workers
        asked = 0
        exchange = worker.shares._exchange

        async def counted(**options: bool) -> None:
            nonlocal asked
            asked += 1
            await exchange(**options)

        worker.shares._exchange = counted  # type: ignore[method-assign]
        limits = ServerLimits(40, 4000, 4_000_000)
        began = monotonic()
        for _ in range(50):
            await all_.call(worker, limits)
        assert asked <= 2 + (monotonic() - began) / 0.3


async def test_the_share_of_a_dead_worker_comes_back(
    database: Database, listener: NotifyListener, owner: asyncpg.Pool
) -> None:
    limits = ServerLimits(2, None, None)
    async with crew(database, listener, 2) as all_:
        dead, alive = all_.workers
        admitted = [await dead.shares.enter(KEY, limits, 1, monotonic(), 60.0) for _ in range(2)]
        assert None not in admitted
        waiting = asyncio.ensure_future(all_.call(alive, limits))
        waits = "SELECT count(*) FROM model_shares WHERE waiting = 1"
        await until(lambda: owner.fetchval(waits), lambda rows: rows == 1)
        assert not waiting.done()
        await owner.execute("UPDATE workers SET leased_until = now() WHERE id = $1", dead.worker_id)
        await waiting


async def test_requests_of_any_minute_stay_below_the_limit_by_the_database_s_clock(
    database: Database, listener: NotifyListener, owner: asyncpg.Pool
) -> None:
    limits = ServerLimits(None, 20, None)
    older = "UPDATE model_uses SET at = at - interval '1 minute'"
    async with crew(database, listener, 4) as all_:
        calls = [
            asyncio.ensure_future(all_.call(worker, limits))
            for worker in all_.workers
            for _ in range(10)
        ]
        used = "SELECT coalesce(sum(requests), 0) FROM model_uses"
        await until(lambda: owner.fetchval(used), lambda count: count == 20)
        assert sum(all_.done.values()) == 20
        await owner.execute(older)
        await asyncio.gather(*calls)
        await until(lambda: owner.fetchval(used), lambda count: count == 20)


async def test_tokens_are_reserved_by_estimate_and_counted_by_use(
    database: Database, listener: NotifyListener, owner: asyncpg.Pool
) -> None:
    limits = ServerLimits(None, None, 1000)
    async with crew(database, listener, 2) as all_:
        one, other = all_.workers
        first = await one.shares.enter(KEY, limits, 700, monotonic(), 60.0)
        assert first is not None
        assert await other.shares.enter(KEY, limits, 400, monotonic(), 0.0) is None
        one.shares.leave(KEY, first, 100)
        second = await other.shares.enter(KEY, limits, 400, monotonic(), 60.0)
        assert second is not None
        other.shares.leave(KEY, second, 800)  # twice what was estimated
        used = "SELECT coalesce(sum(tokens), 0) FROM model_uses"
        await until(lambda: owner.fetchval(used), lambda count: count == 900)
        assert await one.shares.enter(KEY, limits, 200, monotonic(), 0.0) is None
        too_large = asyncio.ensure_future(one.shares.enter(KEY, limits, 5000, monotonic(), 60.0))
        await owner.execute("UPDATE model_uses SET at = at - interval '1 minute'")
        assert await too_large is not None  # it waits until nothing else is in use


async def test_tenants_take_turns_on_an_operator_s_limits(
    database: Database, listener: NotifyListener
) -> None:
    limits = ServerLimits(2, None, None)
    busy, quiet = (ServerKey(uuid4(), True, "vendor") for _ in range(2))
    async with crew(database, listener, 3) as all_:
        crowd = [
            asyncio.ensure_future(all_.call(worker, limits, busy))
            for worker in all_.workers
            for _ in range(60)
        ]
        await until(lambda: all_.done[busy.tenant_id] >= 2)
        before = all_.done[busy.tenant_id]
        await asyncio.gather(*(all_.call(all_.workers[0], limits, quiet) for _ in range(5)))
        meanwhile = all_.done[busy.tenant_id] - before
        assert all_.most == 2
        assert meanwhile <= 120, "the tenant with few calls waited for those of the other"
        for each in crowd:
            each.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


async def test_a_repeated_report_counts_once(database: Database, owner: asyncpg.Pool) -> None:
    worker = uuid4()
    await report(owner, worker)
    news = {
        "tenant": DEFAULT_TENANT,
        "is_operators": False,
        "provider": "p",
        "limits": [4, 10, None],
        "gone": [0, 3, 0],
        "busy": [1, 0, 0],
        "used": [3, 0],
        "told": [0, 0],
        "waiting": 2,
        "tokens": 1,
        "waited_s": 0,
    }
    for _ in range(2):
        await owner.fetchval("SELECT share_limits($1, $2)", worker, to_json([news]).decode())
    assert await owner.fetchval("SELECT sum(requests) FROM model_uses") == 3


async def test_the_sweep_forgets_what_nobody_needs(database: Database, owner: asyncpg.Pool) -> None:
    share = (
        "INSERT INTO model_shares (tenant_id, is_operators, provider, worker_id, limits, granted,"
        " gone, used, waiting, tokens, since, seen_at)"
        " VALUES ($1, false, 'p', $2, '{}', '{}', '{}', '{}', 0, 1, now(), now() - $3::interval)"
    )
    use = "INSERT INTO model_uses VALUES ($1, false, 'p', now() - $2::interval, 1, 1)"
    breaker = "INSERT INTO model_breakers VALUES ($1, false, 'p', $2, 5, now() - $3::interval)"
    for age in (timedelta(seconds=1), timedelta(hours=2)):
        await owner.execute(share, DEFAULT_TENANT, uuid4(), age)
        await owner.execute(use, DEFAULT_TENANT, age)
        await owner.execute(breaker, DEFAULT_TENANT, str(age), age)
    await sweep(database.pool)
    for table in ("model_shares", "model_uses", "model_breakers"):
        assert await owner.fetchval(f"SELECT count(*) FROM {table}") == 1, table
