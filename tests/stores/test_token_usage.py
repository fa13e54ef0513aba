"""Token counts of tenants, however their runs end."""

import asyncio
from typing import Any, cast
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.engine.budget import DayAccount, DayBudgets
from bottega.errors import BudgetBusyError, BudgetExhaustedError
from bottega.services import Services
from bottega.subagents.budget import Reservation
from tests.claims import claim, hand_back, sweep
from tests.steps import append
from tests.stores.test_neighbours import claimed

ANSWERED = {
    "type": "llm.completed",
    "task_id": None,
    "parent_task_id": None,
    "agent": "a",
    "depth": None,
    "data": {"call": 1, "usage": {"input": 70, "output": 30}},
}
CRASHED = {"status": "failed", "error": {"code": "crashed", "message": "x"}, "spent": []}


@pytest.mark.parametrize("end", ["cancelled while it waits", "abandoned", "crashed too often"])
async def test_tokens_of_earlier_attempts_count(
    database: Database, owner: asyncpg.Pool, end: str
) -> None:
    pool = database.pool
    begun = await claimed(database, DEFAULT_TENANT)
    run_id, seq = begun.run_id, begun.last_seq
    run = (pool, DEFAULT_TENANT, run_id)
    await append(*run, attempt=1, after=seq, events=[ANSWERED])
    if end == "abandoned":
        for table in ("runs", "run_heads"):
            await owner.execute(f"UPDATE {table} SET deadline = now() - interval '2 min'")
        await sweep(pool)
    else:
        await hand_back(pool, DEFAULT_TENANT, run_id)
    if end == "cancelled while it waits":
        async with acting_as(pool, DEFAULT_TENANT) as connection:
            await connection.execute("SELECT cancel_run($1, $2)", DEFAULT_TENANT, run_id)
    elif end == "crashed too often":
        await claim(pool, run_id)
        final = {**ANSWERED, "type": "run.failed", "data": {}}
        await append(*run, attempt=2, after=seq + 2, events=[final], outcome=CRASHED)
    assert await owner.fetchval("SELECT ended_at IS NOT NULL FROM runs")
    assert await owner.fetchval("SELECT amount FROM daily_spending WHERE unit = 'tokens'") == 100


class Drawing:
    """A worker that reserves tokens of the day's 1,000."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self.id = uuid4()
        self._pool = pool

    async def __call__(
        self, wanted: int, spent: int = 0, reported: int = 0, lapses_s: float = 60.0
    ) -> tuple[int, int]:
        query = "SELECT held, others FROM draw_budget($1, $2, 'tokens', $3, $4, $5, $6, NULL)"
        about = (DEFAULT_TENANT, self.id, spent, reported, wanted, lapses_s)
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute("SET LOCAL bottega.tokens_per_day = 1000")
            return tuple(await connection.fetchrow(query, *about))


async def test_workers_never_hold_more_than_the_day_has(
    database: Database, owner: asyncpg.Pool
) -> None:
    one, other = Drawing(database.pool), Drawing(database.pool)
    assert await one(600) == (600, 0)
    assert await other(600) == (400, 600)
    assert await one(600, spent=500) == (100, 400)
    assert await one(600, spent=500) == (100, 400)  # a repeated report counts once
    assert await owner.fetchval("SELECT amount FROM daily_spending WHERE unit = 'tokens'") == 500
    assert await other(0, spent=50) == (0, 100)
    assert await one(600, spent=500) == (450, 0)
    await asyncio.gather(*(Drawing(database.pool)(30) for _ in range(8)))
    assert await owner.fetchval("SELECT sum(amount) FROM budget_slices") == 450


async def test_the_slice_of_a_dead_process_counts_as_spent(
    database: Database, owner: asyncpg.Pool
) -> None:
    spent = "SELECT amount FROM daily_spending WHERE unit = 'tokens'"
    dead, other = Drawing(database.pool), Drawing(database.pool)
    await dead(500, spent=100, lapses_s=0.0)
    assert await other(900) == (400, 0)
    assert await owner.fetchval(spent) == 600
    # It is alive after all: what it spends of that slice is counted already.
    assert await dead(900, spent=300, reported=100) == (0, 400)
    assert await dead(900, spent=650, reported=300) == (0, 400)
    assert await owner.fetchval(spent) == 650
    assert await other(900) == (350, 0)
    assert await dead(900, spent=700, reported=650) == (0, 350)
    assert await owner.fetchval(spent) == 700


async def test_a_model_call_rarely_queries_the_database() -> None:
    draws: list[int] = []

    async def draw(spent: int, reported: int, wanted: int) -> tuple[int, int]:
        draws.append(wanted)
        return wanted, 0

    account = DayAccount(draw, 100_000)
    for _ in range(100):
        async with Reservation([account], 500) as permit:
            assert permit.most is None
            account.spent += 1000
    assert len(draws) == 2
    await account.report()
    assert (draws[-1], account.held) == (0, 0)


async def test_an_account_that_could_not_report_is_kept() -> None:
    is_away = True

    async def draw(spent: int, reported: int, wanted: int) -> tuple[int, int]:
        if is_away:
            raise asyncpg.UndefinedFunctionError("away")
        return wanted, 0

    account = DayAccount(draw, 100)
    account.spent = 500
    for report in (account.report, account.tend):
        with pytest.raises(asyncpg.UndefinedFunctionError):
            await report()
        assert not account.is_idle
    is_away = False
    await account.tend()
    assert account.is_idle


def account_of(draw: Drawing) -> DayAccount:
    async def drawn(spent: int, reported: int, wanted: int) -> tuple[int, int]:
        return await draw(wanted, spent, reported)

    return DayAccount(drawn, 10)


async def test_two_workers_never_wait_for_each_others_slices(database: Database) -> None:
    accounts = [account_of(Drawing(database.pool)) for _ in range(2)]
    for account, drawn, spent in zip(accounts, (600, 400), (550, 360), strict=True):
        await account.fill(drawn)
        account.spent += spent  # 50 and 40 tokens of the slices are left

    async def call(account: DayAccount) -> str:
        try:
            async with Reservation([account], 60):
                account.spent += 80
        except BudgetExhaustedError:
            return "refused"
        finally:
            account.runs = 0
            await account.report()
        return "made"

    async with asyncio.timeout(15):
        ends = await asyncio.gather(*map(call, accounts))
    assert sorted(ends) == ["made", "refused"]


async def test_the_end_reports_every_account_while_a_call_opens_another() -> None:
    drawn: list[UUID] = []

    class Pool:
        async def fetchrow(self, query: str, tenant_id: UUID, *about: object) -> dict[str, int]:
            drawn.append(tenant_id)
            budgets.open(uuid4())
            return {"held": 0, "others": 0}

    budgets = DayBudgets(cast(asyncpg.Pool, Pool()), {"tokens_per_day": 1_000})
    tenants = [uuid4(), uuid4()]
    async with budgets.kept(Services()):
        for tenant in tenants:
            (account,) = budgets.open(tenant)
            account.spent = 10
    assert drawn == tenants


async def test_an_embedding_does_not_wait_long_for_a_budget_that_another_call_holds() -> None:
    class Pool:
        async def fetchrow(self, query: str, *about: Any) -> dict[str, int]:
            return {"held": min(1_000, about[5]), "others": 0}

    account = DayBudgets(cast(asyncpg.Pool, Pool()), {"tokens_per_day": 1_000}).of(uuid4())
    async with account.call(900, None, 0):
        async with asyncio.timeout(10):
            with pytest.raises(BudgetBusyError, match=r"for 1 s, .* too little left"):
                async with account.call(900, None, 0):
                    pass
    async with account.call(900, None, 0):
        pass
