"""API keys: create, list, revoke. A key is shown once; only its hash is stored.

A key has 32 random bytes, so one round of SHA-256 suffices: it cannot be guessed.
"""

import hashlib
import secrets
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args
from uuid import UUID

from sqlalchemy import DateTime, RowMapping, func, insert, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.pages import PageItems, fetch_page, paged
from bottega.db.tables import api_keys
from bottega.errors import ConflictError, InvalidInputError, NotFoundError
from bottega.tenants import audit

Scope = Literal["read", "run", "define", "approve", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
INCLUDED: Mapping[Scope, frozenset[Scope]] = {
    "read": frozenset(("read",)),
    "run": frozenset(("run", "read")),
    "define": frozenset(("define", "read")),
    "approve": frozenset(("approve",)),
    "admin": frozenset(SCOPES),
}
"""The scopes that each scope includes, itself among them."""
MOST_KEYS = 1000
"""Limit of a tenant's keys that are not revoked."""

_PUBLIC = string.ascii_lowercase + string.digits
_SECRET_BYTES = 32
_keys = api_keys.c
PUBLIC_COLUMNS = tuple(column for column in _keys if column is not _keys.key_hash)


@dataclass(frozen=True, slots=True)
class Key:
    """A stored key, without the secret.

    Attributes:
        prefix: the public part that identifies it to people.
        scopes: what it may do, at least one.
        expires_at: time from which it is invalid; ``None``: never.
        require_user: its requests name the end user that they act for.
    """

    tenant_id: UUID
    id: UUID
    prefix: str
    scopes: Sequence[Scope]
    expires_at: datetime | None
    require_user: bool = False

    def expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


def includes(scopes: Iterable[Scope], needed: Scope) -> bool:
    """Return true if a key with ``scopes`` permits actions that need ``needed``."""
    return any(needed in INCLUDED[scope] for scope in scopes)


def hashed(key: str) -> bytes:
    """Return the stored form of a key."""
    return hashlib.sha256(key.encode()).digest()


async def create(
    tx: AsyncConnection,
    tenant_id: UUID,
    actor: str,
    *,
    name: str,
    scopes: Collection[Scope],
    expires_at: datetime | None,
    require_user: bool = False,
) -> tuple[RowMapping, str]:
    """Create a key; return its row and, for the only time, the key itself.

    Args:
        scopes: at least one, in any order.

    Raises:
        InvalidInputError: the expiry is in the past.
        ConflictError: ``too_many_keys``.
    """
    until = literal(expires_at, DateTime(timezone=True))
    if expires_at is not None and await tx.scalar(select(func.now() >= until)):
        raise InvalidInputError("the expiry is in the past", pointer="/expires_at")
    live = select(func.count()).where(_keys.tenant_id == tenant_id, _keys.revoked_at.is_(None))
    if (await tx.scalar(live) or 0) >= MOST_KEYS:
        raise ConflictError(
            f"a tenant can have at most {MOST_KEYS} keys: revoke unused ones",
            code="too_many_keys",
        )
    prefix = f"btg_{''.join(secrets.choice(_PUBLIC) for _ in range(8))}"
    stored = [scope for scope in SCOPES if scope in scopes]
    key = f"{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    added = insert(api_keys).values(
        tenant_id=tenant_id,
        name=name,
        prefix=prefix,
        key_hash=hashed(key),
        scopes=stored,
        require_user=require_user,
        expires_at=expires_at,
    )
    row = (await tx.execute(added.returning(*PUBLIC_COLUMNS))).mappings().one()
    details = {"scopes": stored, "name": name} | ({"require_user": True} if require_user else {})
    await audit.note(tx, tenant_id, actor, "key.create", prefix, details)
    return row, key


async def get(tx: AsyncConnection, tenant_id: UUID, key_id: UUID) -> RowMapping:
    """Return a key's row, without its hash.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    found = select(*PUBLIC_COLUMNS).where(_keys.tenant_id == tenant_id, _keys.id == key_id)
    row = (await tx.execute(found)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no key {key_id}")
    return row


async def page(
    tx: AsyncConnection,
    tenant_id: UUID,
    *,
    after: UUID | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List a page of the tenant's keys by age, revoked ones too, after the id ``after``."""
    query = select(*PUBLIC_COLUMNS).where(_keys.tenant_id == tenant_id)
    query = paged(query, _keys.id, after=after, descending=descending)
    return await fetch_page(tx, query, limit)


async def revoke(tx: AsyncConnection, tenant_id: UUID, actor: str, key_id: UUID) -> None:
    """Revoke a key, effective everywhere within seconds after the commit.

    Raises:
        NotFoundError: unknown, or another tenant's.
    """
    row = await get(tx, tenant_id, key_id)
    if row["revoked_at"] is not None:
        return
    await tx.execute(
        update(api_keys)
        .values(revoked_at=func.now())
        .where(_keys.tenant_id == tenant_id, _keys.id == key_id)
    )
    await audit.note(tx, tenant_id, actor, "key.revoke", row["prefix"])
