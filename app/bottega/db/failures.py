"""Classes of database errors. Only this module decides if an error is transient or a bug.

- After a **transient** error (:func:`is_transient`), a call may succeed later, or on a new
  connection. Callers repeat the call for a limited time. If the call still fails, a request gets
  the status 503, a run continues in a later attempt, and a background service tries again later.
- Some transient errors say that the server has **undone** the transaction (:func:`is_undone`). Then
  even a call that is not idempotent may be repeated. In contrast, if the connection was lost, the
  transaction may have been committed.
- A **cancelled** statement is repeated only a few times, because each repetition may cost the
  server as much work as the first try.
- All other errors are bugs.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import asyncpg
import stamina

from bottega.clock import monotonic
from bottega.errors import DatabaseAwayError, UnavailableError

T = TypeVar("T")
P = ParamSpec("P")

_PASSING = ("08", "25006", "25P0", "40", "53", "55", "57", "58")
"""Prefixes of SQLSTATEs of transient errors: connections, resources, conflicts, operators."""
_UNDONE = ("25", "40", "53", "55", "57014", "58")
"""Prefixes of SQLSTATEs of errors that roll back the transaction or refuse the session."""
_UNKNOWN_END = "40003"
_BROKEN = ("closed", "closing", "released", "in error state")
"""Words in the driver's errors about broken connections. The driver's other errors are bugs."""
_CANCELLED = "57014"
_MOST_CANCELLED = 5
_PERSIST_S = 60.0
REPEAT_S = 2.0
PAUSES_S = (0.05, 0.2, 0.5)
"""Pauses, in seconds, before the repetitions of a call for which a client waits.

No repetition begins more than ``REPEAT_S`` seconds after the first call.
"""


def is_transient(error: BaseException | None) -> bool:
    """Check if a failed call may succeed later, or on a new connection."""
    return isinstance(error, UnavailableError | OSError | TimeoutError) or is_outage(error)


def is_outage(error: BaseException | None) -> bool:
    """Check if an error is transient and certainly comes from the database.

    The class of the error's SQLSTATE decides (PostgreSQL's manual, appendix A). If the server ends
    a session, asyncpg raises ``InternalClientError`` for a statement on this session. The error
    25006 (read-only transaction) occurs if a pooler still leads to a server that became a standby.
    """
    if (state := _state(error)) is not None:
        return state.startswith(_PASSING)
    if isinstance(error, asyncpg.InterfaceError):
        return any(word in str(error) for word in _BROKEN)
    return isinstance(error, DatabaseAwayError | asyncpg.InternalClientError)


def is_undone(error: BaseException) -> bool:
    """Check if an error is transient and its transaction was certainly rolled back."""
    state = _state(error) or ""
    return is_outage(error) and state.startswith(_UNDONE) and state != _UNKNOWN_END


def is_storage_full(error: BaseException) -> bool:
    """Check if an error says that the database could not write because its disk is full."""
    return isinstance(error, asyncpg.DiskFullError)


def _state(error: BaseException | None) -> str | None:
    return error.sqlstate if isinstance(error, asyncpg.PostgresError) else None


async def persist(ask: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``ask``. While the database is away, repeat ``ask`` for up to a minute.

    ``ask`` must be idempotent, because a failed call may have had an effect.

    Raises:
        DatabaseAwayError: the database was away for more than a minute, or cancelled every try.
    """
    cancelled = 0

    def is_repeated(error: Exception) -> bool:
        nonlocal cancelled
        cancelled += _state(error) == _CANCELLED
        return is_transient(error) and cancelled < _MOST_CANCELLED

    try:
        return await ask()  # usually succeeds
    except Exception as error:
        if not is_repeated(error):
            raise
    try:
        return await stamina.AsyncRetryingCaller(
            attempts=None, timeout=_PERSIST_S, wait_initial=0.05, wait_max=2.0
        )(is_repeated, ask)
    except Exception as error:
        if not is_transient(error):
            raise
        raise DatabaseAwayError("the database was away for too long") from error


def repeated(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Return a function that repeats ``function`` after an error that undid its one transaction."""

    @wraps(function)
    async def repeating(*arguments: P.args, **options: P.kwargs) -> T:
        began = monotonic()
        for pause_s in PAUSES_S:
            try:
                return await function(*arguments, **options)
            except Exception as error:
                if not is_undone(error) or monotonic() - began > REPEAT_S:
                    raise
            await asyncio.sleep(pause_s)
        return await function(*arguments, **options)

    return repeating
