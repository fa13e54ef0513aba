"""Starts that must be refused."""

import asyncio
import os

import pytest

from bottega.db.connect import APP_ROLE
from bottega.db.pool import acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.tenants import operator
from tests import forks
from tests.pooler import ignoring


async def refused(*arguments: str, **environment: str) -> str:
    """Return the error of a ``bottega …`` command that must end with status 1."""
    whole = {**os.environ, "COLUMNS": "1000", **environment}
    ended = await asyncio.to_thread(forks.run, arguments, whole)
    assert ended.returncode == 1, ended.stderr
    return ended.stderr


@pytest.mark.parametrize("arguments", [("serve", "--port", "0"), ("worker",)], ids=lambda a: a[0])
async def test_a_pooler_that_ignores_start_up_parameters_is_refused(
    database_url: str, arguments: tuple[str, ...]
) -> None:
    """Check it because the service would run as a login that no policy may bind."""
    login_only = ("user", "database").__contains__
    async with ignoring(database_url, lambda name: not login_only(name)) as url:
        error = await refused(*arguments, DATABASE_URL=url)
    assert "its role is postgres instead of bottega_app" in error


async def test_a_pooler_that_ignores_the_limits_of_tenants_is_refused(database_url: str) -> None:
    async with ignoring(database_url, lambda name: name.startswith("bottega.")) as url:
        error = await refused("worker", DATABASE_URL=url)
    assert "bottega.concurrent_runs" in error


async def test_the_operator_s_commands_are_refused_behind_such_a_pooler(database_url: str) -> None:
    async with ignoring(database_url, "role".__eq__) as url:
        with pytest.raises(Exception, match="instead of bottega_system"):
            await operator.list_keys(url)


async def test_a_later_session_without_its_start_up_parameters_is_not_used(
    database_url: str,
) -> None:
    """Check it because the pools open sessions at any time, and a pooler may be new."""
    ignored = False
    async with (
        ignoring(database_url, lambda name: ignored and name == "role") as url,
        open_database(url, pool_size=2) as database,
        database.pool.acquire(),
    ):
        ignored = True
        with pytest.raises(Exception, match="instead of bottega_app"):
            await database.pool.fetchval("SELECT 1")
        with pytest.raises(Exception, match="instead of bottega_app"):
            async with database.begin(DEFAULT_TENANT):
                pass


async def test_a_tenant_s_transaction_acts_as_the_application_in_any_session(
    database_url: str,
) -> None:
    """Check it for a session of a pooler's login, which returns to its login afterwards."""
    role = "SELECT current_user"
    login = "SET SESSION AUTHORIZATION DEFAULT; SET ROLE NONE"
    async with open_database(database_url, pool_size=1) as database:
        async with database.pool.acquire() as session:
            await session.execute(login)
        async with acting_as(database.pool, DEFAULT_TENANT) as connection:
            assert await connection.fetchval(role) == APP_ROLE
        assert await database.pool.fetchval(role) == "postgres"

        async with database.pool.acquire() as session:
            await session.execute(login)
        async with database.begin(DEFAULT_TENANT) as tx:
            assert await tx.driver.fetchval(role) == APP_ROLE
        assert await database.pool.fetchval(role) == "postgres"
