"""Migration of the database: Alembic for tables, SQL files for functions and policies.

Each file of ``sql/`` (roles, grants, policies, functions, triggers) can be applied again. After
applying the files, ``migrate`` stores a hash of each file, and a hash of the resulting objects in
the database. If one of the hashes differs at the next call, ``migrate`` applies all files again. A
process that starts compares only the files' hashes.

The database stores the oldest version of Bottega that can use the schema (:data:`_SERVES`). This
version and later versions can start, even after a newer version has migrated the database. So old
and new versions can run at the same time, and the code can be downgraded, but not the schema.

A line ``-- owner: ROLE, execute: ROLE, ROLE`` above a function sets the function's owner and the
only roles that may call the function. The owner ``migrator`` is the login that migrates. A function
without such a line belongs to the login that migrates, and every role may call it.

The ``--`` comment above a table, column, view or function becomes the comment of this object in the
database, too.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
from sqlalchemy.exc import DBAPIError

import bottega
from bottega.clock import Clock, utcnow
from bottega.db.connect import connect
from bottega.errors import DatabaseAwayError, UnavailableError
from bottega.logger import Logger

_FOLDER = Path(__file__).with_name("sql")
_CLOSED_FUNCTION = re.compile(
    r"^-- owner: (?P<owner>\w+), execute: (?P<users>\w+(?:, \w+)*)\n"
    r"(?P<create>CREATE OR REPLACE FUNCTION (?P<name>\w+).*?\$\$;)$",
    re.MULTILINE | re.DOTALL,
)
_COMMENTED = re.compile(
    r"^(?P<comment>(?:-- [^\n]*\n)+)"
    r"CREATE (?:OR REPLACE )?(?:UNLOGGED )?(?P<kind>TABLE|VIEW|FUNCTION) (?P<name>\w+)",
    re.MULTILINE,
)
_TABLE = re.compile(
    r"^CREATE (?:UNLOGGED )?TABLE (?P<name>\w+) \(\n(?P<columns>.*?)^\)", re.MULTILINE | re.DOTALL
)
_COLUMN = re.compile(
    r'^(?P<comment>(?:    -- [^\n]*\n)+)    (?P<name>(?!CONSTRAINT)\w+|"\w+") ', re.MULTILINE
)
_RIGHTS = re.compile(r"^-- (?:owner: (?P<owner>\w+), )?execute: .*\n", re.MULTILINE)


@cache
def texts() -> Mapping[str, str]:
    """Return the SQL files by name, in the order of application. The roles come first."""
    paths = sorted(_FOLDER.glob("*.sql"), key=lambda path: (path.stem != "policies", path.stem))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@cache
def hashes() -> Mapping[str, str]:
    """Return the hash of each SQL file, by the file's name."""
    return {name: sha256(text.encode()).hexdigest() for name, text in texts().items()}


def roles_script() -> str:
    """Return the SQL that creates the roles. An administrator must execute this SQL."""
    statement, end, _ = texts()["policies.sql"].partition("END $$;")
    return statement + end


def script() -> str:
    first, *others = texts().values()
    # Do not check functions' bodies now, because they call functions that do not exist yet.
    return "\n".join(
        [
            "SET LOCAL check_function_bodies = off;",
            _with_owners(first),
            _restored_owners(),
            *map(_with_owners, others),
            *map(_comments, (_baseline(), *texts().values())),
        ]
    )


def _restored_owners() -> str:
    """Return SQL that restores the owners of functions.

    If a dump was restored without the roles, the functions belong to the login that restored the
    dump.
    """
    closed = [match for text in texts().values() for match in _CLOSED_FUNCTION.finditer(text)]
    owners = ", ".join(
        f"('{match['name']}', '{match['owner']}')"
        for match in closed
        if match["owner"] != "migrator"
    )
    return _RESTORE_OWNERS.replace("OWNERS", owners)


_RESTORE_OWNERS = """
GRANT CREATE ON SCHEMA public TO bottega_system;
DO $$
DECLARE
    v_name text;
    v_owner text;
BEGIN
    FOR v_name, v_owner IN
        SELECT p.oid::regprocedure, o.owner FROM (VALUES OWNERS) AS o(name, owner)
        JOIN pg_proc p ON p.proname = o.name AND p.pronamespace = 'public'::regnamespace
        WHERE p.proowner <> o.owner::regrole
    LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', v_name, v_owner);
    END LOOP;
END $$;
REVOKE CREATE ON SCHEMA public FROM bottega_system;
"""


def _with_owners(text: str) -> str:
    """Replace the lines ``-- owner: ..., execute: ...`` with SQL."""
    closed = [_close(match) for match in _CLOSED_FUNCTION.finditer(text)]
    if not closed:
        return text
    return "\n".join(
        [
            # Only a role with this privilege can own a function in the schema.
            "GRANT CREATE ON SCHEMA public TO bottega_system;",
            _CLOSED_FUNCTION.sub(_create, text),
            *closed,
            "REVOKE CREATE ON SCHEMA public FROM bottega_system;",
        ]
    )


def _create(match: re.Match[str]) -> str:
    """Return the SQL that creates a function as its owner, because only the owner may replace it.

    Every role may call the function until the last statements of the file restrict the roles,
    because a table's owner can create a trigger only with a function that the owner may call.
    """
    grant = f"GRANT EXECUTE ON FUNCTION {match['name']} TO public;"
    return _as_owner(match["owner"], f"{match['create']}\n{grant}")


def _close(match: re.Match[str]) -> str:
    name, users = match["name"], match["users"]
    all_roles = "public, bottega_app, bottega_maintenance"
    return _as_owner(
        match["owner"],
        f"REVOKE ALL ON FUNCTION {name} FROM {all_roles};\n"
        f"GRANT EXECUTE ON FUNCTION {name} TO {users};",
    )


def _comments(text: str) -> str:
    found = []
    for match in _COMMENTED.finditer(text):
        rights = _RIGHTS.search(match["comment"])
        sql = _comment(f"{match['kind']} {match['name']}", _RIGHTS.sub("", match["comment"]))
        found.append(_as_owner((rights and rights["owner"]) or "migrator", sql))
    for table in _TABLE.finditer(text):
        found += [
            _comment(f"COLUMN {table['name']}.{column['name']}", column["comment"])
            for column in _COLUMN.finditer(table["columns"])
        ]
    return "\n".join(found)


def _comment(subject: str, lines: str) -> str:
    words = " ".join(line.strip().removeprefix("-- ") for line in lines.splitlines())
    quoted = words.replace("'", "''")
    return f"COMMENT ON {subject} IS '{quoted}';"


def _as_owner(owner: str, sql: str) -> str:
    return sql if owner == "migrator" else f"SET LOCAL ROLE {owner};\n{sql}\nRESET ROLE;"


if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

LOCK_KEY = 4_871_019_201
"""Number of the advisory lock of migrations."""

_OLDEST_SERVER = 160_000
_WITH_UUIDV7 = 180_000
_UUIDV7 = """
-- Time in milliseconds, 12 bits of its fraction, and random bits (RFC 9562, 6.2, method 3).
CREATE OR REPLACE FUNCTION public.uuidv7() RETURNS uuid LANGUAGE sql PARALLEL SAFE AS $$
    SELECT encode(overlay(uuid_send(gen_random_uuid())
        PLACING substring(int8send(floor(now.ms)::bigint) FROM 3)
            || int2send((28672 + floor((now.ms - floor(now.ms)) * 4096))::smallint)
        FROM 1 FOR 8), 'hex')::uuid
    FROM (SELECT extract(epoch FROM clock_timestamp()) * 1000 AS ms) AS now
$$;
"""
"""Creates the function ``uuidv7``, which PostgreSQL has from version 18 on."""
SERVER = """
SELECT current_setting('server_version_num')::integer AS number,
       current_setting('server_version') AS version,
       current_setting('server_encoding') AS encoding,
       current_user::text AS login, current_database()::text AS database,
       EXISTS (SELECT FROM pg_namespace n WHERE n.nspname = 'public'
           AND has_schema_privilege(n.oid, 'CREATE WITH GRANT OPTION')) AS may_create,
       e.extversion AS vector, e.extnamespace::regnamespace::text AS vector_schema
FROM (VALUES (1)) AS one LEFT JOIN pg_extension e ON e.extname = 'vector'
"""
"""Query for the facts about a server that :func:`server_problems` checks."""
_CATALOGUE = "catalogue"
"""Name of the stored hash of the database's objects, beside the names of files."""
_FINGERPRINT = """
WITH ours AS (
    SELECT oid, rolname::text AS name FROM pg_roles
    WHERE rolname IN ('bottega_app', 'bottega_user', 'bottega_system', 'bottega_maintenance')
    UNION ALL SELECT 0, 'PUBLIC'
), functions AS (
    SELECT * FROM pg_proc p
    WHERE pronamespace = 'public'::regnamespace AND prokind = 'f'
      AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e')
), tables AS (
    SELECT * FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
), acls AS (
    SELECT proname || pg_get_function_identity_arguments(oid) AS object,
           coalesce(proacl, acldefault('f', proowner)) AS acl FROM functions
    UNION ALL SELECT relname, relacl FROM tables
    UNION ALL SELECT t.relname || '.' || a.attname, a.attacl
        FROM tables t JOIN pg_attribute a ON a.attrelid = t.oid WHERE a.attacl IS NOT NULL
    UNION ALL SELECT nspname, nspacl FROM pg_namespace WHERE nspname = 'public'
), lines AS (
    SELECT concat_ws(' ', pg_get_userbyid(proowner), pg_get_functiondef(oid)) AS line FROM functions
    UNION ALL SELECT concat_ws(' ', object, ours.name, privilege_type)
        FROM acls CROSS JOIN aclexplode(acl) AS given JOIN ours ON ours.oid = given.grantee
    UNION ALL SELECT concat_ws(' ', relname, relrowsecurity, relforcerowsecurity) FROM tables
    UNION ALL SELECT concat_ws(' ', tablename, policyname, permissive, roles, cmd, qual, with_check)
        FROM pg_policies WHERE schemaname = 'public'
    UNION ALL SELECT concat_ws(' ', pg_get_triggerdef(g.oid), g.tgenabled)
        FROM pg_trigger g JOIN tables t ON t.oid = g.tgrelid WHERE NOT g.tgisinternal
    UNION ALL SELECT name FROM ours JOIN tables ON relname = 'runs'
        WHERE ours.oid <> 0 AND pg_has_role(relowner, ours.oid, 'SET')
    UNION ALL SELECT DISTINCT concat_ws(' ', of.name, ours.name)
        FROM ours JOIN pg_auth_members m ON m.member = ours.oid JOIN ours AS of ON of.oid = m.roleid
    UNION ALL SELECT extname FROM pg_extension
)
SELECT md5(string_agg(line, E'\n' ORDER BY line COLLATE "C")) FROM lines
"""
"""Query for a hash of roles, grants, policies, functions, triggers and extensions.

Only grants to our roles are included, because an operator may have added grants to other roles.
"""
_VECTORS = """
SELECT attname FROM pg_attribute
WHERE attrelid = to_regclass('public.episode_vectors') AND attname = 'task' AND NOT attisdropped
"""
_EMBED_AGAIN = "UPDATE tenant_memory SET embedder = 'lost' WHERE embedder IS NOT NULL;"
"""Stores a wrong embedder, so that all vectors are made again."""
_STORED = "SELECT name, hash FROM sql_files"
_STORED_WITH_REVISION = """
SELECT name, hash, (SELECT version_num FROM alembic_version) AS revision FROM sql_files
"""
_NOTE = """
DELETE FROM sql_files;
INSERT INTO sql_files VALUES {rows};
INSERT INTO sql_files SELECT '{name}', ({fingerprint});
"""
_SERVES = "serves"
"""Name of a stored number: the oldest migration whose code can use the schema."""
_OLDEST_SERVED = "0001"
"""Stored number ``_SERVES``. A migration that removes an object of older code raises it."""
_REVISION = re.compile(r'^revision = "(\w+)"$', re.MULTILINE)
_NUMBER = re.compile(r"(\d{4})(?:_|$)")
"""The number at the beginning of a revision. Before 0.1.0, some revisions had no number."""
_REPAIR = (
    "roles, grants, policies, functions or triggers are not as the last migration left them: "
    "run `bottega migrate`, which repairs them"
)


def migrations_folder() -> Path:
    """Return the folder of the migrations, in this checkout or in the installed package."""
    package = Path(bottega.__file__).parent
    installed = package / "_migrations"  # the wheel's folder of migrations
    return installed if installed.exists() else package.parents[1] / "migrations"


@cache
def revisions() -> tuple[str, ...]:
    paths = sorted((migrations_folder() / "versions").glob("[0-9]*.py"))
    return tuple(_REVISION.findall("\n".join(path.read_text(encoding="utf-8") for path in paths)))


def head() -> str:
    """Return the newest revision, which this version of Bottega needs."""
    return revisions()[-1]


def _baseline() -> str:
    path = migrations_folder() / "versions" / "0001_baseline.sql"
    return path.read_text(encoding="utf-8")


def alembic_config(url: str) -> "Config":
    """Return Alembic's configuration for this checkout or installed package."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.set_main_option("bottega.url", url.replace("%", "%%"))
    return config


def upgrade(url: str) -> None:
    """Create missing tables, and create or repair functions, policies, roles and grants.

    If the database is up to date, the login needs only the rights of the service.

    This function blocks, so it must not run in an event loop.

    Raises:
        UnavailableError: ``database_incompatible`` or ``database_unsuitable``.
    """
    from alembic import command

    if asyncio.run(is_current(url)):
        return
    try:
        command.upgrade(alembic_config(url), "head")
    except DBAPIError as error:
        raise _driver_error(error) from error


def _driver_error(error: DBAPIError) -> BaseException:
    """Return asyncpg's error inside an error of Alembic's connection."""
    return (error.orig and error.orig.__cause__) or error


def whole_script() -> str:
    """Return the statements with which ``psql`` can create this version's schema."""
    from alembic import command

    config = alembic_config("")
    config.output_buffer = StringIO()
    command.upgrade(config, "head", sql=True)
    return config.output_buffer.getvalue()


def apply_script(text: str) -> None:
    """Run a migration's statements. Without a connection, write the SQL to Alembic's output."""
    from alembic import op

    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(text)
    else:
        run_script(op.get_bind(), text)


def run_script(connection: "Connection", sql: str) -> None:
    """Execute several statements of fixed SQL, which Alembic's connection cannot do."""
    adapter: Any = connection.connection.dbapi_connection
    adapter.run_async(lambda driver: driver.execute(sql))


def preparation() -> str:
    """Return SQL that does the same as :func:`prepare` on a server of any version."""
    return f"""
SET LOCAL client_encoding = 'UTF8';
SET LOCAL client_min_messages = warning;
SET LOCAL search_path = public;
CREATE EXTENSION IF NOT EXISTS vector SCHEMA public;
DO $server$
BEGIN
    PERFORM pg_advisory_xact_lock({LOCK_KEY});
    IF current_setting('server_version_num')::integer < {_WITH_UUIDV7} THEN
        EXECUTE $function${_UUIDV7}$function$;
    END IF;
END $server$;
"""


def prepare(connection: "Connection") -> None:
    """Install extensions and functions that the tables need. An error says what the server lacks.

    Raises:
        UnavailableError: ``database_unsuitable``.
    """
    server = dict(connection.exec_driver_sql(SERVER).mappings().one())
    for problem, hint in server_problems(server).values():
        raise UnavailableError(f"{problem}: {hint}", code="database_unsuitable")
    if server["vector"] is None:
        try:
            connection.exec_driver_sql("CREATE EXTENSION vector SCHEMA public")
        except DBAPIError as error:
            reason = str(_driver_error(error)).splitlines()[0]
            raise UnavailableError(
                f"the extension vector (pgvector, 0.8 or newer) is missing, and {server['login']!r}"
                f" cannot create it ({reason}): install its package on the server, and let an "
                "administrator run CREATE EXTENSION vector SCHEMA public in the database "
                f"{server['database']!r}",
                code="database_unsuitable",
            ) from error
    if server["number"] < _WITH_UUIDV7:
        run_script(connection, _UUIDV7)


def server_problems(server: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what the server lacks, by subject, as (problem, remedy).

    Args:
        server: the row that :data:`SERVER` returns.
    """
    login, database, version = server["login"], server["database"], server["vector"]
    found = {}
    if server["number"] < _OLDEST_SERVER:
        problem = f"PostgreSQL {server['version']} is too old"
        found["database"] = (problem, "Bottega needs 16 or newer")
    if server["encoding"] != "UTF8":
        problem = f"the database {database!r} has the encoding {server['encoding']}"
        found["encoding"] = (problem, "create a database with ENCODING 'UTF8' TEMPLATE template0")
    if not server["may_create"]:
        problem = (
            f"the login {login!r} may not create tables and give rights in the schema public of "
            f"the database {database!r}"
        )
        hint = (
            "set DATABASE_ADMIN_URL to the address with the login that owns the database; or, if "
            f'{login!r} shall own it, run ALTER DATABASE "{database}" OWNER TO "{login}", or '
            f'GRANT ALL ON SCHEMA public TO "{login}" WITH GRANT OPTION'
        )
        found["rights"] = (problem, hint)
    if version is not None and server["vector_schema"] != "public":
        problem = f"the extension vector is in the schema {server['vector_schema']!r}"
        hint = "run ALTER EXTENSION vector SET SCHEMA public in this database"
        found["extension"] = (problem, hint)
    elif version is not None and [int(n) for n in version.split(".")[:2]] < [0, 8]:
        problem = f"the extension vector has the version {version}, older than 0.8"
        hint = "install a newer pgvector and run ALTER EXTENSION vector UPDATE"
        found["extension"] = (problem, hint)
    return found


def repair(connection: "Connection") -> None:
    """Apply all SQL files if a file or the database has changed since the last application."""
    stored = stored_notes(connection)
    if not _differing(stored) and stored.get(_CATALOGUE) == _fingerprint(connection):
        return
    lost = connection.exec_driver_sql(_VECTORS).scalar() is None  # lost with the extension vector
    if lost:
        run_script(connection, f"DROP TABLE IF EXISTS episode_vectors; {_vectors()}")
    run_script(connection, script())
    if lost:
        run_script(connection, _as_owner("bottega_system", _EMBED_AGAIN))
    run_script(connection, note())


def stored_notes(connection: "Connection") -> dict[str, str]:
    """Return the hashes and other values that the SQL of :func:`note` has stored, by name."""
    return {row.name: row.hash for row in connection.exec_driver_sql(_STORED)}


def note() -> str:
    """Return the SQL that stores the hashes of the files that :func:`script` has applied."""
    stored = {**hashes(), _SERVES: _OLDEST_SERVED}
    rows = ", ".join(f"('{name}', '{value}')" for name, value in stored.items())
    return _NOTE.format(rows=rows, name=_CATALOGUE, fingerprint=_FINGERPRINT)


def _vectors() -> str:
    statements = _baseline()
    start = statements.index("CREATE TABLE episode_vectors")
    return statements[start : statements.index("\n\n", start)]


def _fingerprint(connection: "Connection") -> str:
    fingerprint: str = connection.exec_driver_sql(_FINGERPRINT).scalar_one()
    return fingerprint


def _differing(revisions: Mapping[str, str]) -> list[str]:
    return [name for name, value in hashes().items() if revisions.get(name) != value]


async def current_revision(pool: asyncpg.Pool | asyncpg.Connection) -> str | None:
    """Return the revision of the database; ``None``: the database was never migrated."""
    try:
        revision: str | None = await pool.fetchval("SELECT version_num FROM alembic_version")
    except (asyncpg.UndefinedTableError, asyncpg.InsufficientPrivilegeError):
        return None  # the service cannot read the table until the first migration has ended
    return revision


async def is_current(url: str) -> bool:
    """Return true if the database at ``url`` needs neither a migration nor a repair.

    Raises:
        DatabaseAwayError: the database cannot be reached.
    """
    try:
        await check(url)
    except DatabaseAwayError:
        raise
    except UnavailableError:
        return False
    return True


async def check(url: str) -> None:
    """Check the database at ``url`` with a login of the service; see :func:`require_intact`."""
    connection = await connect(url)
    try:
        await require_intact(connection)
    finally:
        await connection.close()


async def require_intact(connection: asyncpg.Connection) -> None:
    """Check that ``bottega migrate`` would change nothing.

    Raises:
        UnavailableError: ``migrations_pending``, or ``database_incompatible``.
    """
    await require_current(connection)
    if _is_newer(await current_revision(connection)):
        return
    stored = await connection.fetchval(f"{_STORED} WHERE name = $1", _CATALOGUE, column=1)
    if stored != await connection.fetchval(_FINGERPRINT):
        raise UnavailableError(_REPAIR, code="migrations_pending")


async def require_current(pool: asyncpg.Pool | asyncpg.Connection) -> None:
    """Check that this version works with the database's schema, functions and policies.

    Raises:
        UnavailableError: ``migrations_pending``, or ``database_incompatible``.
    """
    revision = await current_revision(pool)
    if revision is None:
        raise UnavailableError(
            "the database is not migrated: run `bottega migrate`", code="migrations_pending"
        )
    # One statement reads both the hashes and the revision: a migration may commit at any time.
    rows = await pool.fetch(_STORED_WITH_REVISION)
    stored = {row["name"]: row["hash"] for row in rows}
    revision = rows[0]["revision"] if rows else revision
    if serves_newer(revision, stored):
        return
    if revision != head():
        changed = [revision]
    elif not (changed := _differing(stored)):
        return
    raise UnavailableError(
        f"the database's version is not Bottega's ({', '.join(changed)}): run `bottega migrate`",
        code="migrations_pending",
    )


def serves_newer(revision: str, stored: Mapping[str, str]) -> bool:
    """Return true if a newer version migrated the database, and this version can use the database.

    Args:
        revision: the database's revision.
        stored: hashes and other values that the last migration stored, by name.

    Raises:
        UnavailableError: ``database_incompatible``: this version cannot use the database.
    """
    if revision in revisions():
        return False
    if not _is_newer(revision):
        raise UnavailableError(
            f"the database has the schema of another version ({revision}, this version needs "
            f"{head()}) and cannot be migrated: recreate the database (if it is embedded, move "
            "its folder away), then run `bottega migrate`",
            code="database_incompatible",
        )
    if _number(head()) < stored.get(_SERVES, revision):
        raise UnavailableError(
            f"the database has the schema of a newer version ({revision}), which this version "
            f"({head()}) cannot use: start the newer version",
            code="database_incompatible",
        )
    return True


def _is_newer(revision: str | None) -> bool:
    return revision is not None and _number(revision) > _number(head())


def _number(revision: str) -> str:
    number = _NUMBER.match(revision)
    return number[1] if number else ""


ROLE = "bottega_maintenance"

_LOCK = 4_871_019_230
_EVERY = timedelta(hours=12)  # less than a day, because work may begin earlier in the next night
_SHARE = 0.5

logger = Logger(__name__)

# If other transactions lock a table for too long, skip the table until the next night.
_PATIENCE = "SELECT set_config('lock_timeout', $1, false)"
_TAKE_TURN = "SELECT pg_try_advisory_lock($1)"
# Inserts and HOT updates leave no dead entries in an index, so do not count them.
_TABLES = """
SELECT s.relname AS name, greatest(c.reltuples, 0)::float AS rows,
       s.n_tup_upd - s.n_tup_hot_upd + s.n_tup_del AS changes, coalesce(i.changes, 0) AS before,
       ARRAY(SELECT indexrelid::regclass::text FROM pg_index
             WHERE indrelid = s.relid AND indisvalid ORDER BY 1) AS indexes
FROM pg_stat_user_tables s
JOIN pg_class c ON c.oid = s.relid
LEFT JOIN index_maintenance i ON i.name = s.relname
WHERE s.schemaname = 'public' AND has_table_privilege(s.relid, 'MAINTAIN')
  AND (i.at IS NULL OR i.at < $1)
ORDER BY s.relname
"""
_DONE = """
INSERT INTO index_maintenance (name, changes, at) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET changes = excluded.changes, at = excluded.at
"""


async def maintain_indexes(
    connect: Callable[[], Awaitable[asyncpg.Connection]],
    *,
    least_changes: int = 20_000,
    patience_s: float = 10.0,
    now: Clock = utcnow,
) -> dict[str, Any]:
    """Analyse the tables that are due this night, and rebuild indexes with many changes.

    After a crash, the next call continues with the remaining tables.

    Args:
        connect: opens a connection as :data:`ROLE`, without a command timeout.
        least_changes: a table's indexes are rebuilt if more than this number of rows, and more than
            half of the table's rows, have changed.
        patience_s: maximum wait for the lock of a table, in seconds.
        now: returns the current time, which decides if this night's work is still to be done.

    Returns:
        ``analysed``: number of analysed tables. ``rebuilt``: names of rebuilt indexes. ``broken``:
            number of dropped indexes that a killed process left. ``skipped``: why nothing was done.
    """
    try:
        connection = await connect()
    except UnavailableError as error:
        logger.warning("indices.skipped", error=error.detail)
        return {"skipped": error.detail}
    try:
        await connection.execute(_PATIENCE, f"{round(1000 * patience_s)}ms")
        if connection.get_server_version().major < 17:
            return {"skipped": "PostgreSQL 16 has no privilege MAINTAIN"}
        if not await connection.fetchval(_TAKE_TURN, _LOCK):
            return {"skipped": "another process maintains the indexes now"}
        return await _maintained(connection, least_changes, now())
    finally:
        await connection.close()


async def _maintained(
    connection: asyncpg.Connection, least_changes: int, now: datetime
) -> dict[str, Any]:
    tables = await connection.fetch(_TABLES, now - _EVERY)
    broken = await connection.fetchval("SELECT drop_broken_indexes()") if tables else 0
    analysed, rebuilt = 0, list[str]()
    for table in tables:
        name, changes = table["name"], table["changes"]
        # If the number of changes is now smaller, the server's statistics were reset.
        before = table["before"] if table["before"] <= changes else 0
        try:
            await connection.execute(f"ANALYZE {name}")
        except asyncpg.LockNotAvailableError:
            logger.info("indices.not_analysed", table=name)
            continue
        analysed += 1
        if changes - before > max(least_changes, _SHARE * table["rows"]):
            rebuilt += await _rebuilt(connection, table["indexes"])
            before = changes
        await connection.execute(_DONE, name, before, now)
    return {"analysed": analysed, "rebuilt": rebuilt, "broken": broken}


async def _rebuilt(connection: asyncpg.Connection, indexes: Sequence[str]) -> list[str]:
    """Rebuild a table's indexes, except locked indexes. Return the rebuilt indexes.

    The indexes are rebuilt one by one. A failed rebuild of a whole table would also leave a broken
    index in a different schema (``pg_toast``), which ``drop_broken_indexes`` does not drop.
    """
    rebuilt = []
    for index in indexes:
        try:
            await connection.execute(f"REINDEX INDEX CONCURRENTLY {index}")
        except asyncpg.LockNotAvailableError:
            logger.info("indices.not_rebuilt", index=index)
        else:
            rebuilt.append(index)
    return rebuilt
