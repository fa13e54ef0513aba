"""The schema: migrated, in agreement with the tables in code, its functions as in their files."""

import asyncio
import os
import uuid
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import (
    Boolean,
    Connection,
    DateTime,
    Float,
    Integer,
    LargeBinary,
    Table,
    Text,
    Uuid,
    inspect,
)
from sqlalchemy.dialects.postgresql import JSONB

from bottega.db import migrate, tables
from bottega.db.engine import Database, open_database
from bottega.errors import UnavailableError
from tests.conftest import at
from tests.forks import fork

CATALOGUE = {
    "functions": """
        SELECT p.oid::regprocedure::text, pg_get_functiondef(p.oid), pg_get_userbyid(p.proowner),
               p.proacl::text
        FROM pg_proc p WHERE p.pronamespace = 'public'::regnamespace AND NOT EXISTS (
            SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e') ORDER BY 1""",
    "tables": """
        SELECT c.oid::regclass::text, c.relacl::text, c.relrowsecurity, c.relforcerowsecurity
        FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace
        ORDER BY 1""",
    "policies": "SELECT * FROM pg_policies ORDER BY tablename, policyname",
    "triggers": """
        SELECT tgrelid::regclass::text, pg_get_triggerdef(oid), tgenabled::text FROM pg_trigger
        WHERE NOT tgisinternal ORDER BY 1, 2""",
    "schemas": "SELECT nspname, nspacl::text FROM pg_namespace ORDER BY 1",
    "files": "SELECT * FROM sql_files ORDER BY name",
}


async def catalogue(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return the functions, privileges, policies and triggers of a database."""
    connection = await asyncpg.connect(url)
    try:
        return {
            kind: [tuple(row) for row in await connection.fetch(query)]
            for kind, query in CATALOGUE.items()
        }
    finally:
        await connection.close()


async def execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture
def empty_url(server: str) -> Iterator[str]:
    """Yield the URL of a database without tables."""
    name = f"empty_{uuid.uuid4().hex}"
    asyncio.run(execute(server, f"CREATE DATABASE {name}"))
    yield at(server, name)
    asyncio.run(execute(server, f"DROP DATABASE {name} WITH (FORCE)"))


async def migrate_at_once(url: str, processes: int) -> list[int]:
    """Run ``bottega migrate`` in several processes; return their exit codes."""
    environment = {**os.environ, "COLUMNS": "300", "DATABASE_URL": url}
    started = [await fork(["migrate"], environment) for _ in range(processes)]
    await asyncio.gather(*(process.stderr.read() for process in started))
    return [await process.wait() for process in started]


def test_two_processes_may_migrate_at_once(empty_url: str, database_url: str) -> None:
    assert asyncio.run(migrate_at_once(empty_url, 2)) == [0, 0]
    assert asyncio.run(migrate.is_current(empty_url))
    assert asyncio.run(catalogue(empty_url)) == asyncio.run(catalogue(database_url))


def test_the_schema_is_public_whatever_the_default_of_the_database(
    empty_url: str, database_url: str
) -> None:
    name = empty_url.split("?")[0].rsplit("/", 1)[1]
    path = (
        "CREATE SCHEMA elsewhere",
        f"ALTER DATABASE {name} SET search_path = elsewhere, public",
    )
    asyncio.run(execute(empty_url, *path))
    assert asyncio.run(migrate_at_once(empty_url, 1)) == [0]
    asyncio.run(execute(empty_url, "DROP SCHEMA elsewhere", f"ALTER DATABASE {name} RESET ALL"))
    assert asyncio.run(catalogue(empty_url)) == asyncio.run(catalogue(database_url))


def test_pgvector_in_another_schema_is_refused_in_a_sentence(empty_url: str) -> None:
    apart = ("CREATE SCHEMA extensions", "CREATE EXTENSION vector SCHEMA extensions")
    asyncio.run(execute(empty_url, *apart))
    with pytest.raises(Exception, match="ALTER EXTENSION vector SET SCHEMA public"):
        migrate.upgrade(empty_url)


# keys_required belongs to bottega_system, and its file has a trigger.
OLDER = """
CREATE OR REPLACE FUNCTION bottega_limit(p_name text, p_default bigint) RETURNS bigint
LANGUAGE sql STABLE AS 'SELECT 1::bigint';
CREATE OR REPLACE FUNCTION keys_required() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS 'SELECT false';
GRANT EXECUTE ON FUNCTION keys_required TO public, bottega_maintenance;
CREATE OR REPLACE TRIGGER announce_keys AFTER INSERT ON api_keys
FOR EACH STATEMENT EXECUTE FUNCTION announce_keys();
UPDATE sql_files SET hash = 'older' WHERE name IN ('tenants.sql', 'keys.sql');
"""


def test_migrating_replaces_the_functions_of_an_older_version(database_url: str) -> None:
    now = asyncio.run(catalogue(database_url))
    asyncio.run(execute(database_url, OLDER))
    assert asyncio.run(catalogue(database_url)) != now
    assert not asyncio.run(migrate.is_current(database_url))
    assert asyncio.run(migrate_at_once(database_url, 2)) == [0, 0]
    assert asyncio.run(migrate.is_current(database_url))
    assert asyncio.run(catalogue(database_url)) == now


def test_migrating_restores_grants_and_policies(database_url: str) -> None:
    now = asyncio.run(catalogue(database_url))
    changes = (
        "GRANT UPDATE, DELETE ON audit_log TO bottega_app",
        "GRANT SELECT ON first_key, episodes TO bottega_maintenance",
        "DROP POLICY of_tenant ON runs",
        "CREATE POLICY of_tenant ON runs USING (true)",
        "ALTER TABLE tasks DISABLE ROW LEVEL SECURITY",
        "UPDATE sql_files SET hash = 'older' WHERE name = 'policies.sql'",
    )
    asyncio.run(execute(database_url, *changes))
    migrate.upgrade(database_url)
    assert asyncio.run(catalogue(database_url)) == now


def test_applying_every_file_again_changes_nothing(database_url: str) -> None:
    now = asyncio.run(catalogue(database_url))
    asyncio.run(execute(database_url, "DELETE FROM sql_files"))
    migrate.upgrade(database_url)
    assert asyncio.run(catalogue(database_url)) == now


async def test_a_database_with_other_functions_is_refused(
    database: Database, owner: asyncpg.Pool
) -> None:
    await migrate.require_current(database.pool)
    for change in (
        "UPDATE sql_files SET hash = 'older' WHERE name = 'queue.sql'",
        "DELETE FROM sql_files WHERE name = 'queue.sql'",
    ):
        await owner.execute(change)
        with pytest.raises(UnavailableError, match=r"queue.sql.*: run `bottega migrate`") as error:
            await migrate.require_current(database.pool)
        assert error.value.code == "migrations_pending"


async def test_a_database_of_another_baseline_is_refused_and_left_alone(
    database_url: str, database: Database, owner: asyncpg.Pool
) -> None:
    await owner.execute("UPDATE alembic_version SET version_num = '0017'")
    now = await catalogue(database_url)
    with pytest.raises(UnavailableError, match=r"0017.* recreate the database") as refused:
        await migrate.require_current(database.pool)
    assert refused.value.code == "database_incompatible"
    with pytest.raises(UnavailableError, match=r"0017.* recreate the database"):
        await asyncio.to_thread(migrate.upgrade, database_url)
    assert await catalogue(database_url) == now


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        # To replace a function leaves its owner, and only its owner may.
        ("-- owner: migrator, execute: bottega_app\n", False),
        ("", False),
        ("-- owner: bottega_system, execute: bottega_maintenance\n", True),
    ],
)
def test_the_owner_of_a_function_belongs_to_the_revision(
    monkeypatch: pytest.MonkeyPatch, changed: str, same: bool
) -> None:
    revision = migrate.head()
    texts = dict(migrate.texts())
    line = "-- owner: bottega_system, execute: bottega_app\n"
    assert line in texts["schedules.sql"]
    texts["schedules.sql"] = texts["schedules.sql"].replace(line, changed)
    monkeypatch.setattr(migrate, "texts", lambda: texts)
    assert (migrate.head.__wrapped__() == revision) == same


async def test_every_function_has_a_valid_body(owner: asyncpg.Pool) -> None:
    rows = await owner.fetch("""
        SELECT p.oid, l.lanvalidator::regproc::text AS validator
        FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
        WHERE p.pronamespace = 'public'::regnamespace AND l.lanname IN ('sql', 'plpgsql')
    """)
    assert len(rows) == len(migrate.signatures())
    for row in rows:
        await owner.execute(f"SELECT {row['validator']}({row['oid']}::oid)")


async def test_tables_in_code_and_in_the_database_agree(database: Database) -> None:
    """Python's tables leave columns out, but name none that differs."""

    made = [table for table in vars(tables).values() if isinstance(table, Table)]

    def compare(connection: Connection) -> set[tuple[str, str, str]]:
        found = inspect(connection)
        return {
            (table.name, column["name"], kind_of(column["type"]))
            for table in made
            for column in found.get_columns(table.name)
        }

    in_code = {
        (table.name, column.name, kind_of(column.type)) for table in made for column in table.c
    }
    async with database.engine.connect() as connection:
        in_database = await connection.run_sync(compare)
    assert len(in_code) > 100
    assert in_code - in_database == set()


def kind_of(column_type: object) -> str:
    """Return a column's kind: Python does not care for the length of a number."""
    kinds = (Integer, Float, Text, Uuid, DateTime, JSONB, LargeBinary, Boolean)
    return next((kind.__name__ for kind in kinds if isinstance(column_type, kind)), "other")


def test_the_newest_migration_is_the_one_in_the_code() -> None:
    script = ScriptDirectory.from_config(migrate.alembic_config("postgresql://"))
    assert script.get_current_head() == migrate.head()


async def test_the_tenant_leads_every_key(database: Database) -> None:
    rows = await database.pool.fetch("""
        SELECT c.conrelid::regclass::text AS table, c.contype::text AS kind, a.attname AS first
        FROM pg_constraint c
        JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
        WHERE c.contype IN ('p', 'f') AND c.connamespace = 'public'::regnamespace
          AND c.conrelid::regclass::text NOT IN (
            'tenants', 'first_key', 'workers', 'run_queue', 'alembic_version', 'sql_files',
            'deleted_objects', 'index_maintenance', 'last_sweep', 'last_sum')
    """)
    assert len(rows) >= 18
    assert {row["first"] for row in rows} == {"tenant_id"}


async def test_an_unmigrated_database_is_refused_with_what_to_do(server: str) -> None:
    async with open_database(server) as database:
        with pytest.raises(UnavailableError, match="bottega migrate"):
            await migrate.require_current(database.pool)
