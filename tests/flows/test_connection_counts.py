"""Number of a process's connections to the database, at rest and busy."""

import asyncio
from functools import partial

import asyncpg
import pytest

from bottega import container
from bottega.container import open_service
from bottega.db.pool import Database, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.service import running
from tests.team import define, start
from tests.waiting import until

AT_REST = 6
"""Most connections of any process at rest, and of a worker at all times."""
_COUNT = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'bottega'
"""
_UNFINISHED = "SELECT count(*) FROM runs WHERE ended_at IS NULL"


@pytest.fixture(autouse=True)
def quick_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "open_database", partial(open_database, idle_s=0.5))


async def use_all(database: Database, owner: asyncpg.Pool) -> int:
    """Use every connection of the pool at the same time; return the number of the process."""
    size = database.pool.get_max_size()
    together, counted = asyncio.Barrier(size + 1), asyncio.Event()

    async def use() -> None:
        async with database.pool.acquire():
            await together.wait()
            await counted.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(size):
            group.create_task(use())
        await together.wait()
        most: int = await owner.fetchval(_COUNT)
        counted.set()
    return most


async def at_rest(owner: asyncpg.Pool) -> int:
    """Return the number of connections once it is small."""
    found: int = await until(lambda: owner.fetchval(_COUNT), lambda count: count <= AT_REST)
    return found


async def test_connections_that_are_not_needed_are_closed(
    database_url: str, owner: asyncpg.Pool
) -> None:
    async with open_database(database_url, pool_size=5, idle_s=0.2) as database:
        assert await use_all(database, owner) == 5
        await until(lambda: owner.fetchval(_COUNT), lambda count: count <= 1)
        async with database.begin(DEFAULT_TENANT) as tx:  # and opened again
            assert await tx.driver.fetchval("SELECT 1") == 1


@pytest.mark.parametrize("worker", [False, True])
async def test_a_process_at_rest_has_few_connections(
    settings: Settings, database_url: str, owner: asyncpg.Pool, model: FakeModel, *, worker: bool
) -> None:
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=worker) as server:
        await at_rest(owner)
        await use_all(server.service.database, owner)
        await at_rest(owner)


@pytest.mark.deep
async def test_a_busy_worker_has_few_connections(
    settings: Settings, database_url: str, owner: asyncpg.Pool, model: FakeModel
) -> None:
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url) as server:
        await define(server.client)
        ids = [await start(server.client) for _ in range(20)]
    most = 0
    async with open_service(configured, database_url, api=False, worker=True) as service:
        while await owner.fetchval(_UNFINISHED):
            most = max(most, await owner.fetchval(_COUNT))
        assert await owner.fetchval("SELECT count(*) FROM runs") == len(ids)
        assert await use_all(service.database, owner) <= AT_REST
        await at_rest(owner)
    assert most <= AT_REST
