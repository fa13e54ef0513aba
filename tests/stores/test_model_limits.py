"""Limits of model servers over several workers, each with its own connections, on one database."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.clock import monotonic
from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.llm import limits as module
from bottega.llm.limits import ServerKey, ServerLimits, Shares
from bottega.services import background
from tests.claims import report, sweep
from tests.waiting import until

KEY = ServerKey(DEFAULT_TENANT, False, "vendor")
HELD = "SELECT coalesce(sum(held[$1]), 0) FROM model_shares"
CALLS, REQUESTS, TOKENS = 1, 2, 3


class Crew:
    """Workers that share the limits of one server.

    Attributes:
        under_way, most: calls at this moment, and the most at one moment, of all workers.
    """

    def __init__(self, workers: dict[UUID, Shares]) -> None:
        self.ids = list(workers)
        self.workers = list(workers.values())
        self.under_way = self.most = 0
        self.done: Counter[UUID] = Counter()

    async def call(
        self, worker: Shares, limits: ServerLimits, key: ServerKey = KEY, tokens: int = 1
    ) -> None:
        """Make one call as soon as the limits allow it."""
        permit = await worker.enter(key, limits, tokens, monotonic(), 60.0)
        assert permit is not None
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(50):
            await asyncio.sleep(0)
        self.under_way -= 1
        self.done[key.tenant_id] += 1
        worker.leave(key, permit, tokens)


@asynccontextmanager
async def crew(database: Database, size: int) -> AsyncIterator[Crew]:
    async with AsyncExitStack() as stack:
        workers = {}
        for _ in range(size):
            worker_id = uuid4()
            await report(database.pool, worker_id)
            workers[worker_id] = Shares(database.pool, worker_id)
        await stack.enter_async_context(background(*(each.run for each in workers.values())))
        yield Crew(workers)


@pytest.mark.deep
@pytest.mark.parametrize(("limit", "calls"), [(4, 10), (16, 20)])
async def test_eight_workers_never_make_more_calls_at_once_than_allowed(
    database: Database, owner: asyncpg.Pool, limit: int, calls: int
) -> None:
    limits = ServerLimits(limit, None, None)
    async with crew(database, 8) as all_:
        await asyncio.gather(
            *(all_.call(worker, limits) for worker in all_.workers for _ in range(calls))
        )
        assert all_.most <= limit
        assert sum(all_.done.values()) == 8 * calls
        rows = "SELECT count(*) FROM model_shares"
        await until(lambda: owner.fetchval(rows), lambda left: left == 0, within=3)


async def test_one_worker_needs_few_queries_while_it_holds_a_block(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crew(database, 1) as all_:
        (worker,) = all_.workers
        claims = 0
        settle = module.Share.apply_answer

        def counted(share: module.Share, may_hold: list[int], calls_kept: int | None) -> None:
            nonlocal claims
            claims += 1
            settle(share, may_hold, calls_kept)

        monkeypatch.setattr(module.Share, "apply_answer", counted)
        limits = ServerLimits(40, 4000, 4_000_000)
        began = monotonic()
        for _ in range(50):
            await all_.call(worker, limits)
        assert claims <= 2 + (monotonic() - began) / 0.2


async def test_the_share_of_a_dead_worker_comes_back(
    database: Database, owner: asyncpg.Pool
) -> None:
    limits = ServerLimits(2, None, None)
    async with crew(database, 2) as all_:
        dead, alive = all_.workers
        permits = [await dead.enter(KEY, limits, 1, monotonic(), 60.0) for _ in range(2)]
        assert None not in permits
        waiting = asyncio.ensure_future(all_.call(alive, limits))
        waits = "SELECT count(*) FROM model_shares WHERE waiting = 1"
        await until(lambda: owner.fetchval(waits), lambda rows: rows == 1)
        assert not waiting.done()
        await owner.execute("UPDATE workers SET leased_until = now() WHERE id = $1", all_.ids[0])
        await waiting


async def test_requests_of_any_minute_stay_below_the_limit(
    database: Database, owner: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ServerLimits(None, 20, None)
    async with crew(database, 4) as all_:
        calls = [
            asyncio.ensure_future(all_.call(worker, limits))
            for worker in all_.workers
            for _ in range(10)
        ]
        await until(lambda: all_.done.total() == 20)
        waiting = "SELECT sum(waiting) FROM model_shares"
        await until(lambda: owner.fetchval(waiting), lambda left: left == 20)
        assert await owner.fetchval(HELD, REQUESTS) == 20
        assert all_.done.total() == 20
        later = monotonic
        monkeypatch.setattr(module, "monotonic", lambda: later() + 60)
        await asyncio.gather(*calls)
        assert await owner.fetchval(HELD, REQUESTS) == 20


async def test_tokens_are_reserved_by_estimate_and_counted_by_use(
    database: Database, owner: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ServerLimits(None, None, 1000)
    async with crew(database, 2) as all_:
        one, other = all_.workers
        first = await one.enter(KEY, limits, 700, monotonic(), 60.0)
        assert first is not None
        assert await other.enter(KEY, limits, 400, monotonic(), 0.0) is None
        one.leave(KEY, first, 100)
        second = await other.enter(KEY, limits, 400, monotonic(), 60.0)
        assert second is not None
        other.leave(KEY, second, 800)  # twice what was estimated
        await until(lambda: owner.fetchval(HELD, TOKENS), lambda held: held == 900)
        assert await one.enter(KEY, limits, 200, monotonic(), 0.0) is None
        too_large = asyncio.ensure_future(one.enter(KEY, limits, 5000, monotonic(), 60.0))
        later = monotonic
        monkeypatch.setattr(module, "monotonic", lambda: later() + 60)
        assert await too_large is not None  # it waits until nothing else is in use


async def test_tenants_take_turns_on_an_operator_s_limits(database: Database) -> None:
    limits = ServerLimits(2, None, None)
    busy, quiet = (ServerKey(uuid4(), True, "vendor") for _ in range(2))
    async with crew(database, 3) as all_:
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


def kept(worker: Shares) -> int | None:
    """Return the calls that a worker may go on with while others wait."""
    share = worker._shares.get(KEY)
    return None if share is None else share._calls_kept


async def test_a_worker_with_many_calls_leaves_others_their_part(database: Database) -> None:
    limits = ServerLimits(4, None, None)
    async with crew(database, 2) as all_:
        greedy, modest = all_.workers
        held = [await greedy.enter(KEY, limits, 1, monotonic(), 60.0) for _ in range(4)]
        crowd = [
            asyncio.ensure_future(greedy.enter(KEY, limits, 1, monotonic(), 60.0))
            for _ in range(10)
        ]
        others = [
            asyncio.ensure_future(modest.enter(KEY, limits, 1, monotonic(), 60.0))
            for _ in range(10)
        ]
        await until(lambda: all(kept(worker) == 2 for worker in (modest, greedy)))
        for permit in held:
            assert permit is not None
            greedy.leave(KEY, permit, 0)
        await until(lambda: sum(each.done() for each in others) == 2)
        assert sum(each.done() for each in crowd) == 2
        for each in (*crowd, *others):
            each.cancel()
        await asyncio.gather(*crowd, *others, return_exceptions=True)


async def test_the_sweep_forgets_the_shares_of_dead_workers(
    database: Database, owner: asyncpg.Pool
) -> None:
    share = (
        "INSERT INTO model_shares (tenant_id, is_operators, provider, worker_id, held, needs,"
        " waiting, since, seen_at)"
        " VALUES ($1, false, 'p', $2, '{1,0,0}', '{1,1,1}', 0, now(), now() - $3::interval)"
    )
    for age in (timedelta(seconds=1), timedelta(hours=2)):
        await owner.execute(share, DEFAULT_TENANT, uuid4(), age)
    await sweep(database.pool)
    assert await owner.fetchval("SELECT count(*) FROM model_shares") == 1
