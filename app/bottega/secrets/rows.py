"""Stored secrets of tenants: store, list, read, delete, and encrypt again with a new key.

A change notifies all processes that have secrets in memory, see :mod:`bottega.secrets.lookup`.
"""

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import httpx2
from sqlalchemy import ColumnElement, RowMapping, and_, func, insert, select, tuple_, update

from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.pool import AsyncConnection, acting_as
from bottega.db.tables import secrets
from bottega.errors import ConflictError, InvalidInputError, NotFoundError, VersionConflictError
from bottega.sealing import CannotOpenError, Keyring, Place
from bottega.tenants import audit
from bottega.tools.guard import AllowList, host_address

CHANNEL = "bottega_secrets"
MOST_SECRETS = 100
"""Maximum number of a tenant's secrets: redaction searches each text for all of them."""
MOST_NAMES = 1000
"""Maximum number of names of a tenant's secrets, including deleted secrets."""

_AT_ONCE = 100
_rows = secrets.c
_PUBLIC_COLUMNS = (_rows.name, _rows.version, _rows.hosts, _rows.created_at, _rows.updated_at)
_READ = """
SELECT name, version, hosts, value FROM secrets WHERE tenant_id = $1 AND value IS NOT NULL
"""


async def put(
    tx: AsyncConnection,
    tenant_id: UUID,
    actor: str,
    keyring: Keyring,
    *,
    name: str,
    value: str,
    hosts: Sequence[str],
    if_version: int | None,
) -> tuple[RowMapping, bool]:
    """Store a secret or a new version of it; return the row, and true if the secret is new.

    Raises:
        VersionConflictError: ``if_version`` is not the current version.
        ConflictError: ``too_many``.
    """
    await _one_at_a_time(tx, tenant_id)
    query = select(_rows.version, _rows.value.is_not(None).label("is_live"))
    found = (await tx.execute(query.where(_named(tenant_id, name)))).one_or_none()
    is_live = found is not None and found.is_live
    _refuse_other(name, found.version if found is not None and is_live else None, if_version)
    if not is_live:
        await _refuse_excess(tx, tenant_id, is_new=found is None)
    version = 1 if found is None else found.version + 1
    sealed = keyring.seal(value, Place(tenant_id, name, version))
    content = {"version": version, "value": sealed, "hosts": list(hosts)}
    if found is None:
        statement: Any = insert(secrets).values(tenant_id=tenant_id, name=name, **content)
    else:
        began = {} if is_live else {"created_at": func.now()}
        changed = update(secrets).where(_named(tenant_id, name))
        statement = changed.values(**content, **began, updated_at=func.now())
    row = (await tx.execute(statement.returning(*_PUBLIC_COLUMNS))).mappings().one()
    await _changed(tx, tenant_id)
    about = {"version": version, "hosts": list(hosts)}
    await audit.note(tx, tenant_id, actor, "secret.put", name, about)
    return row, not is_live


async def page(
    tx: AsyncConnection, tenant_id: UUID, *, after: str | None, descending: bool, limit: int
) -> PageItems[dict[str, Any]]:
    """List a page of the tenant's secrets by name, without values."""
    query = select(*_PUBLIC_COLUMNS).where(_rows.tenant_id == tenant_id, _rows.value.is_not(None))
    query = paged(query, _rows.name, after=after, descending=descending)
    return await fetch_page(tx, query, limit)


async def get(tx: AsyncConnection, tenant_id: UUID, name: str) -> RowMapping:
    """Return a secret's row without the value.

    Raises:
        NotFoundError: the tenant has no secret of this name.
    """
    query = select(*_PUBLIC_COLUMNS).where(_named(tenant_id, name), _rows.value.is_not(None))
    row = (await tx.execute(query)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no secret '{name}'")
    return row


async def delete(
    tx: AsyncConnection, tenant_id: UUID, actor: str, name: str, if_version: int | None
) -> None:
    """Delete a secret's value; its name and version stay.

    Raises:
        NotFoundError: the tenant has no secret of this name.
        VersionConflictError: ``if_version`` is not the current version.
    """
    await _one_at_a_time(tx, tenant_id)
    row = await get(tx, tenant_id, name)
    _refuse_other(name, row["version"], if_version)
    gone: dict[str, Any] = {"value": None, "hosts": [], "updated_at": func.now()}
    await tx.execute(update(secrets).where(_named(tenant_id, name)).values(**gone))
    await _changed(tx, tenant_id)
    await audit.note(tx, tenant_id, actor, "secret.delete", name, {"version": row["version"]})


async def hosts_of(
    tx: AsyncConnection, tenant_id: UUID, names: Iterable[str]
) -> Mapping[str, Sequence[str]]:
    """Return the allowed hosts of stored secrets with these names, by the secret's name."""
    query = select(_rows.name, _rows.hosts).where(
        _rows.tenant_id == tenant_id, _rows.name.in_(set(names)), _rows.value.is_not(None)
    )
    return {row.name: row.hosts for row in await tx.execute(query)}


async def read(pool: asyncpg.Pool, tenant_id: UUID) -> Sequence[Mapping[str, Any]]:
    """Return the rows of all secrets of a tenant, with encrypted values."""
    async with acting_as(pool, tenant_id) as connection:
        rows: Sequence[Mapping[str, Any]] = await connection.fetch(_READ, tenant_id)
        return rows


class Resealed(NamedTuple):
    """Result of encrypting a page of secrets again.

    Attributes:
        last: the last secret of the page; ``None``: this was the last page.
        changed: number of secrets that were not encrypted with the first key until now.
        unreadable: number of secrets that no key can decrypt.
    """

    last: Place | None
    changed: int
    unreadable: int


async def seal_again(
    tx: AsyncConnection, actor: str, keyring: Keyring, after: Place | None
) -> Resealed:
    """Encrypt a page of all tenants' secrets with the first key; versions do not change.

    Args:
        tx: a transaction that may access the rows of all tenants.
        after: the last secret of the previous page.
    """
    own = tuple_(_rows.tenant_id, _rows.name)
    query = select(_rows.tenant_id, _rows.name, _rows.version, _rows.value)
    if after is not None:
        query = query.where(own > tuple_(after.tenant_id, after.name))
    query = query.where(_rows.value.is_not(None)).order_by(_rows.tenant_id, _rows.name)
    last, changed, unreadable = None, 0, 0
    for row in await tx.execute(query.limit(_AT_ONCE).with_for_update()):
        last = Place(row.tenant_id, row.name, row.version)
        if keyring.is_current(row.value):
            continue
        try:
            sealed = keyring.seal(keyring.open(row.value, last), last)
        except CannotOpenError:
            unreadable += 1
            continue
        await tx.execute(update(secrets).where(_named(*last[:2])).values(value=sealed))
        await audit.note(tx, row.tenant_id, actor, "secret.reencrypt", row.name)
        changed += 1
    return Resealed(last, changed, unreadable)


async def _one_at_a_time(tx: AsyncConnection, tenant_id: UUID) -> None:
    """Lock the tenant's secrets, so that concurrent changes together cannot exceed the limits."""
    lock = func.hashtextextended(f"secrets {tenant_id}", 0)
    await tx.execute(select(func.pg_advisory_xact_lock(lock)))


async def _refuse_excess(tx: AsyncConnection, tenant_id: UUID, *, is_new: bool) -> None:
    live = func.count().filter(_rows.value.is_not(None)).label("live")
    query = select(func.count().label("names"), live).where(_rows.tenant_id == tenant_id)
    found = (await tx.execute(query)).one()
    if found.live >= MOST_SECRETS:
        detail = f"a tenant can have at most {MOST_SECRETS} secrets: delete unused secrets"
        raise ConflictError(detail, code="too_many")
    if is_new and found.names >= MOST_NAMES:
        detail = (
            f"the tenant has {MOST_NAMES} names of secrets, the maximum: use a deleted name again"
        )
        raise ConflictError(detail, code="too_many")


def _refuse_other(name: str, version: int | None, if_version: int | None) -> None:
    if if_version in (None, version):
        return
    current = "deleted or was never stored" if version is None else f"at version {version}"
    raise VersionConflictError(
        f"secret '{name}' is {current}, not at version {if_version}: read it again and repeat "
        "the change"
    )


async def _changed(tx: AsyncConnection, tenant_id: UUID) -> None:
    await tx.execute(select(func.send_signal(CHANNEL, str(tenant_id))))


def _named(tenant_id: UUID, name: str) -> ColumnElement[bool]:
    return and_(_rows.tenant_id == tenant_id, _rows.name == name)


def refuse_stored(name: str, hosts: Iterable[str], url: str, allowed: AllowList) -> None:
    """Refuse to send a stored secret to a host that is not allowed, or unencrypted over a network.

    Args:
        hosts: hosts that may get the secret.
        allowed: private hosts and networks that the operator allows.

    Raises:
        InvalidInputError: ``secret_not_for_host``, ``secret_needs_https``.
    """
    parsed = httpx2.URL(url)
    host = _host_of(parsed)
    if host not in hosts:
        raise InvalidInputError(
            f"the secret '{name}' must not be sent to {host}: its hosts are {', '.join(hosts)}",
            code="secret_not_for_host",
        )
    if parsed.scheme != "https" and not _is_open_loopback(host, allowed):
        raise InvalidInputError(
            f"the secret '{name}' is sent over https only: write the address of {host} with https",
            code="secret_needs_https",
        )


def refuse_environment(
    name: str, hosts: Iterable[str] | None, url: str, *, may_be_unset: bool
) -> None:
    """Refuse to send a secret of the operator's environment to a URL.

    Args:
        hosts: hosts of the secret in ``BOTTEGA_SECRET_HOSTS``; ``None``: the setting has no entry
            for the secret.
        may_be_unset: true: a secret without an entry in the setting may be sent to any host.

    Raises:
        InvalidInputError: ``secret_host_unset``, ``secret_not_for_host``.
    """
    if hosts is None:
        if may_be_unset:
            return
        raise InvalidInputError(
            f"the secret '{name}' has no hosts: store it with PUT /v1/secrets/{name}, or ask the "
            "operator of this server to set the secret's hosts in BOTTEGA_SECRET_HOSTS",
            code="secret_host_unset",
        )
    host = _host_of(httpx2.URL(url))
    if host not in map(str.lower, hosts):
        raise InvalidInputError(
            f"the secret '{name}' must not be sent to {host}: BOTTEGA_SECRET_HOSTS names other "
            "hosts for it",
            code="secret_not_for_host",
        )


def as_compared(host: str) -> str:
    """Return a host's name or address in the form in which hosts are compared.

    Raises:
        InvalidInputError: the text is neither a host name nor an address.
    """
    address = host_address(host)
    return host.removesuffix(".") if address is None else str(address)


def _host_of(url: httpx2.URL) -> str:
    host = url.raw_host.decode("ascii").lower()
    try:
        return as_compared(host)
    except InvalidInputError:
        return host  # an invalid name, which no secret has as a host


def _is_open_loopback(host: str, allowed: AllowList) -> bool:
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    return address.is_loopback and (allowed.has_name(host) or allowed.has_address(address))
