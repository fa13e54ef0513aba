"""What the operator does from the command line, who sees all tenants."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from secrets import token_hex

import asyncpg
from sqlalchemy import RowMapping, Text, cast, delete, func, or_, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import SYSTEM_ROLE, connect, normalise_url
from bottega.db.migrate import require_current
from bottega.db.tables import api_keys, tenants
from bottega.errors import ConflictError, NotFoundError
from bottega.tenants import audit, keys
from bottega.tenants.erase import Begin, Removed, erase_tenant

ACTOR = "cli"

_BOOTSTRAP = "bootstrap"
_keys = api_keys.c


@asynccontextmanager
async def transactions(url: str) -> AsyncIterator[Begin]:
    """Transactions that see all tenants, one at a time.

    Raises:
        UnavailableError: the server cannot be reached, or is not migrated, or this login may not.
    """

    async def connected() -> asyncpg.Connection:
        connection = await connect(normalise_url(url), role=SYSTEM_ROLE)
        await require_current(connection)
        return connection

    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=connected, poolclass=NullPool
    )
    try:
        yield engine.begin
    finally:
        await engine.dispose()


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[AsyncConnection]:
    """One of them."""
    async with transactions(url) as begin, begin() as tx:
        yield tx


async def create_key(
    url: str,
    tenant: str,
    *,
    name: str,
    scope: keys.Scope,
    expires: datetime | timedelta | None = None,
) -> tuple[RowMapping, str]:
    """Make a key; answers with its row and, for the only time, the key.

    Args:
        tenant: its name; made if there is none.

    Raises:
        InvalidInputError, ConflictError: see :func:`keys.create`.
    """
    async with transaction(url) as tx:
        made = postgresql.insert(tenants).values(name=tenant).on_conflict_do_nothing()
        await tx.execute(made)
        found = await tx.execute(select(tenants.c.id).where(tenants.c.name == tenant))
        if isinstance(expires, timedelta):
            expires = await tx.scalar(select(func.now() + expires))
        tenant_id = found.scalar_one()
        return await keys.create(tx, tenant_id, ACTOR, name=name, scope=scope, expires_at=expires)


async def list_keys(url: str, tenant: str | None = None) -> list[RowMapping]:
    """The keys of all tenants, or of one, each with its ``tenant``'s name, by age."""
    query = select(*keys.SHOWN, tenants.c.name.label("tenant")).join(tenants).order_by(_keys.id)
    if tenant is not None:
        query = query.where(tenants.c.name == tenant)
    async with transaction(url) as tx:
        return list((await tx.execute(query)).mappings())


async def revoke_key(url: str, prefix_or_id: str) -> RowMapping:
    """Revoke the one key with this prefix or id; answers with what it was.

    Raises:
        NotFoundError: there is none.
        ConflictError: there are several with the prefix.
    """
    same = or_(_keys.prefix == prefix_or_id, cast(_keys.id, Text) == prefix_or_id.lower())
    async with transaction(url) as tx:
        found = (await tx.execute(select(*keys.SHOWN).where(same))).mappings().all()
        if not found:
            raise NotFoundError(f"there is no key '{prefix_or_id}': see `bottega keys list`")
        if len(found) > 1:
            raise ConflictError(f"several keys begin with '{prefix_or_id}': name one by its id")
        await keys.revoke(tx, found[0]["tenant_id"], ACTOR, found[0]["id"])
        return found[0]


async def keys_required(url: str) -> bool:
    """Whether there was ever a key, so that nobody is let in without; takes no operator to ask.

    Raises:
        UnavailableError: the server cannot be reached, or is not migrated.
    """
    connection = await connect(normalise_url(url))
    try:
        await require_current(connection)
        return bool(await connection.fetchval("SELECT keys_required()"))
    finally:
        await connection.close()


@asynccontextmanager
async def passing_key(
    url: str, *, name: str, good_for: timedelta, scope: keys.Scope = "run"
) -> AsyncIterator[str | None]:
    """A key to work with within the block, which is removed at its end; for the default tenant.

    ``None`` if there never was a key, and so none is needed.
    """
    if not await keys_required(url):
        yield None
        return
    row, key = await create_key(url, "default", name=name, scope=scope, expires=good_for)
    try:
        yield key
    finally:
        async with transaction(url) as tx:
            own = _keys.tenant_id == row["tenant_id"], _keys.id == row["id"]
            await tx.execute(delete(api_keys).where(*own))
            await audit.note(tx, row["tenant_id"], ACTOR, "key.delete", row["prefix"])


async def list_tenants(url: str) -> list[RowMapping]:
    """All tenants by name, each with the number of its ``keys`` that are not revoked."""
    live = func.count(_keys.id).filter(_keys.revoked_at.is_(None)).label("keys")
    query = select(tenants, live).outerjoin(api_keys).group_by(tenants.c.id)
    async with transaction(url) as tx:
        return list((await tx.execute(query.order_by(tenants.c.name))).mappings())


async def delete_tenant(url: str, name: str) -> Removed:
    """Remove a tenant with all that is its own; answers how many rows of each table.

    Raises:
        NotFoundError: there is none of that name.
    """
    async with transactions(url) as begin:
        return await erase_tenant(begin, name, ACTOR)


async def store_bootstrap_key(url: str, key: str) -> bool:
    """Make the operator's own text an admin key of the default tenant; whether it was none yet.

    A key that was revoked stays so.
    """
    prefix = f"{_BOOTSTRAP}_{token_hex(4)}"
    row = {"name": _BOOTSTRAP, "prefix": prefix, "key_hash": keys.hashed(key), "scope": "admin"}
    made = postgresql.insert(api_keys).values(tenant_id=DEFAULT_TENANT, **row)
    added = made.on_conflict_do_nothing(index_elements=[_keys.key_hash]).returning(_keys.id)
    async with transaction(url) as tx:
        if await tx.scalar(added) is None:
            return False
        await audit.note(tx, DEFAULT_TENANT, ACTOR, "key.create", prefix, {"scope": "admin"})
        return True
