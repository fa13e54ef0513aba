"""Webhook secrets of tenants.

The database stores a secret in plain text, because the service signs with it. A secret is shown
only once, and expires a day after the tenant creates the next secret. ``BOTTEGA_WEBHOOK_SECRET`` is
the first secret of the tenant ``default``; it expires in the same way.
"""

import secrets
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy import RowMapping, delete, func, insert, or_, select, text, update

from bottega.db.pool import AsyncConnection
from bottega.db.tables import DEFAULT_TENANT, webhook_secrets
from bottega.errors import ConflictError
from bottega.tenants import audit

MOST_VALID = 5
"""Maximum number of valid secrets of a tenant."""

_OVERLAP = text("interval '1 day'")
_rows = webhook_secrets.c
_PUBLIC_COLUMNS = (_rows.id, _rows.created_at, _rows.expires_at)
_FIRST: Mapping[str, None] = {"id": None, "created_at": None, "expires_at": None}
_SIGNING = """
SELECT ARRAY(SELECT s.secret FROM webhook_secrets s
             WHERE s.tenant_id = $1 AND (s.expires_at IS NULL OR s.expires_at > now())
             ORDER BY s.id DESC) AS own,
       NOT EXISTS (SELECT FROM webhook_secrets s WHERE s.tenant_id = $1
                   AND s.created_at <= now() - interval '1 day') AS first
"""


async def signing(
    connection: asyncpg.Connection, tenant_id: UUID, first: str | None
) -> Sequence[str]:
    """Return the secrets that are valid now, the newest one first.

    Args:
        first: the first secret of the tenant ``default``, from the settings.
    """
    row = await connection.fetchrow(_SIGNING, tenant_id)
    if tenant_id == DEFAULT_TENANT and first is not None and row["first"]:
        return [*row["own"], first]
    own: list[str] = row["own"]
    return own


async def page(tx: AsyncConnection, tenant_id: UUID, *, has_first: bool) -> list[Mapping[str, Any]]:
    """List the valid secrets, the newest one first, without the secret texts.

    Args:
        has_first: true if the settings contain the first secret of the tenant ``default``.
    """
    valid = or_(_rows.expires_at.is_(None), _rows.expires_at > func.now())
    query = (
        select(*_PUBLIC_COLUMNS)
        .where(_rows.tenant_id == tenant_id, valid)
        .order_by(_rows.id.desc())
    )
    rows: list[Mapping[str, Any]] = [*(await tx.execute(query)).mappings()]
    if tenant_id == DEFAULT_TENANT and has_first:
        ends = select(func.min(_rows.created_at) + _OVERLAP).where(_rows.tenant_id == tenant_id)
        past = select(func.coalesce(ends.scalar_subquery() <= func.now(), False))
        if not await tx.scalar(past):
            rows.append({**_FIRST, "expires_at": await tx.scalar(ends)})
    return rows


async def can_sign(tx: AsyncConnection, tenant_id: UUID, *, has_first: bool) -> bool:
    """Return true if the tenant has a secret; see :func:`page`."""
    if tenant_id == DEFAULT_TENANT and has_first:
        return True
    own = select(_rows.id).where(_rows.tenant_id == tenant_id).limit(1)
    return await tx.scalar(own) is not None


async def rotate(tx: AsyncConnection, tenant_id: UUID, actor: str) -> tuple[RowMapping, str]:
    """Create the tenant's next secret. Return the row, and (only this time) the secret's text.

    The previous secret (at first: the secret from the settings, if any) stays valid for a day.
    Expired secrets are removed.

    Raises:
        ConflictError: ``too_many``.
    """
    lock = func.hashtextextended(f"webhook-secret {tenant_id}", 0)
    await tx.execute(select(func.pg_advisory_xact_lock(lock)))
    own = _rows.tenant_id == tenant_id
    await tx.execute(delete(webhook_secrets).where(own, _rows.expires_at <= func.now()))
    if (await tx.scalar(select(func.count()).where(own)) or 0) >= MOST_VALID:
        raise ConflictError(
            f"the tenant has {MOST_VALID} valid webhook secrets, which is the maximum: wait until "
            "the oldest has expired (GET /v1/webhook-secret)",
            code="too_many",
        )
    ending = update(webhook_secrets).where(own, _rows.expires_at.is_(None))
    await tx.execute(ending.values(expires_at=func.now() + _OVERLAP))
    secret = f"whsec_{b64encode(secrets.token_bytes(32)).decode()}"
    added = (
        insert(webhook_secrets)
        .values(tenant_id=tenant_id, secret=secret)
        .returning(*_PUBLIC_COLUMNS)
    )
    row = (await tx.execute(added)).mappings().one()
    await audit.note(tx, tenant_id, actor, "webhook_secret.rotate", str(row["id"]))
    return row, secret
