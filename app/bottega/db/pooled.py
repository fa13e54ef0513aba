"""Sessions of a pooler, such as PgBouncer in transaction mode."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from bottega.db.sessions import ListenSession


class PooledSession(ListenSession):
    """A connection to a pooler, which may run each transaction in another session of the server.

    So role and limits hold for a transaction each: they are set where it begins, in the same round
    trip. A single statement becomes a transaction.

    Attributes:
        set_up: statements that follow each ``BEGIN``.
    """

    set_up: str = ""

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        if args or not query.startswith("BEGIN"):
            async with self._in_transaction(timeout):
                return await super().execute(query, *args, timeout=timeout)
        try:
            return await super().execute(query + self.set_up, timeout=timeout)
        except asyncpg.FeatureNotSupportedError as error:  # the server became a standby
            self.terminate()
            raise asyncpg.ReadOnlySQLTransactionError(str(error)) from error
        except BaseException:
            self.terminate()  # it would begin later, once the pooler has a session for it
            raise

    async def _do_execute(
        self, query: str, executor: Any, timeout: float | None, *arguments: Any, **options: Any
    ) -> Any:
        async with self._in_transaction(timeout):
            return await super()._do_execute(query, executor, timeout, *arguments, **options)

    @asynccontextmanager
    async def _in_transaction(self, timeout: float | None) -> AsyncIterator[None]:
        """Begin a transaction if there is none; the time limit includes the wait for a session."""
        if self.is_in_transaction():
            yield
            return
        async with asyncio.timeout(timeout), self.transaction():
            yield
