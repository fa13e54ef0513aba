"""The database driver below SQLAlchemy: the only place that reaches for it."""

from typing import Any

import asyncpg
from pydantic_core import from_json
from sqlalchemy import AsyncAdaptedQueuePool, Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.sessions import ListenSession


class ShrinkingPool(AsyncAdaptedQueuePool):
    """SQLAlchemy's pool, which can close connections that nobody uses.

    ``dispose()`` would make a new pool, and those in use would return to the old one and stay open.
    """

    def shrink(self, most: int) -> None:
        """Close idle connections until there are at most ``most``, or all are in use."""
        while self.checkedin() and self.checkedin() + self.checkedout() > most:
            idle = self._pool.get(block=False)
            self._dec_overflow()  # first, so that nobody waits for this connection
            idle.close()


async def driver_of(connection: AsyncConnection) -> asyncpg.Connection:
    """Return the driver's connection, to run statements in SQLAlchemy's transaction.

    The transaction must have begun through SQLAlchemy, as in ``Database.begin``.
    """
    return (await connection.get_raw_connection()).driver_connection


def session_of(adapter: Any) -> ListenSession:
    """Return the session of a pooled connection, as SQLAlchemy gives it to its events."""
    session: ListenSession = adapter.driver_connection
    return session


def decoded(value: Any) -> Any:
    """Decode JSON of a row; the connections of SQLAlchemy's engine have decoded it already."""
    return from_json(value) if isinstance(value, str) else value


def run_script(connection: Connection, sql: str) -> None:
    """Run several statements without parameters, in the transaction that has begun."""
    adapter: Any = connection.connection.dbapi_connection
    adapter.run_async(lambda driver: driver.execute(sql))
