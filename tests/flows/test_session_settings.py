"""The service on a database and a login with other defaults than ours."""

from contextlib import AsyncExitStack

import asyncpg
import pytest
from pydantic import SecretStr

from bottega.db.pool import acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.settings import Settings
from bottega.tenants import operator
from tests.fake_model import FakeModel
from tests.pgbouncer import pgbouncer
from tests.service import running
from tests.team import define, start

DEFAULTS = {
    "search_path": "elsewhere",
    "default_transaction_isolation": "serializable",
    "row_security": "off",
    "TimeZone": "Asia/Kathmandu",
    "statement_timeout": "200ms",
    "lock_timeout": "200ms",
    "idle_in_transaction_session_timeout": "200ms",
    "transaction_timeout": "200ms",
    "enable_seqscan": "on",
    "max_parallel_workers_per_gather": "4",
}
OF_CLIENTS = {"idle_session_timeout": "200ms"}
"""Defaults that concern the sessions of a pooler itself, which we cannot set."""
MEANING = {
    "search_path": "public",
    "transaction_isolation": "read committed",
    "row_security": "on",
    "TimeZone": "UTC",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "transaction_timeout": "0",
    "idle_session_timeout": "0",
    "enable_seqscan": "off",
    "max_parallel_workers_per_gather": "0",
}
SHOWN = f"SELECT {', '.join(f'''current_setting('{name}')''' for name in MEANING)}"


async def change_defaults(owner: asyncpg.Pool, pooled: bool) -> None:
    """Give the database other defaults, and wait for the end of all its other connections."""
    name = await owner.fetchval("SELECT current_database()")
    for setting, value in (DEFAULTS | ({} if pooled else OF_CLIENTS)).items():
        await owner.execute(f"ALTER DATABASE \"{name}\" SET {setting} = '{value}'")
    await owner.execute(
        "SELECT pg_terminate_backend(pid, timeout => 30000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "pooled"])
async def test_a_running_service_goes_on_when_its_database_gets_other_defaults(
    settings: Settings, database_url: str, model: FakeModel, pooled: bool
) -> None:
    async with AsyncExitStack() as stack:
        changes: dict[str, object] = {"openai_base_url": model.base_url}
        if pooled:
            bouncer = await stack.enter_async_context(pgbouncer(database_url))
            changes |= {
                "database_url": SecretStr(bouncer.url),
                "listen_url": SecretStr(database_url),
            }
        changed = settings.model_copy(update=changes)
        bottega = await stack.enter_async_context(running(changed, database_url, worker=True))
        await define(bottega.client)
        await change_defaults(bottega.owner, pooled)
        frames = await bottega.watch(await start(bottega.client))
        assert frames[-1]["type"] == "run.completed"


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "pooled"])
async def test_no_session_has_the_defaults_of_its_database(
    database_url: str, owner: asyncpg.Pool, pooled: bool
) -> None:
    await change_defaults(owner, pooled)
    async with AsyncExitStack() as stack:
        pooler = None
        if pooled:
            pooler = (await stack.enter_async_context(pgbouncer(database_url))).url
        database = await stack.enter_async_context(open_database(database_url, pooler=pooler))
        ours = tuple(MEANING.values())
        assert tuple(await database.pool.fetchrow(SHOWN)) == ours
        async with acting_as(database.pool, DEFAULT_TENANT) as connection:
            assert tuple(await connection.fetchrow(SHOWN)) == ours
        async with database.begin(DEFAULT_TENANT) as tx:
            assert tuple(await tx.driver.fetchrow(SHOWN)) == ours
        listening = await database.connect()
        assert tuple(await listening.fetchrow(SHOWN)) == ours
        await listening.close()
        async with operator.transaction(database_url) as tx:
            assert tuple(await tx.driver.fetchrow(SHOWN)) == ours
