"""Opening of connections to PostgreSQL or a pooler, with a role and the tenants' limits."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from bottega.db.conninfo import Server, servers
from bottega.db.sessions import SERVER_OPTIONS, ConnectionTrust, DatabaseSession, SilenceTimeouts
from bottega.errors import DatabaseAwayError, InvalidInputError, UnavailableError


class PooledSession(DatabaseSession):
    """A connection to a pooler, which may run each transaction in a new session of the server.

    So each transaction sets its role and limits at the start, in the round trip of ``BEGIN``. A
    statement outside a transaction is executed in a transaction of its own.

    Attributes:
        set_up: SQL statements that are sent after each ``BEGIN``.
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
            self.terminate()  # else the pooler may begin the transaction later
            raise

    async def _do_execute(
        self, query: str, executor: Any, timeout: float | None, *arguments: Any, **options: Any
    ) -> Any:
        async with self._in_transaction(timeout):
            return await super()._do_execute(query, executor, timeout, *arguments, **options)

    @asynccontextmanager
    async def _in_transaction(self, timeout: float | None) -> AsyncIterator[None]:
        """Begin a transaction if none is open. ``timeout`` includes the wait for a session."""
        if self.is_in_transaction():
            yield
            return
        async with asyncio.timeout(timeout), self.transaction():
            yield


_CONNECT_S = 10.0
"""Timeout in seconds for connecting to all servers of a URL. Each server gets a share."""
LONGEST_STATEMENT_S = 30.0
"""Timeout of a composed statement in seconds. A statement that takes longer hangs."""

APP_ROLE = "bottega_app"
"""Role that owns no tables, and that sees only the rows of the transaction's tenant."""
SYSTEM_ROLE = "bottega_system"
"""Role that sees all tenants, for the operator's commands."""

_NAMED = {"application_name": "bottega"}
_MEANING = {
    "search_path": "public",
    "transaction_isolation": "read committed",
    "row_security": "on",
    "TimeZone": "UTC",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # A plan for a small table may be kept when the table has grown, so it must use an index.
    "enable_seqscan": "off",
    # Parallel workers need longer to start than an index needs to find the first rows.
    "max_parallel_workers_per_gather": "0",
}
"""Settings on which our statements depend. A database or a login may have other defaults.

The server's time limits are off, because the driver limits statements, and SQL limits some locks.
"""
_SINCE_17 = {"transaction_timeout": "0"}
_OF_SESSIONS = {"transaction_isolation": "default_transaction_isolation"}
"""Settings of a transaction, by name of the setting with the session's default."""
_OF_POOLED = {"bottega.tenant": "", "transaction_read_only": "off"}
"""Settings for a pooler's sessions: no stale tenant; on a standby, an error."""
_WHICH = "SELECT pg_postmaster_start_time(), current_database()"
_NOT_AS_ASKED = "BT010"
"""SQLSTATE if a session ignored its start-up parameters. The message is the session's role."""
_ELSEWHERE = "BT011"
"""SQLSTATE if a session is in a wrong database. The message is this database's name."""
_CHECK = f"""
DO $$ BEGIN
    IF current_database()::text <> convert_from(decode('{{}}', 'hex'), 'UTF8') THEN
        RAISE EXCEPTION USING ERRCODE = '{_ELSEWHERE}', MESSAGE = current_database();
    END IF;
    IF ROW({{}}) IS DISTINCT FROM ROW({{}}) THEN
        RAISE EXCEPTION USING ERRCODE = '{_NOT_AS_ASKED}', MESSAGE = current_user;
    END IF;
END $$
"""


async def connect(
    conninfo: str,
    *,
    role: str | None = APP_ROLE,
    longest_s: float | None = LONGEST_STATEMENT_S,
    limits: Mapping[str, int | None] | None = None,
    trust: ConnectionTrust | None = None,
    pooled: bool = False,
) -> DatabaseSession:
    """Open a connection whose statements take at most ``longest_s`` seconds.

    If the address has several servers, use the first that accepts writes. The server that was used
    last is tried first. See :func:`open_database` for the errors.

    Args:
        conninfo: address in any form that libpq reads; see :func:`bottega.db.conninfo.servers`.
        role: role of the session; ``None``: the role of the login.
        limits: see :class:`Database`.
        trust: state that all connections to the database share.
        pooled: true if the address leads to a pooler; see :class:`PooledSession`.
    """
    session, trust = _session(role, limits or {}), trust or ConnectionTrust(SilenceTimeouts())
    listed = servers(conninfo)
    failures: list[Exception] = []
    for server in sorted(listed, key=lambda each: each != trust.last.get(conninfo)):
        try:
            connection = await _connect_one(
                server, _CONNECT_S / len(listed), session, longest_s, trust, pooled
            )
        except asyncpg.PostgresError as error:
            if role is not None and role in str(error):
                raise _without_role(role, error) from None
            failures.append(error)
        except (OSError, asyncpg.TargetServerAttributeNotMatched) as error:
            failures.append(error)
        except (ValueError, asyncpg.InterfaceError) as error:
            # The driver's own errors name only the option. Other errors may contain a secret value.
            is_own = isinstance(error, asyncpg.ClientConfigurationError)
            reason = str(error).splitlines()[0] if is_own else type(error).__name__
            raise InvalidInputError(
                f"DATABASE_URL is not valid ({reason}): check its options"
            ) from None
        else:
            trust.last[conninfo] = server
            return connection
    raise DatabaseAwayError(
        f"cannot reach PostgreSQL ({'; '.join(map(_reason, failures))}): {_advice(failures[-1])}"
    ) from failures[-1]


async def _connect_one(
    server: Server,
    within_s: float,
    session: dict[str, str],
    longest_s: float | None,
    trust: ConnectionTrust,
    pooled: bool,
) -> DatabaseSession:
    # A pooler is neither a primary nor a standby.
    target = server.target or ("any" if pooled else "primary")
    connection: DatabaseSession = await asyncpg.connect(
        **server.arguments(),
        timeout=server.patience_s or within_s,
        command_timeout=longest_s,
        server_settings=(
            _NAMED | server.settings | ({} if pooled else _start_up(session) | SERVER_OPTIONS)
        ),
        connection_class=PooledSession if pooled else DatabaseSession,
        **({"statement_cache_size": 0} if pooled else {}),
        target_session_attrs=target,
    )
    try:
        connection.begin(trust)
        newer = _SINCE_17 if connection.get_server_version().major >= 17 else {}
        if pooled:  # not isinstance(), which is true for all connections
            connection.set_up = _set_up(session | newer)
        else:
            await _check_session(connection, session, newer, server.database)
    except BaseException:
        connection.terminate()
        raise
    return connection


def _without_role(role: str, error: asyncpg.PostgresError) -> UnavailableError:
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return UnavailableError(
            f"this login may not act as the role {role}: grant it to the login in DATABASE_URL "
            f"(GRANT {role} TO …), or use the login that migrated the database",
            code="database_unavailable",
        )
    return UnavailableError(
        f"the database has no role {role}: run `bottega migrate`", code="migrations_pending"
    )


async def check_same(url: str, pooler: str) -> None:
    """Check that a pooler leads to the database at ``url``.

    Raises:
        UnavailableError: the pooler leads to a different database, or one of the two is
            unreachable.
    """
    found = []
    for each, pooled in ((url, False), (pooler, True)):
        connection = await connect(each, pooled=pooled)
        try:
            found.append(await connection.fetchrow(_WHICH))
        except (OSError, asyncpg.PostgresError, TimeoutError) as error:
            raise UnavailableError(
                f"the pooler at DATABASE_URL cannot reach the database ({error!r}): check its "
                "configuration and its login's roles",
                code="database_unavailable",
            ) from error
        finally:
            await connection.close()
    if found[0] != found[1]:
        raise UnavailableError(
            "DATABASE_URL and BOTTEGA_LISTEN_URL lead to different databases: DATABASE_URL must be "
            "the address of a pooler for the database at BOTTEGA_LISTEN_URL",
            code="database_unavailable",
        )


def _reason(error: Exception) -> str:
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "the server is a read-only standby, which takes no writes"
    return str(error) or type(error).__name__


def _advice(error: Exception) -> str:
    if "unsupported startup parameter" in str(error):  # PgBouncer's words
        return (
            "this is the address of PgBouncer. Set DATABASE_URL to this address, and "
            "BOTTEGA_LISTEN_URL to the address of PostgreSQL itself"
        )
    match error:
        case asyncpg.InvalidCatalogNameError():
            return "create the database (CREATE DATABASE … OWNER …), or correct DATABASE_URL"
        case asyncpg.InvalidAuthorizationSpecificationError():
            return "check the user and the password in DATABASE_URL, and the server's pg_hba.conf"
        case asyncpg.InsufficientPrivilegeError():
            return "allow this login to connect (GRANT CONNECT ON DATABASE … TO …)"
        case socket.gaierror():
            return (
                "check the host in DATABASE_URL. In a URL, write @ : / ? # % of a password as "
                "%40 %3A %2F %3F %23 %25"
            )
        case ssl.SSLError():
            return "check sslmode and sslrootcert in DATABASE_URL"
    return "check DATABASE_URL (and BOTTEGA_LISTEN_URL, if set) and that the server is up"


async def _check_session(
    connection: asyncpg.Connection,
    asked: Mapping[str, str],
    newer: Mapping[str, str],
    database: str,
) -> None:
    """Check in one round trip that a new session accepted its start-up parameters.

    The check's statement has no parameters or rows, so the driver does not prepare it: a proxy
    that ignores start-up parameters may not support prepared statements.

    Args:
        asked: the result of :func:`_session`.
        newer: settings that the check sets, because older servers refuse them at the start.
        database: name of the database in the address.

    Raises:
        UnavailableError: ``startup_parameters_ignored``, or the session is in another database.
    """
    role = asked.get("role")
    settings = {name: value for name, value in asked.items() if name != "role"}
    found = [f"current_setting('{_OF_SESSIONS.get(name, name)}', true)" for name in settings]
    wanted = [f"'{value}'" for value in settings.values()]  # only our texts, and numbers
    if role is not None:
        found.append("current_user::text")
        wanted.append(f"'{role}'")
    set_ = "".join(f"SET {name} = {value};" for name, value in newer.items())
    name = database.encode().hex()  # the database's name may have any character
    check = _CHECK.format(name, ", ".join(found), ", ".join(wanted))
    try:
        await connection.execute(set_ + check)
    except asyncpg.PostgresError as error:
        if error.sqlstate == _ELSEWHERE:
            raise UnavailableError(
                f"DATABASE_URL asks for the database {database!r} and leads to "
                f"{error.args[0]!r}: correct DATABASE_URL or the proxy at this address (if it is "
                "a pooler, also set BOTTEGA_LISTEN_URL)",
                code="database_unavailable",
            ) from None
        if error.sqlstate != _NOT_AS_ASKED:
            raise
        raise UnavailableError(
            f"a session of DATABASE_URL ignored its start-up parameters: its role is "
            f"{error.args[0]} instead of {role or 'its own'}, or one of these settings is wrong: "
            f"{', '.join(settings)}. "
            "A proxy may drop these parameters, such as PgBouncer with ignore_startup_parameters. "
            "Row-level security and the limits of tenants would not hold: connect to PostgreSQL "
            "directly, or set BOTTEGA_LISTEN_URL to PostgreSQL's own address",
            code="startup_parameters_ignored",
        ) from None


def _session(role: str | None, limits: Mapping[str, int | None]) -> dict[str, str]:
    """Return the settings of each transaction: role, limits, and what the service's SQL needs."""
    set_ = {} if role is None else {"role": role}
    return (
        _MEANING
        | set_
        | {f"bottega.{name}": "" if value is None else str(value) for name, value in limits.items()}
    )


def _start_up(session: Mapping[str, str]) -> dict[str, str]:
    """Return a session's settings as start-up parameters, which need no round trip."""
    return {_OF_SESSIONS.get(name, name): value for name, value in session.items()}


def _set_up(session: Mapping[str, str]) -> str:
    """Return the settings as statements, together with the settings for a pooler."""
    settings = {**session, **_OF_POOLED}
    return "".join(f"SET LOCAL {name} = '{value}';" for name, value in settings.items())
