"""Reads of providers beyond what all definitions have."""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import and_, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.db.tables import model_breakers, provider_versions, providers
from bottega.definitions.models import DEFAULT, KnownProvider, listed


def possible_names(model: str | Sequence[str] | None) -> Iterable[str]:
    """Return the names of providers that an agent's models may mean."""
    yield DEFAULT
    for reference in listed(model):
        yield (reference or "").partition("/")[0].partition(":")[0]


async def known_providers(
    connection: AsyncConnection, tenant_id: UUID, names: Iterable[str]
) -> dict[str, KnownProvider]:
    """Return a tenant's own providers among these names."""
    now, all_ = providers.c, provider_versions.c
    current = and_(
        all_.tenant_id == now.tenant_id, all_.name == now.name, all_.version == now.version
    )
    query = (
        select(now.name, now.version, all_.definition)
        .join_from(providers, provider_versions, current)
        .where(now.tenant_id == tenant_id, now.deleted_at.is_(None), now.name.in_(set(names)))
    )
    return {
        row.name: KnownProvider(
            row.version,
            row.definition["dialect"],
            row.definition["models"],
            row.definition["headers"],
            row.definition["base_url"],
            row.definition["prices"],
        )
        for row in await connection.execute(query)
    }


async def open_breakers(
    connection: AsyncConnection, tenant_id: UUID, provider: str, *, of_operator: bool
) -> dict[str, dict[str, Any]]:
    """Return ``state`` and ``retry_at`` of the breakers that are not closed, by model."""
    row = model_breakers.c
    is_probed = func.coalesce(row.probe_until > func.clock_timestamp(), False)
    query = (
        select(row.model, is_probed.label("is_probed"), row.retry_at, row.probe_until)
        .where(row.tenant_id == tenant_id, row.is_operators == of_operator)
        .where(row.provider == provider)
        .order_by(row.model)
        .limit(1000)
    )
    return {
        each.model: {
            "state": "half_open" if each.is_probed else "open",
            "retry_at": each.probe_until if each.is_probed else each.retry_at,
        }
        for each in await connection.execute(query)
    }
