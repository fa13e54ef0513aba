"""The schema: migrated up and down, in agreement with the tables in code."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment
from pgqueuer.adapters.persistence.queries import Queries

from bottega.db import migrate
from bottega.db.base import metadata
from bottega.db.engine import Database, open_database
from bottega.errors import UnavailableError
from bottega.runs.queue import ENGINE


async def objects(url: str) -> dict[str, list[str]]:
    """Everything of ours in the database, by kind."""
    connection = await asyncpg.connect(url)
    found = {}
    ours = "n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')"
    for kind, column, table, schema in (
        ("tables", "relname", "pg_class", "relnamespace"),
        ("functions", "proname", "pg_proc", "pronamespace"),
        ("types", "typname", "pg_type", "typnamespace"),
    ):
        rows = await connection.fetch(
            f"SELECT o.{column} AS name FROM pg_catalog.{table} o "
            f"JOIN pg_catalog.pg_namespace n ON n.oid = o.{schema} WHERE {ours} ORDER BY 1"
        )
        found[kind] = [row["name"] for row in rows]
    await connection.close()
    return found


def test_down_leaves_nothing_and_up_again_gives_the_same(database_url: str) -> None:
    migrated = asyncio.run(objects(database_url))
    migrate.downgrade(database_url)
    left = asyncio.run(objects(database_url))
    assert {name for names in left.values() for name in names} <= {
        "alembic_version",
        "alembic_version_pkc",
        "_alembic_version",
    }
    migrate.upgrade(database_url)
    assert asyncio.run(objects(database_url)) == migrated


def test_two_processes_may_migrate_at_once(server: str, database_url: str) -> None:
    migrate.downgrade(database_url)
    environment = {**os.environ, "DATABASE_URL": database_url}
    processes = [
        subprocess.Popen([sys.executable, "-m", "bottega.cli", "migrate"], env=environment)
        for _ in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert asyncio.run(migrate.is_current(database_url))


async def test_tables_in_code_and_in_the_database_agree(database: Database) -> None:
    def compare(connection: Any) -> list[Any]:
        context = MigrationContext.configure(
            connection,
            opts={"include_object": migrate.include_object, "compare_server_default": True},
        )
        return list(compare_metadata(context, metadata))

    async with database.engine.connect() as connection:
        assert await connection.run_sync(compare) == []


async def test_the_queue_is_installed_as_its_library_wants_it(database: Database) -> None:
    async with database.pool.acquire() as connection:
        queries = Queries(AsyncpgDriver(connection), QueryBuilderEnvironment(ENGINE))
        plan = await queries.plan_upgrade()
    assert list(plan.statements) == []


def test_the_newest_migration_is_the_one_the_code_asks_for() -> None:
    script = ScriptDirectory.from_config(migrate.alembic_config("postgresql://"))
    assert script.get_current_head() == migrate.HEAD


async def test_the_tenant_leads_every_key(database: Database) -> None:
    rows = await database.pool.fetch("""
        SELECT c.conrelid::regclass::text AS table, c.contype::text AS kind, a.attname AS first
        FROM pg_constraint c
        JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
        WHERE c.contype IN ('p', 'f') AND c.connamespace = 'public'::regnamespace
          AND c.conrelid::regclass::text NOT IN (
            'tenants', 'first_key', 'workers', 'alembic_version', 'object_trash',
            'index_care')
    """)
    assert len(rows) >= 18
    assert {row["first"] for row in rows} == {"tenant_id"}


async def test_an_unmigrated_database_is_refused_with_what_to_do(server: str) -> None:
    async with open_database(server) as database:
        with pytest.raises(UnavailableError, match="bottega migrate"):
            await migrate.require_current(database.pool)
