"""Errors of the database at chosen statements: the server itself raises them, in the session."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import pytest
from asyncpg.prepared_stmt import PreparedStatement

from bottega.db.sessions import DatabaseSession

_RAISE = "DO $$ BEGIN RAISE EXCEPTION 'made up' USING ERRCODE = '{}'; END $$"
_END = "SET ROLE NONE; SELECT pg_terminate_backend(pg_backend_pid())"
_OF_STATEMENTS = "_PreparedStatement__do_execute"
ENDED = "57P01"
"""The state with which the server ends the session."""
LOST = "08006"
"""A lost connection; the driver finds that out itself."""


class Faults:
    """Errors to come.

    Attributes:
        raised: number of errors since they were planned, by the part of the statement.
    """

    def __init__(self) -> None:
        self.raised: Counter[str] = Counter()
        self._left: dict[str, int] = {}
        self._state = ""

    def plan(self, *parts: str, state: str, times: int) -> None:
        """Let the next statements that contain one of ``parts``, of each, fail with an SQLSTATE."""
        self._left, self._state = dict.fromkeys(parts, times), state
        self.raised.clear()

    def end(self) -> None:
        """Let nothing more fail."""
        self._left.clear()

    async def meet(self, connection: Any, query: str) -> None:
        """Raise the planned error if it is time; called before each statement."""
        text = " ".join(query.split())
        part = next((part for part, left in self._left.items() if left and part in text), None)
        if part is None:
            return
        self._left[part] -= 1
        self.raised[part] += 1
        if self._state == LOST:
            connection.terminate()
            raise asyncpg.ConnectionFailureError("made up")
        statement = _END if self._state == ENDED else _RAISE.format(self._state)
        await connection._protocol.query(statement, 10.0)


@contextmanager
def faults() -> Iterator[Faults]:
    """Yield control over all statements of this process's sessions during the block."""
    planned = Faults()
    with pytest.MonkeyPatch.context() as patch:
        execute: Callable[..., Awaitable[Any]] = DatabaseSession._do_execute
        prepared: Callable[..., Awaitable[Any]] = getattr(PreparedStatement, _OF_STATEMENTS)

        async def of_session(self: Any, query: str, *arguments: Any, **options: Any) -> Any:
            await planned.meet(self, query)
            return await execute(self, query, *arguments, **options)

        async def of_prepared(self: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(self._connection, DatabaseSession):  # else it is the test's own
                await planned.meet(self._connection, self._query)
            return await prepared(self, *arguments, **options)

        patch.setattr(DatabaseSession, "_do_execute", of_session)
        patch.setattr(PreparedStatement, _OF_STATEMENTS, of_prepared)
        yield planned
