"""Migration of the database: its tables by Alembic, its functions and policies from SQL files."""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

import bottega
from bottega.db import sql_files
from bottega.db.connect import connect, normalise_url
from bottega.db.driver import run_script
from bottega.errors import UnavailableError

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
    parts = [baseline.read_text(encoding="utf-8"), *sorted(sql_files.signatures())]
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
        run_script(connection, sql_files.script(changed))
        connection.exec_driver_sql("DELETE FROM sql_files")
        stored = dict(sql_files.hashes())
        connection.exec_driver_sql(_STORE, (list(stored), list(stored.values())))


def _differing(stored: Mapping[str, str]) -> list[str]:
    """Return the files whose hash is not among the stored ones."""
    return [name for name, value in sql_files.hashes().items() if stored.get(name) != value]


async def current_revision(pool: asyncpg.Pool | asyncpg.Connection) -> str | None:
    """Return the database's revision, or ``None`` if it was never migrated."""
    try:
        revision: str | None = await pool.fetchval("SELECT version_num FROM alembic_version")
    except (asyncpg.UndefinedTableError, asyncpg.InsufficientPrivilegeError):
        return None  # the application may not read it before the first migration ends
    return revision


async def is_current(url: str) -> bool:
    """Tell if the database at ``url`` needs no migration."""
    connection = await connect(normalise_url(url), role=None)
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
