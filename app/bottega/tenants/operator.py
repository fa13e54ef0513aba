"""Actions of the operator from the command line, across all tenants."""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from secrets import token_hex
from typing import Any
from uuid import UUID

from sqlalchemy import (
    RowMapping,
    Text,
    and_,
    cast,
    delete,
    func,
    insert,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql

from bottega.db.connect import SYSTEM_ROLE, connect
from bottega.db.migrate import require_current
from bottega.db.pool import AsyncConnection, name_tenant
from bottega.db.sessions import ConnectionTrust, SilenceTimeouts
from bottega.db.tables import (
    DEFAULT_TENANT,
    api_keys,
    provider_versions,
    providers,
    retention,
    tenants,
)
from bottega.errors import ConflictError, NotFoundError
from bottega.tenants import audit, keys
from bottega.tenants.erase import Begin, Removed, erase_tenant
from bottega.tenants.limits import NO_LIMITS, StoredLimits
from bottega.tenants.retention import due, remove

ACTOR = "cli"

_BOOTSTRAP = "bootstrap"
_keys = api_keys.c


@asynccontextmanager
async def transactions(url: str) -> AsyncIterator[Begin]:
    """Yield a function that opens transactions with access to all tenants, one at a time.

    At the end of the block, the transactions' signals are sent to all processes.

    Raises:
        UnavailableError: the database is unreachable or not migrated, or the login may not use the
            role that has access to all tenants.
    """

    trust = ConnectionTrust(SilenceTimeouts())

    @asynccontextmanager
    async def begin() -> AsyncIterator[AsyncConnection]:
        connection = await connect(url, role=SYSTEM_ROLE, trust=trust)
        try:
            await require_current(connection)
            async with connection.transaction():
                yield AsyncConnection(connection)
        finally:
            await connection.close()

    yield begin
    if signals := trust.signals.take():
        async with begin() as tx:
            for channel, payload in signals:
                await tx.driver.execute("SELECT pg_notify($1, $2)", channel, payload)


@asynccontextmanager
async def transaction(url: str) -> AsyncIterator[AsyncConnection]:
    """Open a single transaction with access to all tenants."""
    async with transactions(url) as begin, begin() as tx:
        yield tx


async def provider_of(
    url: str, tenant: str, name: str
) -> tuple[UUID | None, dict[str, Any] | None]:
    """Return a tenant's id and its definition of a provider; ``None``: the tenant has none.

    Args:
        tenant: name of the tenant.
        name: name of the provider.
    """
    now, all_ = providers.c, provider_versions.c
    current = and_(
        all_.tenant_id == now.tenant_id, all_.name == now.name, all_.version == now.version
    )
    query = (
        select(all_.definition)
        .join_from(providers, provider_versions, current)
        .where(now.name == name, now.deleted_at.is_(None))
    )
    async with transaction(url) as tx:
        tenant_id = await tx.scalar(select(tenants.c.id).where(tenants.c.name == tenant))
        return tenant_id, await tx.scalar(query.where(now.tenant_id == tenant_id))


async def create_key(
    url: str,
    tenant: str,
    *,
    name: str,
    scopes: Collection[keys.Scope],
    expires: datetime | timedelta | None = None,
    require_user: bool = False,
    limits: StoredLimits = NO_LIMITS,
) -> tuple[RowMapping, str]:
    """Create a key; return the key's row, and the key itself, which no other call returns.

    Args:
        tenant: name of the tenant. If there is no such tenant, the function creates it.

    Raises:
        InvalidInputError, ConflictError: see :func:`keys.create`.
    """
    async with transaction(url) as tx:
        insert = postgresql.insert(tenants).values(name=tenant).on_conflict_do_nothing()
        await tx.execute(insert)
        result = await tx.execute(select(tenants.c.id).where(tenants.c.name == tenant))
        if isinstance(expires, timedelta):
            expires = await tx.scalar(select(func.now() + expires))
        tenant_id = result.scalar_one()
        return await keys.create(
            tx,
            tenant_id,
            ACTOR,
            name=name,
            scopes=scopes,
            expires_at=expires,
            require_user=require_user,
            limits=limits,
        )


async def list_keys(url: str, tenant: str | None = None) -> list[RowMapping]:
    """List the keys of all tenants, or of one tenant, by age, with the tenants' names."""
    query = (
        select(*keys.PUBLIC_COLUMNS, tenants.c.name.label("tenant"))
        .join(tenants, tenants.c.id == api_keys.c.tenant_id)
        .order_by(_keys.id)
    )
    if tenant is not None:
        query = query.where(tenants.c.name == tenant)
    async with transaction(url) as tx:
        return list((await tx.execute(query)).mappings())


async def revoke_key(url: str, prefix_or_id: str) -> RowMapping:
    """Revoke the key that has this prefix or id. Return the key's row.

    Raises:
        NotFoundError: there is no such key.
        ConflictError: several keys have the prefix.
    """
    same = or_(_keys.prefix == prefix_or_id, cast(_keys.id, Text) == prefix_or_id.lower())
    async with transaction(url) as tx:
        rows = (await tx.execute(select(*keys.PUBLIC_COLUMNS).where(same))).mappings().all()
        if not rows:
            raise NotFoundError(f"there is no key '{prefix_or_id}': see `bottega keys list`")
        if len(rows) > 1:
            raise ConflictError(f"several keys begin with '{prefix_or_id}': use the id of one key")
        await keys.revoke(tx, rows[0]["tenant_id"], ACTOR, rows[0]["id"])
        return rows[0]


async def keys_required(url: str) -> bool:
    """Return true if requests need keys, because a key was ever created. Any login may ask this.

    Raises:
        UnavailableError: the database is unreachable or not migrated.
    """
    connection = await connect(url)
    try:
        await require_current(connection)
        return bool(await connection.fetchval(keys.REQUIRED))
    finally:
        await connection.close()


@asynccontextmanager
async def temporary_key(
    url: str, *, name: str, good_for: timedelta, scopes: Collection[keys.Scope]
) -> AsyncIterator[str | None]:
    """Create a key of the default tenant, and delete the key after the block.

    Yield ``None`` if requests need no key, because no key was ever created.
    """
    if not await keys_required(url):
        yield None
        return
    row, key = await create_key(url, "default", name=name, scopes=scopes, expires=good_for)
    try:
        yield key
    finally:
        async with transaction(url) as tx:
            own = _keys.tenant_id == row["tenant_id"], _keys.id == row["id"]
            await tx.execute(delete(api_keys).where(*own))
            await audit.note(tx, row["tenant_id"], ACTOR, "key.delete", row["prefix"])


async def list_tenants(url: str) -> list[RowMapping]:
    """List all tenants by name, each with the number of the tenant's valid ``keys``."""
    live = func.count(_keys.id).filter(_keys.revoked_at.is_(None)).label("keys")
    query = (
        select(tenants, live)
        .outerjoin(api_keys, api_keys.c.tenant_id == tenants.c.id)
        .group_by(tenants.c.id)
    )
    async with transaction(url) as tx:
        return list((await tx.execute(query.order_by(tenants.c.name))).mappings())


async def delete_tenant(url: str, name: str) -> Removed:
    """Remove a tenant with all its data. Return the number of removed rows by table.

    Raises:
        NotFoundError: there is no tenant of that name.
    """
    async with transactions(url) as begin:
        return await erase_tenant(begin, name, ACTOR)


async def retain(
    url: str, name: str, changes: Mapping[str, float | None], reset: Collection[str] = ()
) -> dict[str, float | None]:
    """Change a tenant's retention. Return the tenant's own values, in days, by kind of data.

    Args:
        changes: new number of days by kind of data; ``None``: keep the data for ever.
        reset: kinds of data for which the tenant's value is removed; then the settings apply.

    Raises:
        NotFoundError: there is no tenant of that name.
    """
    own = retention.c
    async with transaction(url) as tx:
        tenant_id = await _id_of(tx, name)
        obsolete = own.kind.in_([*reset, *changes])
        await tx.execute(delete(retention).where(own.tenant_id == tenant_id, obsolete))
        for kind, days in changes.items():
            row = {"tenant_id": tenant_id, "kind": kind, "days": days}
            await tx.execute(insert(retention).values(row))
        if changes or reset:
            details = {**changes, **dict.fromkeys(reset, "default")}
            await audit.note(tx, tenant_id, ACTOR, "retention.change", name, details)
        query = select(own.kind, own.days).where(own.tenant_id == tenant_id).order_by(own.kind)
        return {row.kind: row.days for row in await tx.execute(query)}


async def prune(
    url: str,
    days: Mapping[str, float | None],
    *,
    tenant: str | None = None,
    own: bool = True,
    dry_run: bool = False,
) -> dict[str, Removed]:
    """Remove data that are too old. Return the numbers of removed rows by tenant.

    Args:
        days: see :func:`retention.due`.
        tenant, own: see :func:`retention.due`.
        dry_run: only count the rows.

    Raises:
        NotFoundError: there is no tenant of that name.
    """
    removed: dict[str, Removed] = {}
    async with transactions(url) as begin:

        @asynccontextmanager
        async def begin_for(tenant_id: UUID) -> AsyncIterator[AsyncConnection]:
            async with begin() as tx:
                await name_tenant(tx, tenant_id)
                yield tx

        async with begin() as tx:
            if tenant is not None:
                await _id_of(tx, tenant)
            due_rows = await due(tx, days, tenant=tenant, own=own)
        for each in due_rows:
            page = await remove(begin_for, each, count_only=dry_run)
            if page:
                removed[each.tenant] = removed.get(each.tenant, Removed()) + page
            if page and not dry_run:
                about = {"removed": page, "before": each.before.isoformat()}
                async with begin() as tx:
                    await audit.note(tx, each.tenant_id, ACTOR, "retention.prune", each.kind, about)
    return removed


async def _id_of(tx: AsyncConnection, name: str) -> UUID:
    tenant_id: UUID | None = await tx.scalar(select(tenants.c.id).where(tenants.c.name == name))
    if tenant_id is None:
        raise NotFoundError(f"there is no tenant '{name}': see `bottega tenants list`")
    return tenant_id


async def store_bootstrap_key(url: str, key: str) -> bool:
    """Store the bootstrap key as an admin key of the default tenant; return true if it is new.

    A revoked key stays revoked.
    """
    prefix = f"{_BOOTSTRAP}_{token_hex(4)}"
    row = {"name": _BOOTSTRAP, "prefix": prefix, "key_hash": keys.hashed(key), "scopes": ["admin"]}
    insert = postgresql.insert(api_keys).values(tenant_id=DEFAULT_TENANT, **row)
    added = insert.on_conflict_do_nothing(index_elements=[_keys.key_hash]).returning(_keys.id)
    async with transaction(url) as tx:
        if await tx.scalar(added) is None:
            return False
        await audit.note(tx, DEFAULT_TENANT, ACTOR, "key.create", prefix, {"scopes": ["admin"]})
        return True
