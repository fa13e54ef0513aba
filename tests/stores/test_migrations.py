"""The schema: migrated, in agreement with the tables in code, its functions as in their files."""

import asyncio
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import BigInteger, Boolean, DateTime, Float, LargeBinary, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.types import TypeEngine

from bottega.db import migrate, tables
from bottega.db.pool import Database, open_database
from bottega.errors import UnavailableError
from bottega.tenants import operator
from tests import forks
from tests.conftest import at
from tests.forks import fork
from tests.postgres import BIN, servers
from tests.upgrade import baseline

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
    "columns": """
        SELECT a.attrelid::regclass::text, a.attname::text, a.attacl::text,
               format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attgenerated::text,
               pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'public'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
        ORDER BY 1, 2""",
    "constraints": """
        SELECT conrelid::regclass::text, conname::text, pg_get_constraintdef(oid)
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2""",
    "indexes": "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1",
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


@pytest.mark.deep
@pytest.mark.parametrize("options", [(), ("--no-owner", "--no-privileges")], ids=["", "bare"])
def test_a_dump_without_roles_works_on_a_fresh_server_after_migrating(
    database_url: str, folder: Path, options: tuple[str, ...]
) -> None:
    now = asyncio.run(catalogue(database_url))
    programs = {name: str(BIN / name) for name in ("pg_dump", "psql")}
    dump = subprocess.run(
        [programs["pg_dump"], *options, database_url], capture_output=True, check=True
    )
    with servers(folder) as fresh:
        fresh.create()
        fresh.start()
        quiet = ["--quiet", "--output", "/dev/null", fresh.url]
        subprocess.run([programs["psql"], *quiet], input=dump.stdout, check=True)
        assert not asyncio.run(migrate.is_current(fresh.url))
        migrate.upgrade(fresh.url)
        assert asyncio.run(migrate.is_current(fresh.url))
        restored = asyncio.run(catalogue(fresh.url))
        assert asyncio.run(operator.keys_required(fresh.url)) is False
    assert {kind: sorted_grants(rows) for kind, rows in restored.items()} == {
        kind: sorted_grants(rows) for kind, rows in now.items()
    }


def sorted_grants(rows: list[tuple[Any, ...]]) -> list[str]:
    """Return rows with the members of each access list in alphabetical order."""
    return [
        str(
            [
                sorted(str(value).strip("{}").split(",")) if "=" in str(value) else value
                for value in row
            ]
        )
        for row in rows
    ]


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


@pytest.mark.parametrize(
    ("change", "subject", "advice"),
    [
        ({"number": 150018, "version": "15.18"}, "database", "16 or newer"),
        ({"encoding": "SQL_ASCII"}, "encoding", "ENCODING 'UTF8'"),
        ({"may_create": False}, "rights", "WITH GRANT OPTION"),
        ({"vector": "0.7.4"}, "extension", "ALTER EXTENSION vector UPDATE"),
        ({"vector_schema": "extensions"}, "extension", "SET SCHEMA public"),
        ({"vector": "0.10.0"}, None, ""),
        ({"vector": None, "vector_schema": None}, None, ""),
    ],
)
async def test_an_unsuitable_server_is_told_with_what_to_do(
    owner: asyncpg.Pool, change: dict[str, Any], subject: str | None, advice: str
) -> None:
    server = dict(await owner.fetchrow(migrate.SERVER))
    assert migrate.server_problems(server) == {}
    problems = migrate.server_problems(server | change)
    assert list(problems) == ([] if subject is None else [subject])
    assert all(advice in hint for _, hint in problems.values())


# find_tenant belongs to bottega_system, and its file has a trigger.
OLDER = """
CREATE OR REPLACE FUNCTION bottega_limit(p_name text, p_default bigint) RETURNS bigint
LANGUAGE sql STABLE AS 'SELECT 1::bigint';
CREATE OR REPLACE FUNCTION find_tenant(p_name text) RETURNS uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS 'SELECT NULL::uuid';
GRANT EXECUTE ON FUNCTION find_tenant TO public, bottega_maintenance;
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


# Each leaves the hashes of the files as they were.
DAMAGES = {
    "function": "DROP FUNCTION bottega_limit(text, bigint)",
    "closed function": "GRANT EXECUTE ON FUNCTION find_tenant TO bottega_maintenance",
    "body": """CREATE OR REPLACE FUNCTION bottega_limit(p_name text, p_default bigint)
        RETURNS bigint LANGUAGE sql STABLE AS 'SELECT 1::bigint'""",
    "trigger": "DROP TRIGGER announce_keys ON api_keys",
    "disabled trigger": "ALTER TABLE api_keys DISABLE TRIGGER announce_keys",
    "policy": "DROP POLICY of_all ON runs",
    "changed policy": "ALTER POLICY of_tenant ON runs USING (true)",
    "row security": "ALTER TABLE tasks NO FORCE ROW LEVEL SECURITY",
    "grant": "REVOKE SELECT ON runs FROM bottega_app",
    "column's grant": "REVOKE SELECT (id, leased_until) ON workers FROM bottega_app",
    "excess grant": "GRANT DELETE ON audit_log TO bottega_app",
    "owners": "REASSIGN OWNED BY bottega_system TO postgres",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_migrating_repairs_what_is_there_whatever_it_noted(database_url: str, damage: str) -> None:
    now = asyncio.run(catalogue(database_url))
    asyncio.run(execute(database_url, DAMAGES[damage]))
    assert asyncio.run(catalogue(database_url)) != now
    assert not asyncio.run(migrate.is_current(database_url))
    migrate.upgrade(database_url)
    assert asyncio.run(migrate.is_current(database_url))
    assert asyncio.run(catalogue(database_url)) == now


def test_a_lost_extension_comes_back_with_its_table(database_url: str) -> None:
    now = asyncio.run(catalogue(database_url))
    lose = (
        "INSERT INTO tenant_memory (tenant_id, embedder) SELECT id, 'some' FROM tenants",
        "DROP EXTENSION vector CASCADE",
    )
    asyncio.run(execute(database_url, *lose))
    migrate.upgrade(database_url)
    assert asyncio.run(catalogue(database_url)) == now
    embed = "DO $$ BEGIN ASSERT 'lost' = ALL (SELECT embedder FROM tenant_memory); END $$"
    asyncio.run(execute(database_url, embed))


def test_an_operator_s_own_grants_stay_and_need_no_repair(database_url: str) -> None:
    role = f"watcher_{uuid.uuid4().hex}"
    asyncio.run(execute(database_url, f"CREATE ROLE {role}", f"GRANT SELECT ON runs TO {role}"))
    try:
        assert asyncio.run(migrate.is_current(database_url))
        asyncio.run(execute(database_url, "DELETE FROM sql_files"))
        migrate.upgrade(database_url)
        allowed = f"DO $$ BEGIN ASSERT has_table_privilege('{role}', 'runs', 'SELECT'); END $$"
        asyncio.run(execute(database_url, allowed))
    finally:
        asyncio.run(execute(database_url, f"DROP OWNED BY {role}", f"DROP ROLE {role}"))


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


@pytest.mark.parametrize("revision", ["0017", "0001_ffffffffffff", "ffffffffffff"])
async def test_a_database_of_another_baseline_is_refused_and_left_alone(
    database_url: str, database: Database, owner: asyncpg.Pool, revision: str
) -> None:
    await owner.execute("UPDATE alembic_version SET version_num = $1", revision)
    await owner.execute("DELETE FROM sql_files WHERE name = 'serves'")
    now = await catalogue(database_url)
    said = "newer version" if revision == "0017" else "recreate the database"
    for refused in (
        migrate.require_current(database.pool),
        migrate.check(database_url),
        asyncio.to_thread(migrate.upgrade, database_url),
    ):
        with pytest.raises(UnavailableError, match=rf"{revision}.* {said}") as error:
            await refused
        assert error.value.code == "database_incompatible"
    assert await catalogue(database_url) == now


NEWER = (
    "UPDATE alembic_version SET version_num = '0002_next'",
    "UPDATE sql_files SET hash = 'newer' WHERE name IN ('queue.sql', 'catalogue')",
    "ALTER TABLE runs ADD COLUMN what_comes_next text NOT NULL DEFAULT 'something'",
)


async def test_a_newer_database_that_serves_this_version_is_used_and_left_alone(
    database_url: str, database: Database
) -> None:
    await execute(database_url, *NEWER)
    now = await catalogue(database_url)
    await migrate.require_current(database.pool)
    await migrate.check(database_url)
    await asyncio.to_thread(migrate.upgrade, database_url)
    assert await catalogue(database_url) == now


async def test_a_newer_database_that_serves_this_version_no_longer_is_refused(
    database_url: str, database: Database
) -> None:
    await execute(database_url, *NEWER, "UPDATE sql_files SET hash = '0002' WHERE name = 'serves'")
    with pytest.raises(UnavailableError, match=r"0002_next.* start the newer version"):
        await migrate.require_current(database.pool)
    with pytest.raises(UnavailableError, match=r"0002_next.* start the newer version"):
        await asyncio.to_thread(migrate.upgrade, database_url)


async def test_an_older_database_is_to_be_migrated(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "revisions", lambda: (*BASELINE, "0002_next"))
    with pytest.raises(UnavailableError, match="run `bottega migrate`") as error:
        await migrate.require_current(database.pool)
    assert error.value.code == "migrations_pending"


BASELINE = migrate.revisions()[:1]


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
    revision = baseline.revision()
    texts = dict(migrate.texts())
    line = "-- owner: bottega_system, execute: bottega_app\n"
    assert line in texts["schedules.sql"]
    texts["schedules.sql"] = texts["schedules.sql"].replace(line, changed)
    monkeypatch.setattr(migrate, "texts", lambda: texts)
    assert (baseline.revision() == revision) == same


async def test_every_function_has_a_valid_body(owner: asyncpg.Pool) -> None:
    rows = await owner.fetch("""
        SELECT p.oid, l.lanvalidator::regproc::text AS validator
        FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
        WHERE p.pronamespace = 'public'::regnamespace AND l.lanname IN ('sql', 'plpgsql')
    """)
    assert len(rows) == len(baseline.signatures())
    for row in rows:
        await owner.execute(f"SELECT {row['validator']}({row['oid']}::oid)")


async def test_tables_in_code_and_in_the_database_agree(database: Database) -> None:
    """Python's tables leave columns out, but name none that differs."""

    made = [table for table in vars(tables).values() if isinstance(table, Table)]
    rows = await database.pool.fetch("""
        SELECT table_name, column_name, udt_name FROM information_schema.columns
        WHERE table_schema = 'public'
    """)
    in_database = {(row[0], row[1], re.sub("^int[24]$", "int8", row[2])) for row in rows}
    in_code = {
        (table.name, column.name, kind_of(column.type)) for table in made for column in table.c
    }
    assert len(in_code) > 100
    assert in_code - in_database == set()


def kind_of(column_type: TypeEngine[Any]) -> str:
    """Return the server's name of a type. Python does not care for the length of a number."""
    kinds = {
        Uuid: "uuid",
        Text: "text",
        JSONB: "jsonb",
        BigInteger: "int8",
        Float: "float8",
        DateTime: "timestamptz",
        LargeBinary: "bytea",
        Boolean: "bool",
    }
    if isinstance(column_type, ARRAY):
        return f"_{kind_of(column_type.item_type)}"
    return kinds[type(column_type)]


def test_the_newest_migration_is_the_one_in_the_code() -> None:
    script = ScriptDirectory.from_config(migrate.alembic_config("postgresql://"))
    assert script.get_current_head() == migrate.head()
    assert len(list(script.walk_revisions())) == len(migrate.revisions())


def test_migrations_are_numbered_without_gaps_and_name_their_revision() -> None:
    files = sorted((migrate.migrations_folder() / "versions").glob("*.py"))
    numbers = [re.fullmatch(r"(\d{4})_\w+\.py", path.name) for path in files]
    assert [match and int(match[1]) for match in numbers] == list(range(1, len(files) + 1))
    for path, revision in zip(files, migrate.revisions(), strict=True):
        assert f'\nrevision = "{revision}"\n' in path.read_text(encoding="utf-8")
        assert re.match(r"\d{4}(_|$)", revision)
        assert revision[:4] == path.name[:4]


def test_the_baseline_is_frozen() -> None:
    assert baseline.tables_hash() == "0afb92056a1e", (
        "the baseline has changed: write a migration instead"
    )


def test_functions_change_their_signature_or_owner_only_with_a_migration() -> None:
    """Look only while there is no other migration, which may change them."""
    if len(migrate.revisions()) == 1:
        assert baseline.revision() == migrate.head(), (
            "a signature or an owner of a function has changed: write a migration that drops the "
            "old function"
        )


@pytest.mark.deep
def test_the_printed_statements_make_a_database_that_needs_no_migration(
    empty_url: str, database_url: str, tmp_path: Path
) -> None:
    printed = forks.run(
        ["migrate", "--sql"], {**os.environ, "DATABASE_URL": "postgresql://no.where"}
    )
    assert (printed.returncode, printed.stderr) == (0, "")
    script = tmp_path / "all.sql"
    script.write_text(printed.stdout, encoding="utf-8")
    options = ["--no-psqlrc", "--quiet", "-v", "ON_ERROR_STOP=1", "-f", str(script)]
    done = subprocess.run(
        [str(BIN / "psql"), *options, empty_url], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert checked(empty_url) == (0, "The database is up to date.")
    assert asyncio.run(catalogue(empty_url)) == asyncio.run(catalogue(database_url))


def checked(url: str) -> tuple[int, str]:
    """Return the exit status and the sentence of ``bottega migrate --check``."""
    done = forks.run(["migrate", "--check"], {**os.environ, "COLUMNS": "500", "DATABASE_URL": url})
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize("damage", ["policy", "grant", "function", "trigger"])
def test_a_check_says_what_is_to_do_and_changes_nothing(database_url: str, damage: str) -> None:
    asyncio.run(execute(database_url, DAMAGES[damage]))
    now = asyncio.run(catalogue(database_url))
    status, said = checked(database_url)
    assert (status, len(said.splitlines())) == (1, 1)
    assert "bottega migrate" in said
    assert asyncio.run(catalogue(database_url)) == now


def test_a_check_of_an_empty_database_leaves_it_empty(empty_url: str) -> None:
    status, said = checked(empty_url)
    assert (status, "run `bottega migrate`" in said) == (1, True), said
    tables = "DO $$ BEGIN ASSERT NOT EXISTS (SELECT FROM pg_class WHERE relname = 'runs'); END $$"
    asyncio.run(execute(empty_url, tables))


def test_a_check_makes_no_embedded_database(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    data = tmp_path / "data"
    done = forks.run(["migrate", "--check"], {**environment, "BOTTEGA_DATA_DIR": str(data)})
    assert (done.returncode, "run `bottega migrate`" in " ".join(done.stderr.split())) == (1, True)
    assert not data.exists()


async def test_the_tenant_leads_every_key(database: Database) -> None:
    rows = await database.pool.fetch("""
        SELECT c.conrelid::regclass::text AS table, c.contype::text AS kind, a.attname AS first
        FROM pg_constraint c
        JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
        WHERE c.contype IN ('p', 'f') AND c.connamespace = 'public'::regnamespace
          AND c.conrelid::regclass::text NOT IN (
            'tenants', 'first_key', 'signing_keys', 'workers', 'run_queue', 'alembic_version',
            'sql_files', 'deleted_objects', 'index_maintenance', 'last_sweep', 'last_sum')
    """)
    assert len(rows) >= 18
    assert {row["first"] for row in rows} == {"tenant_id"}


async def test_an_unmigrated_database_is_refused_with_what_to_do(server: str) -> None:
    async with open_database(server) as database:
        with pytest.raises(UnavailableError, match="bottega migrate"):
            await migrate.require_current(database.pool)
