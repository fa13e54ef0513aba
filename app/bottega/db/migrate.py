"""Bring the database's schema to what this version of the code expects."""

from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

import bottega
from bottega.db.engine import connect, normalise_url
from bottega.errors import UnavailableError

if TYPE_CHECKING:
    from alembic.config import Config

LOCK_KEY = 4_871_019_201
"""Advisory lock that migrations hold."""

HEAD = "0017"
"""The newest migration. A constant, so that a start need not load Alembic to check it."""


def include_object(
    item: object, name: str | None, kind: str, reflected: bool, compare_to: object
) -> bool:
    """What Alembic compares with the models: all of ours (the queue's tables are not here), but for
    the indexes of vectors, of which there is one for each length that embedders have."""
    if kind == "index" and name is not None and name.startswith("ix_episode_vectors_task_"):
        return False
    return not (kind == "table" and name == "alembic_version")


def alembic_config(url: str) -> "Config":
    """Alembic's configuration for this checkout or installed package."""
    from alembic.config import Config

    package = Path(bottega.__file__).parent
    installed = package / "_migrations"  # where the wheel carries them
    config = Config()
    config.set_main_option(
        "script_location",
        str(installed if installed.exists() else package.parents[1] / "migrations"),
    )
    config.set_main_option("bottega.url", url.replace("%", "%%"))
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Run the migrations up to ``revision``. Blocking: call it outside any event loop."""
    from alembic import command

    command.upgrade(alembic_config(url), revision)


def downgrade(url: str, revision: str = "base") -> None:
    """Take migrations back down to ``revision``. Blocking."""
    from alembic import command

    command.downgrade(alembic_config(url), revision)


async def current_revision(pool: asyncpg.Pool | asyncpg.Connection) -> str | None:
    """The database's revision, or ``None`` if it was never migrated, or not to roles yet."""
    try:
        revision: str | None = await pool.fetchval("SELECT version_num FROM alembic_version")
    except (asyncpg.UndefinedTableError, asyncpg.InsufficientPrivilegeError):
        return None  # what an older version made, the application's role may not even look at
    return revision


async def is_current(url: str) -> bool:
    """Whether the database at ``url`` needs no migration."""
    connection = await connect(normalise_url(url), role=None)
    try:
        return await current_revision(connection) == HEAD
    finally:
        await connection.close()


async def require_current(pool: asyncpg.Pool | asyncpg.Connection) -> None:
    """Check that the schema is this version's.

    Raises:
        UnavailableError: ``migrations_pending``.
    """
    found = await current_revision(pool)
    if found != HEAD:
        raise UnavailableError(
            f"the database is at migration {found or 'none'}, this version needs {HEAD}: "
            "run `bottega migrate`",
            code="migrations_pending",
        )
