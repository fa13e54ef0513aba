"""What routes ask for: the service's parts, who asks, and a transaction of theirs.

Every route but the public ones asks for one of ``Tenant``, ``ReadTenant`` and ``AdminTenant``,
which check that who asks may do it; app/bottega/api/openapi.py insists on it.
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


# Not awaiting anything, and still ``async``: FastAPI gives a plain function a thread to run in.
ServiceDep = Annotated[Service, Depends(_service)]


async def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


PrincipalDep = Annotated[Principal, Depends(_principal)]
"""Who asks; says nothing about what they may do."""


async def _actor(principal: PrincipalDep) -> str:
    return principal.actor


Actor = Annotated[str, Depends(_actor)]
"""Who asks, for the audit log."""


async def _tenant(request: Request, principal: PrincipalDep) -> UUID:
    principal.need(_usual_scope(request.method))
    return principal.tenant_id


async def _read_tenant(principal: PrincipalDep) -> UUID:
    principal.need("read")
    return principal.tenant_id


async def _admin_tenant(principal: PrincipalDep) -> UUID:
    principal.need("admin")
    return principal.tenant_id


Tenant = Annotated[UUID, Depends(_tenant)]
"""Whose data it is about: reading needs the scope ``read``, everything else ``run``."""
ReadTenant = Annotated[UUID, Depends(_read_tenant)]
"""The same where a POST only reads."""
AdminTenant = Annotated[UUID, Depends(_admin_tenant)]
"""The same for administration, which needs the scope ``admin``."""


_SCOPES: dict[Callable[..., Any], Scope] = {_read_tenant: "read", _admin_tenant: "admin"}


def required_scope(dependency: Callable[..., Any], method: str) -> Scope | None:
    """What a dependency of a route asks of a key; ``None``: nothing."""
    return _usual_scope(method) if dependency is _tenant else _SCOPES.get(dependency)


def _usual_scope(method: str) -> Scope:
    return "read" if method in ("GET", "HEAD") else "run"


async def _transaction(
    service: ServiceDep, principal: PrincipalDep
) -> AsyncIterator[AsyncConnection]:
    async with service.database.begin(principal.tenant_id) as connection:
        yield connection


Transaction = Annotated[AsyncConnection, Depends(_transaction, scope="function")]
"""A transaction of the tenant's, committed *before* the answer leaves: a commit that fails is an
error answer. (FastAPI's default scope commits after the response was sent.)"""


async def _turn(service: ServiceDep, principal: PrincipalDep) -> AsyncIterator[None]:
    async with service.database.turn(principal.tenant_id):
        yield


Turn = Depends(_turn, scope="function")
"""Of routes that take connections of the driver's pool: a tenant has only so many at a time."""
