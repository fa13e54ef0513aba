"""Alembic's entry: runs the migrations over asyncpg, or writes their statements.

Called by ``bottega migrate`` (which passes the URL) or by the ``alembic`` command (which takes
``DATABASE_URL``).
"""

import asyncio
import os

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from bottega.db.connect import connect
from bottega.db.migrate import (
    LOCK_KEY,
    note,
    preparation,
    prepare,
    repair,
    script,
    serves_newer,
    stored_notes,
)


def run(connection: Connection) -> None:
    context.configure(connection=connection)
    with context.begin_transaction():
        # Two processes that start at once must not both migrate: the second waits, and then
        # finds everything done.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_KEY})")
        prepare(connection)
        for revision in context.get_context().get_current_heads():
            if serves_newer(revision, stored_notes(connection)):
                return
        context.run_migrations()
        repair(connection)


async def main() -> None:
    url = context.config.get_main_option("bottega.url") or os.environ.get("DATABASE_URL")
    if not url:
        raise SystemExit("set DATABASE_URL, or use `bottega migrate`")
    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=lambda: connect(url, role=None, longest_s=None),
        poolclass=NullPool,
    )
    async with engine.begin() as connection:
        await connection.run_sync(run)
    await engine.dispose()


def write() -> None:
    context.configure(dialect_name="postgresql")
    put = context.get_context().impl.static_output
    with context.begin_transaction():
        put(preparation())
        context.run_migrations()
        put(script())
        put(note())


if context.is_offline_mode():
    write()
else:
    asyncio.run(main())
