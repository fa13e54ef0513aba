"""Dependencies of routes: the service, the caller, and a transaction.

Every route that is not public depends on ``Tenant``, ``DefineTenant``, ``ReadTenant``,
``PeopleTenant`` or ``AdminTenant``, which check the key's scopes.
``bottega.api.documents.openapi`` enforces this.
"""

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Request
from sqlalchemy.ext.asyncio import AsyncConnection

from bottega.api.auth import Principal
from bottega.container import Service
from bottega.tenants.keys import Scope


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# ``async`` without awaiting anything: FastAPI would run a plain function in a thread.
ServiceDep = Annotated[Service, Depends(_service)]


async def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


PrincipalDep = Annotated[Principal, Depends(_principal)]
"""Caller, without a check of its scopes."""


async def _actor(principal: PrincipalDep) -> str:
    return principal.actor


Actor = Annotated[str, Depends(_actor)]
"""Name of the caller in the audit log."""


async def _tenant(request: Request, principal: PrincipalDep) -> UUID:
    principal.need(_usual_scope(request.method, "run"))
    return principal.tenant_id


async def _define_tenant(request: Request, principal: PrincipalDep) -> UUID:
    principal.need(_usual_scope(request.method, "define"))
    return principal.tenant_id


async def _read_tenant(principal: PrincipalDep) -> UUID:
    principal.need("read")
    return principal.tenant_id


async def _people_tenant(principal: PrincipalDep) -> UUID:
    principal.need("run", "approve")
    return principal.tenant_id


async def _admin_tenant(principal: PrincipalDep) -> UUID:
    principal.need("admin")
    return principal.tenant_id


Tenant = Annotated[UUID, Depends(_tenant)]
"""Tenant of the caller. GET and HEAD need the scope ``read``, other methods ``run``."""
DefineTenant = Annotated[UUID, Depends(_define_tenant)]
"""Tenant of the caller. GET and HEAD need the scope ``read``, other methods ``define``."""
ReadTenant = Annotated[UUID, Depends(_read_tenant)]
"""Tenant of the caller, for a POST that only reads (scope ``read``)."""
PeopleTenant = Annotated[UUID, Depends(_people_tenant)]
"""Tenant of the caller, for what people decide (scope ``run`` or ``approve``)."""
AdminTenant = Annotated[UUID, Depends(_admin_tenant)]
"""Tenant of the caller, for administration (scope ``admin``)."""


_SCOPES: dict[Callable[..., Any], tuple[Scope, ...]] = {
    _read_tenant: ("read",),
    _people_tenant: ("run", "approve"),
    _admin_tenant: ("admin",),
}
_CHANGING: dict[Callable[..., Any], Scope] = {_tenant: "run", _define_tenant: "define"}


def required_scopes(dependency: Callable[..., Any], method: str) -> tuple[Scope, ...]:
    """Return the scopes of which a route's dependency requires one; ``()``: it requires none."""
    changing = _CHANGING.get(dependency)
    return (_usual_scope(method, changing),) if changing else _SCOPES.get(dependency, ())


def _usual_scope(method: str, changing: Scope) -> Scope:
    return "read" if method in ("GET", "HEAD") else changing


async def _transaction(
    service: ServiceDep, principal: PrincipalDep
) -> AsyncIterator[AsyncConnection]:
    async with service.database.begin(principal.tenant_id) as connection:
        yield connection


Transaction = Annotated[AsyncConnection, Depends(_transaction, scope="function")]
"""Transaction of the tenant, committed *before* the response is sent (FastAPI's default: after)."""


async def _turn(service: ServiceDep, principal: PrincipalDep) -> AsyncIterator[None]:
    async with service.database.turn(principal.tenant_id):
        yield


Turn = Depends(_turn, scope="function")
"""Limit on a tenant's connections, for routes that use the driver's pool."""
