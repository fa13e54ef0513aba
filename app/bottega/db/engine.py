"""Connections to PostgreSQL.

A database has an SQLAlchemy engine for requests (composed queries, one transaction per request) and
an asyncpg pool for frequent single statements (steps of a run, reads of the log). Both connect the
same way.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode
from uuid import UUID
from weakref import WeakValueDictionary

import asyncpg
from sqlalchemy import event, text
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn

from bottega import metrics
from bottega.db.driver import ShrinkingPool, session_of
from bottega.db.measured import count_connections, measure_statements
from bottega.db.sessions import SERVER_OPTIONS, ListenSession, Silence, Trust
from bottega.errors import InvalidInputError, UnavailableError

_CONNECT_S = 10.0
_LONGEST_STATEMENT_S = 30.0
"""Time limit of a statement of the engine: all are short, so a longer one hangs."""
_IDLE_S = 30.0

APP_ROLE = "bottega_app"
"""Role without tables of its own; sees the rows of the tenant that a transaction names."""
SYSTEM_ROLE = "bottega_system"
"""Role that sees all tenants, for the operator's commands."""

_BE_APP = f"set_config('role', '{APP_ROLE}', true)"
"""Set in each transaction of a tenant: a pooler may run it on a session with another role."""
_NAME_TENANT = text("SELECT set_config('bottega.tenant', :tenant, true)")
_ACT_AS = text(f"SELECT {_BE_APP}, set_config('bottega.tenant', :tenant, true)")
_NOT_AS_ASKED = "BT010"
"""SQLSTATE of a session without its start-up parameters; the message is its role."""
_CHECK = f"""
DO $$ BEGIN
    IF ROW({{}}) IS DISTINCT FROM ROW({{}}) THEN
        RAISE EXCEPTION USING ERRCODE = '{_NOT_AS_ASKED}', MESSAGE = current_user;
    END IF;
END $$
"""
_TRY_TO_WRITE = """
CREATE TEMPORARY TABLE room_on_disk ON COMMIT DROP AS
SELECT gen_random_uuid() FROM generate_series(1, 20000)
"""
"""Writes a megabyte, and to the write-ahead log."""

_PAIR = re.compile(r"\s*(\w+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|(\S+))")


def normalise_url(conninfo: str) -> str:
    """Convert any libpq form (URL, or ``key=value`` pairs) into a URL for asyncpg.

    Raises:
        InvalidInputError: it is neither. The text does not quote it: it may hold a password.
    """
    if "://" in conninfo:
        scheme, rest = conninfo.split("://", 1)
        if scheme.split("+")[0] not in ("postgresql", "postgres"):
            raise InvalidInputError(f"DATABASE_URL must be a postgresql:// URL, not {scheme}://")
        return f"postgresql://{rest}"
    pairs: dict[str, str] = {}
    position = 0
    while position < len(conninfo.rstrip()):
        match = _PAIR.match(conninfo, position)
        if match is None:
            raise InvalidInputError(
                "DATABASE_URL is neither a postgresql:// URL nor key=value pairs "
                f"(stuck at character {position + 1})"
            )
        quoted, plain = match.group(2), match.group(3)
        pairs[match.group(1)] = re.sub(r"\\(.)", r"\1", quoted if plain is None else plain)
        position = match.end()
    pairs.pop("application_name", None)
    return f"postgresql:///?{urlencode(pairs, quote_via=quote)}"


@dataclass(slots=True)
class Storage:
    """This process's knowledge about the space on the database's disk.

    Attributes:
        full: a write failed for lack of space, and no test write has succeeded since.
    """

    full: bool = False


@dataclass(frozen=True, slots=True)
class Database:
    """An open database.

    Attributes:
        url: URL of the server; may hold a password, so it is never logged.
        limits: names and values of limits that connections set as session parameters.
        engine: for requests.
        pool: for single statements.
        each: concurrent transactions of a tenant in this process.
        patience_s: longest wait for one, in seconds.
        trust: state shared by all connections to this database.
        storage: state of its disk.
    """

    url: str
    limits: Mapping[str, int | None]
    engine: AsyncEngine
    pool: asyncpg.Pool
    each: int
    patience_s: float
    trust: Trust
    storage: Storage = field(default_factory=Storage)
    _slots: WeakValueDictionary[UUID, asyncio.Semaphore] = field(
        default_factory=WeakValueDictionary, repr=False
    )

    @asynccontextmanager
    async def begin(self, tenant_id: UUID) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction that sees and writes only the tenant's rows.

        Raises:
            TimeoutError: the wait for a turn or a connection was too long.
        """
        async with self.turn(tenant_id), self.engine.begin() as connection:
            await act_as(connection, tenant_id)
            yield connection

    @asynccontextmanager
    async def turn(self, tenant_id: UUID) -> AsyncIterator[None]:
        """Wait for one of a tenant's turns, so that no tenant takes all connections.

        A request takes exactly one turn before it uses the pool.

        Raises:
            TimeoutError: the wait was too long.
        """
        slots = self._slots.get(tenant_id)
        if slots is None:
            slots = self._slots[tenant_id] = asyncio.Semaphore(self.each)
        if slots.locked():
            async with asyncio.timeout(self.patience_s):
                await slots.acquire()
        else:
            await slots.acquire()
        try:
            yield
        finally:
            slots.release()

    async def has_room(self) -> bool:
        """Return true if the disk has space; after a failed write, test it with another."""
        if self.storage.full:
            try:
                await self.pool.execute(_TRY_TO_WRITE)
            except asyncpg.DiskFullError:
                return False
            except asyncpg.InsufficientPrivilegeError:
                pass  # no right to temporary tables: assume room
            self.storage.full = False
        return True

    async def connect(self) -> ListenSession:
        """Open a separate connection, for listening or the queue. The caller closes it."""
        step_s = self.trust.silence.step_s
        return await connect(self.url, longest_s=step_s, limits=self.limits, trust=self.trust)


async def act_as(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Restrict the rest of the transaction to a tenant's rows, by role and policies."""
    await connection.execute(_ACT_AS, {"tenant": str(tenant_id)})


async def name_tenant(connection: AsyncConnection, tenant_id: UUID) -> None:
    """Name the tenant for functions that need it, and keep the transaction's role."""
    await connection.execute(_NAME_TENANT, {"tenant": str(tenant_id)})


@asynccontextmanager
async def acting_as(
    pool: asyncpg.Pool, tenant_id: UUID, on: asyncpg.Connection | None = None
) -> AsyncIterator[asyncpg.Connection]:
    """Begin a transaction like :meth:`Database.begin`, on an asyncpg pool.

    Args:
        on: a transaction of the tenant that has begun; it is used instead.
    """
    if on is not None:
        yield on
        return
    async with pool.acquire() as connection, connection.transaction():
        query = f"SELECT {_BE_APP}, set_config('bottega.tenant', $1, true)"
        await connection.execute(query, str(tenant_id))
        yield connection


async def connect(
    url: str,
    *,
    role: str | None = APP_ROLE,
    longest_s: float | None = _LONGEST_STATEMENT_S,
    limits: Mapping[str, int | None] | None = None,
    trust: Trust | None = None,
) -> ListenSession:
    """Open a connection whose statements take at most ``longest_s`` seconds.

    See :func:`open_database` for the errors.

    Args:
        role: role of the session; ``None``: that of the login.
        limits: see :class:`Database`.
        trust: state shared with other connections of the database.
    """
    session = _session(role, limits or {})
    try:
        connection: ListenSession = await asyncpg.connect(
            url,
            timeout=_CONNECT_S,
            command_timeout=longest_s,
            server_settings=session | SERVER_OPTIONS,
            connection_class=ListenSession,
        )
        try:
            connection.begin(trust or Trust(Silence()))
            await _check_session(connection, session)
        except BaseException:
            connection.terminate()
            raise
    except asyncpg.InvalidParameterValueError:
        raise UnavailableError(
            f"the database has no role {role}: run `bottega migrate`", code="migrations_pending"
        ) from None
    except asyncpg.InsufficientPrivilegeError:
        raise UnavailableError(
            f"this login may not act as the role {role}: grant it to the login in DATABASE_URL "
            f"(GRANT {role} TO …), or use the login that migrated the database",
            code="database_unavailable",
        ) from None
    except (ValueError, asyncpg.InterfaceError) as error:
        raise InvalidInputError(
            f"DATABASE_URL is not valid ({type(error).__name__}): check its port and options"
        ) from None
    except (OSError, asyncpg.PostgresError, TimeoutError) as error:
        raise UnavailableError(
            f"cannot reach PostgreSQL ({error}): check DATABASE_URL and that the server is up",
            code="database_unavailable",
        ) from error
    return connection


async def _check_session(connection: asyncpg.Connection, asked: Mapping[str, str]) -> None:
    """Check, in one round trip, that a new session took its start-up parameters.

    The answer is an error or nothing. Statements with parameters or rows are prepared, and a
    proxy that ignores start-up parameters may not support prepared statements.

    Args:
        asked: the result of :func:`_session`.

    Raises:
        UnavailableError: ``startup_parameters_ignored``.
    """
    settings = [name for name in asked if name.startswith("bottega.")]
    found = [f"current_setting('{name}', true)" for name in settings]
    wanted = [f"'{asked[name]}'" for name in settings]  # numbers from the settings
    if (role := asked.get("role")) is not None:
        found.append("current_user::text")
        wanted.append(f"'{role}'")
    if not wanted:
        return
    try:
        await connection.execute(_CHECK.format(", ".join(found), ", ".join(wanted)))
    except asyncpg.PostgresError as error:
        if error.sqlstate != _NOT_AS_ASKED:
            raise
        kept = f" with the settings {', '.join(settings)}" if settings else ""
        raise UnavailableError(
            f"a session of DATABASE_URL ignored its start-up parameters: its role is "
            f"{error.args[0]} instead of {role}{kept}. "
            "A proxy may drop them, such as PgBouncer with ignore_startup_parameters. "
            "Row-level security and the limits of tenants would not hold: connect to PostgreSQL "
            "directly",
            code="startup_parameters_ignored",
        ) from None


def _session(role: str | None, limits: Mapping[str, int | None]) -> dict[str, str]:
    """Return a connection's start-up parameters, which need no round trip."""
    set_ = {"application_name": "bottega"}
    if role is not None:
        set_["role"] = role
    return set_ | {
        f"bottega.{name}": "" if value is None else str(value) for name, value in limits.items()
    }


async def _keep_state(connection: asyncpg.Connection) -> None:
    """Replace the pool's reset, a round trip per use: our statements change no session state."""


def _refuse_closed(connection: Any, record: object, proxy: object) -> None:
    """Let the pool replace a closed or possibly silent connection, without a round trip."""
    session = session_of(connection)
    if session.distrusted:
        session.terminate()
    if session.is_closed():
        raise DisconnectionError


@asynccontextmanager
async def open_database(
    url: str,
    *,
    pool_size: int = 10,
    idle_s: float = _IDLE_S,
    patience_s: float = 10.0,
    limits: Mapping[str, int | None] | None = None,
    silence: Silence = Silence(),
) -> AsyncIterator[Database]:
    """Open engine and pool, and close them at the end.

    All connections act as the role that the policies bind, even if the login may do more.

    Args:
        pool_size: most connections of each.
        idle_s: seconds after which connections that were not needed are closed.
        silence: time limits for a silent server.

    Raises:
        UnavailableError: the server cannot be reached.
    """
    url = normalise_url(url)
    limits = limits or {}
    trust = Trust(silence)

    async def connected(longest_s: float) -> ListenSession:
        return await connect(url, longest_s=longest_s, limits=limits, trust=trust)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=lambda: connected(_LONGEST_STATEMENT_S),
        poolclass=ShrinkingPool,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=patience_s,
        pool_use_lifo=True,
    )
    event.listen(engine.sync_engine, "checkout", _refuse_closed)
    measure_statements(engine)
    closing = asyncio.ensure_future(_close_idle(engine, idle_s))
    try:
        async with asyncpg.create_pool(
            min_size=1,
            max_size=pool_size,
            max_inactive_connection_lifetime=idle_s,
            reset=_keep_state,
            connect=lambda *_, **__: connected(silence.step_s),
            connection_class=ListenSession,
        ) as pool:
            trust.pool = pool
            each = max(1, pool_size // 2)
            metrics.refreshers[engine] = partial(count_connections, engine, pool)
            yield Database(url, limits, engine, pool, each, patience_s, trust)
    finally:
        metrics.refreshers.pop(engine, None)
        closing.cancel()
        await engine.dispose()


async def _close_idle(engine: AsyncEngine, every_s: float) -> None:
    """Close the engine's idle connections when it needed fewer for a while; until cancelled."""
    pool = engine.sync_engine.pool
    assert isinstance(pool, ShrinkingPool)
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, pool.checkedout())

    event.listen(engine.sync_engine, "checkout", count)
    while True:
        most = pool.checkedout()
        await asyncio.sleep(every_s)
        await greenlet_spawn(pool.shrink, most)
