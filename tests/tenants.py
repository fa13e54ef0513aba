"""Tenants with keys, for tests of servers that ask for one."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import httpx2

from bottega.tenants import operator
from bottega.tenants.keys import Scope
from tests.service import Running, client_of


@dataclass(frozen=True, slots=True)
class ApiKey:
    """ApiKey of a key."""

    tenant_id: UUID
    key_id: UUID
    prefix: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its requests."""
        return {"Authorization": f"Bearer {self.key}"}

    def client(self, server: Running) -> httpx2.AsyncClient:
        """Create its client of a server; the caller closes it."""
        return client_of(server.port, headers=self.headers)


async def holder(
    url: str,
    tenant: str = "acme",
    scope: Scope = "admin",
    *more: Scope,
    expires: datetime | timedelta | None = None,
    require_user: bool = False,
) -> ApiKey:
    """Make a key of a tenant with a scope or several; create the tenant if it is missing.

    Args:
        url: of the database. A running server needs a key from then on.
    """
    scopes = (scope, *more)
    made = await operator.create_key(
        url, tenant, name="a test's", scopes=scopes, expires=expires, require_user=require_user
    )
    row, key = made
    return ApiKey(row["tenant_id"], row["id"], row["prefix"], key)
