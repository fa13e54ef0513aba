"""Migration of the database: its tables by Alembic, its functions and policies from SQL files.

Each file of ``sql/`` (functions, triggers, policies) is safe to apply again. A file's hash is
stored when it is applied, so that ``migrate`` applies the changed ones and a start compares them
all.

A line ``-- owner: ROLE, execute: ROLE, ROLE`` above a function gives it to an owner and lets only
those roles call it. The owner ``migrator`` stands for the login that migrates; a function without
such a line belongs to that login, and every role may call it.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

import bottega
from bottega.db.connect import connect
from bottega.db.sessions import run_script
from bottega.errors import UnavailableError

_FOLDER = Path(__file__).with_name("sql")
_CLOSED_FUNCTION = re.compile(
    r"^-- owner: (?P<owner>\w+), execute: (?P<users>\w+(?:, \w+)*)\n"
    r"(?P<create>CREATE OR REPLACE FUNCTION (?P<name>\w+).*?\$\$;)$",
    re.MULTILINE | re.DOTALL,
)
_SIGNATURE = re.compile(
    r"^(?:-- owner: (?P<owner>\w+), execute: [^\n]*\n)?"
    r"CREATE OR REPLACE FUNCTION (?P<head>.*?)\$\$",
    re.MULTILINE | re.DOTALL,
)


@cache
def texts() -> Mapping[str, str]:
    """Return the files by name, in the order to apply them: first the roles."""
    paths = sorted(_FOLDER.glob("*.sql"), key=lambda path: (path.stem != "policies", path.stem))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


@cache
def hashes() -> Mapping[str, str]:
    """Return each file's hash by its name."""
    return {name: sha256(text.encode()).hexdigest() for name, text in texts().items()}


def signatures() -> list[str]:
    """Return each function's owner, name, arguments, result and options, without its body."""
    return [
        f"{match['owner'] or 'migrator'} {match['head']}"
        for text in texts().values()
        for match in _SIGNATURE.finditer(text)
    ]


def script(names: Iterable[str]) -> str:
    """Return the SQL that applies some files."""
    # Functions call each other: their bodies are not checked while some are missing.
    return "\n".join(
        ["SET LOCAL check_function_bodies = off;", *(_with_owners(texts()[name]) for name in names)]
    )


def _with_owners(text: str) -> str:
    """Expand the lines ``-- owner: ..., execute: ...`` into SQL."""
    closed = [_close(match) for match in _CLOSED_FUNCTION.finditer(text)]
    if not closed:
        return text
    return "\n".join(
        [
            # Without this privilege a role cannot own a function in the schema.
            "GRANT CREATE ON SCHEMA public TO bottega_system;",
            _CLOSED_FUNCTION.sub(_create, text),
            *closed,
            "REVOKE CREATE ON SCHEMA public FROM bottega_system;",
        ]
    )


def _create(match: re.Match[str]) -> str:
    """Create a function as its owner, who alone may replace it later.

    Every role may call it until the end of the file, since the owner of a table must be able to
    call the functions of its triggers when they are created.
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


def _as_owner(owner: str, sql: str) -> str:
    return sql if owner == "migrator" else f"SET LOCAL ROLE {owner};\n{sql}\nRESET ROLE;"


if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

LOCK_KEY = 4_871_019_201
"""Advisory lock that migrations hold."""

_STORED = "SELECT name, hash FROM sql_files"
_STORE = "INSERT INTO sql_files SELECT * FROM unnest($1::text[], $2::text[])"


def migrations_folder() -> Path:
    """Return the folder of migrations, of this checkout or of the installed package."""
    package = Path(bottega.__file__).parent
    installed = package / "_migrations"  # where the wheel carries them
    return installed if installed.exists() else package.parents[1] / "migrations"


@cache
def head() -> str:
    """Return the revision that this version needs: a hash of the baseline.

    The functions' signatures and owners are a part of it, since PostgreSQL cannot replace a
    function by one with another signature or owner. Their bodies are not: ``sql_files`` has hashes
    of those.
    """
    baseline = migrations_folder() / "versions" / "0001_baseline.sql"
    parts = [baseline.read_text(encoding="utf-8"), *sorted(signatures())]
    return sha256("\n".join(parts).encode()).hexdigest()[:12]


def alembic_config(url: str) -> "Config":
    """Return Alembic's configuration for this checkout or installed package."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.set_main_option("bottega.url", url.replace("%", "%%"))
    return config


def upgrade(url: str) -> None:
    """Create the tables if they are missing, and replace the changed functions and policies.

    Blocks: call it outside of an event loop.

    Raises:
        UnavailableError: ``database_incompatible``.
    """
    from alembic import command

    command.upgrade(alembic_config(url), "head")


def replace_changed(connection: "Connection") -> None:
    """Apply the SQL files that are not in the database as they are here."""
    stored = {row.name: row.hash for row in connection.exec_driver_sql(_STORED)}
    if changed := _differing(stored):
        run_script(connection, script(changed))
        connection.exec_driver_sql("DELETE FROM sql_files")
        stored = dict(hashes())
        connection.exec_driver_sql(_STORE, (list(stored), list(stored.values())))


def _differing(stored: Mapping[str, str]) -> list[str]:
    """Return the files whose hash is not among the stored ones."""
    return [name for name, value in hashes().items() if stored.get(name) != value]


async def current_revision(pool: asyncpg.Pool | asyncpg.Connection) -> str | None:
    """Return the database's revision, or ``None`` if it was never migrated."""
    try:
        revision: str | None = await pool.fetchval("SELECT version_num FROM alembic_version")
    except (asyncpg.UndefinedTableError, asyncpg.InsufficientPrivilegeError):
        return None  # the application may not read it before the first migration ends
    return revision


async def is_current(url: str) -> bool:
    """Tell if the database at ``url`` needs no migration."""
    connection = await connect(url, role=None)
    try:
        await require_current(connection)
    except UnavailableError:
        return False
    finally:
        await connection.close()
    return True


async def require_current(pool: asyncpg.Pool | asyncpg.Connection) -> None:
    """Check that the schema, the functions and the policies are this version's.

    Raises:
        UnavailableError: ``migrations_pending``, or ``database_incompatible``.
    """
    require_known(await current_revision(pool))
    stored = {row["name"]: row["hash"] for row in await pool.fetch(_STORED)}
    if changed := _differing(stored):
        raise UnavailableError(
            f"the database's functions are another version's ({', '.join(changed)}): "
            "run `bottega migrate`",
            code="migrations_pending",
        )


def require_known(revision: str | None) -> None:
    """Check that a database's revision is this version's.

    Raises:
        UnavailableError: ``migrations_pending`` without a revision, ``database_incompatible`` with
            another one.
    """
    if revision is None:
        raise UnavailableError(
            "the database is not migrated: run `bottega migrate`", code="migrations_pending"
        )
    if revision != head():
        raise UnavailableError(
            f"the database has the schema of another version ({revision}, this version needs "
            f"{head()}) and cannot be migrated: recreate the database (an embedded one: remove "
            "the folder BOTTEGA_DATA_DIR), then run `bottega migrate`",
            code="database_incompatible",
        )
