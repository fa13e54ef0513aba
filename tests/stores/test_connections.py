"""Sharing of database connections between tenants."""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, time
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from bottega import container
from bottega.db.connect import connect
from bottega.db.failures import is_transient
from bottega.db.pool import open_database
from bottega.db.sessions import DatabaseSession
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import keep_connected
from bottega.files.store import FileStore, Owner
from bottega.objects import Objects
from bottega.settings import Settings
from tests.service import running
from tests.team import define


async def test_a_tenant_s_many_transactions_leave_connections_to_others(database_url: str) -> None:
    entered = asyncio.Event()

    async def another() -> None:
        async with database.begin(DEFAULT_TENANT):
            entered.set()

    async with open_database(database_url, pool_size=8) as database:
        async with AsyncExitStack() as held:
            for _ in range(2):
                await held.enter_async_context(database.begin(DEFAULT_TENANT))
            waiting = asyncio.ensure_future(another())
            async with database.begin(uuid4()), database.begin(uuid4()):
                assert not entered.is_set()
        await waiting


async def test_a_closed_database_leaves_no_task(database_url: str) -> None:
    before = asyncio.all_tasks()
    async with open_database(database_url) as database:
        await database.pool.execute("SELECT 1")
    assert asyncio.all_tasks() == before


async def test_a_listener_that_is_cancelled_while_it_closes_leaves_no_task(
    database_url: str,
) -> None:
    """Let a statement be cancelled in vain, as when the server is overloaded, and cancel then."""
    before = asyncio.all_tasks()
    blocked = asyncio.Event()

    class Session(DatabaseSession):
        async def _cancel(self, *arguments: Any) -> None:
            blocked.set()
            await asyncio.Event().wait()

    async def connected() -> DatabaseSession:
        session = await connect(database_url, role=None)
        session.__class__ = Session
        return session

    async def use(session: DatabaseSession) -> None:
        await session.execute("SELECT pg_sleep(60)", timeout=0.01)

    listening = asyncio.ensure_future(keep_connected(connected, use))
    await blocked.wait()
    listening.cancel()
    await asyncio.wait([listening])
    await asyncio.sleep(0)  # a cancelled task ends in the next turn of the loop
    assert asyncio.all_tasks() == before


async def test_a_tenant_s_erasure_in_a_worker_does_not_hold_up_its_files(
    database_url: str, tmp_path: Path
) -> None:
    async with open_database(  # a worker's sizes
        database_url, pool_size=4, transactions=1, patience_s=0.1
    ) as database:
        files = FileStore(database, Objects(tmp_path.as_uri(), database.pool))
        async with database.begin(DEFAULT_TENANT):
            assert await files.use(DEFAULT_TENANT, [uuid4()], Owner(None, None)) == {}


async def test_waiting_for_a_connection_has_a_timeout(database_url: str) -> None:
    """Check that callers get an error and no queue grows while the database hangs."""
    async with (
        open_database(database_url, pool_size=2, patience_s=0.01) as database,
        database.begin(DEFAULT_TENANT),
    ):
        with pytest.raises(TimeoutError) as refused:
            async with asyncio.timeout(30) as ours, database.begin(DEFAULT_TENANT):
                pass
    assert not ours.expired()
    assert is_transient(refused.value)


async def test_a_request_for_a_run_waits_for_a_connection_with_a_timeout(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "open_database", partial(open_database, patience_s=0.1))
    async with running(settings, database_url) as server, AsyncExitStack() as held:
        await define(server.client)
        pool = server.service.database.pool
        for _ in range(pool.get_max_size()):
            await held.enter_async_context(pool.acquire())
        run = {"agent": "coordinator", "input": "x"}
        refused = await server.client.post("/v1/runs", json=run)
        assert refused.status_code == 503


async def test_types_are_described_once_per_process_unless_they_are_a_database_s_own(
    database_url: str,
) -> None:
    async def asked(kind: str, values: list[object]) -> list[str]:
        """Return the statements with which a new connection learns about a type."""
        sent: list[str] = []
        session = await connect(database_url, role=None)
        try:
            with session.query_logger(lambda record: sent.append(record.query)):
                assert await session.fetchval(f"SELECT $1::{kind}", values) == values
                assert await session.fetchval(f"SELECT $1::{kind}", values) == values
        finally:
            await session.close()
        return [query for query in sent if not query.startswith("SELECT $1")]

    session = await connect(database_url, role=None)
    await session.execute("CREATE TYPE mood AS ENUM ('good', 'bad')")
    await session.close()
    await asked("timetz[]", [])
    assert await asked("timetz[]", [time(12, tzinfo=UTC)]) == []
    for _ in range(2):
        assert await asked("mood[]", ["good"])
