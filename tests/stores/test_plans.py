"""Statements with arrays that the planner does not plan again for each array.

With arrays it expects more elements of a plan for all than this array has, and so would never keep
one.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from bottega.db.connect import APP_ROLE
from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.events import log
from tests.claims import report
from tests.many import fill
from tests.stores.test_neighbours import claimed
from tests.stores.test_queue import accept_all, tenants
from tests.stores.test_step_groups import step

_EVERYTHING = '{"reach": "everything"}'


class Planner:
    """Counts how often the planner works for a session, which tells of each plan."""

    def __init__(self, session: asyncpg.Connection) -> None:
        self._plans = 0
        session.add_log_listener(self._count)

    def _count(self, _: object, message: Any) -> None:
        self._plans += message.message == "plan:"

    async def taken(self) -> int:
        """Return the number of plans since the last time."""
        await asyncio.sleep(0)  # messages come by call_soon
        plans, self._plans = self._plans, 0
        return plans


@pytest.fixture
async def session(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session that tells what it does, unlike those of the service."""
    settings = {"role": APP_ROLE, "bottega.tenant": str(DEFAULT_TENANT), "enable_seqscan": "off"}
    settings |= {"client_min_messages": "log", "debug_print_plan": "on"}
    session = await asyncpg.connect(database_url, server_settings=settings)
    yield session
    await session.close()


@pytest.mark.parametrize("several", [False, True], ids=["one tenant", "several"])
async def test_groups_of_steps_are_stored_by_the_same_plans(
    database: Database, session: asyncpg.Connection, owner: asyncpg.Pool, several: bool
) -> None:
    of = await tenants(owner, 5) if several else [DEFAULT_TENANT] * 5
    runs = [await claimed(database, tenant) for tenant in of]
    planner = Planner(session)
    for number in range(20):
        await planner.taken()
        steps = [step(run, "a", after=2 + number) for run in runs]
        assert await log.append_steps(session, steps) == ["stored"] * 5
    assert await planner.taken() == 0


async def test_runs_are_claimed_by_the_same_plans(
    database: Database, session: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    await report(owner, worker := uuid4())
    (tenant,) = await tenants(owner, 1)
    planner = Planner(session)
    plans = -1
    for number in range(20):
        for name in (DEFAULT_TENANT, tenant)[: 1 + number % 2]:
            await accept_all(database, name, 1 + number % 3)
        await planner.taken()
        held = [DEFAULT_TENANT] * (number % 4)
        assert await session.fetch("SELECT * FROM claim($1, 20, 500, $2, '{}')", worker, held)
        plans = await planner.taken()
    assert plans == 0


async def test_episodes_are_read_by_the_same_plans(
    session: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    await fill(owner, DEFAULT_TENANT, 100)
    ids = [row["id"] for row in await owner.fetch("SELECT id FROM episodes LIMIT 10")]
    query = "SELECT * FROM read_episodes($1, $2, $3)"
    planner = Planner(session)
    for number in range(12):
        await planner.taken()
        some = ids[: 1 + number % 5]
        assert len(await session.fetch(query, _EVERYTHING, some, DEFAULT_TENANT)) == len(some)
    assert await planner.taken() == 0


async def test_a_search_plans_only_what_depends_on_its_scope(
    session: asyncpg.Connection, owner: asyncpg.Pool
) -> None:
    await fill(owner, DEFAULT_TENANT, 100)
    query = (
        "SELECT * FROM search_episodes($1, $2, '[1,2]', 'one', 'task', '{}', '-infinity', 0.8, 10,"
        " $3)"
    )
    planner = Planner(session)
    for number in range(12):
        await planner.taken()
        words = [f"word{number}", "other"]
        assert len(await session.fetch(query, _EVERYTHING, words, DEFAULT_TENANT)) == 10
    assert await planner.taken() == 3  # texts that are made for each: words, vectors, both
