"""Dependencies of routes: the service, the caller, and a transaction.

Every route that is not public depends on ``Tenant``, ``DefineTenant``, ``ReadTenant``,
``ReviewTenant``, ``PeopleTenant``, ``AdminTenant`` or ``AnyTenant``, which check the key's scopes
and the names of query parameters. ``bottega.api.documents`` enforces this rule.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError

from bottega.api.auth import Principal
from bottega.container import Service
from bottega.db.pool import AsyncConnection
from bottega.errors import InvalidInputError
from bottega.tenants.keys import SCOPES, Scope


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# `_service` is ``async``, because FastAPI would run a plain function in a thread.
ServiceDep = Annotated[Service, Depends(_service)]


async def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


PrincipalDep = Annotated[Principal, Depends(_principal)]
"""Caller of a route, without a check of the caller's scopes."""


async def _actor(principal: PrincipalDep) -> str:
    return principal.actor


Actor = Annotated[str, Depends(_actor)]
"""Name of the caller in the audit log."""


async def _allowed(request: Request, principal: Principal, *scopes: Scope) -> UUID:
    if scopes:
        principal.need(*scopes)
    route = request.scope["route"]
    if route.path.startswith("/v1/"):
        if request.query_params:
            refuse_unknown_query(request.query_params, _query_names(route.dependant))
        await _refuse_body(request)
    return principal.tenant_id


async def _refuse_body(request: Request) -> None:
    headers, route = request.headers, request.scope["route"]
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if not has_body or route.body_field or "requestBody" in (route.openapi_extra or {}):
        return
    if b"".join((await request.body()).split()) not in (b"", b"{}"):
        raise InvalidInputError("this operation takes no body: leave it out")


NoBody = Depends(_refuse_body)
"""Dependency that refuses bodies on public routes. On all other routes, the check of the caller
refuses bodies.
"""


def refuse_unknown_query(names: Iterable[str], allowed: Collection[str]) -> None:
    """Check the names of query parameters.

    Args:
        allowed: names of the parameters that the operation has.

    Raises:
        RequestValidationError: a name is unknown.
    """
    there_are = f"the names are {', '.join(sorted(allowed))}" if allowed else "leave it out"
    message = f"there is no such query parameter here; {there_are}"
    unknown = [
        {"type": "extra_forbidden", "loc": ("query", name), "msg": message}
        for name in dict.fromkeys(names)
        if name not in allowed
    ]
    if unknown:
        raise RequestValidationError(unknown)


def _query_names(dependant: Dependant) -> set[str]:
    own = get_flat_params(Dependant(query_params=dependant.query_params))
    return {field.alias for field in own}.union(*map(_query_names, dependant.dependencies))


async def _tenant(request: Request, principal: PrincipalDep) -> UUID:
    return await _allowed(request, principal, _usual_scope(request.method, "run"))


async def _define_tenant(request: Request, principal: PrincipalDep) -> UUID:
    return await _allowed(request, principal, _usual_scope(request.method, "define"))


async def _read_tenant(request: Request, principal: PrincipalDep) -> UUID:
    return await _allowed(request, principal, "read")


async def _review_tenant(request: Request, principal: PrincipalDep) -> UUID:
    return await _allowed(request, principal, "read", "approve")


async def _people_tenant(request: Request, principal: PrincipalDep) -> UUID:
    return await _allowed(request, principal, "run", "approve")


async def _admin_tenant(request: Request, principal: PrincipalDep) -> UUID:
    return await _allowed(request, principal, "admin")


async def _any_tenant(request: Request, principal: PrincipalDep) -> UUID:
    return await _allowed(request, principal)


Tenant = Annotated[UUID, Depends(_tenant)]
"""Tenant of the caller. GET and HEAD need the scope ``read``, other methods ``run``."""
DefineTenant = Annotated[UUID, Depends(_define_tenant)]
"""Tenant of the caller. GET and HEAD need the scope ``read``, other methods ``define``."""
ReadTenant = Annotated[UUID, Depends(_read_tenant)]
"""Tenant of the caller, for a POST that only reads (scope ``read``)."""
ReviewTenant = Annotated[UUID, Depends(_review_tenant)]
"""Tenant of the caller, for reading interrupts and their runs (scope ``read`` or ``approve``)."""
PeopleTenant = Annotated[UUID, Depends(_people_tenant)]
"""Tenant of the caller, for people's decisions (scope ``run`` or ``approve``)."""
AdminTenant = Annotated[UUID, Depends(_admin_tenant)]
"""Tenant of the caller, for administration (scope ``admin``)."""
AnyTenant = Annotated[UUID, Depends(_any_tenant)]
"""Tenant of the caller, for routes that need no scope."""


_SCOPES: dict[Callable[..., Any], tuple[Scope, ...]] = {
    _read_tenant: ("read",),
    _review_tenant: ("read", "approve"),
    _people_tenant: ("run", "approve"),
    _admin_tenant: ("admin",),
    _any_tenant: SCOPES,
}
_CHANGING: dict[Callable[..., Any], Scope] = {_tenant: "run", _define_tenant: "define"}


def required_scopes(dependency: Callable[..., Any], method: str) -> tuple[Scope, ...]:
    """Return the scopes of a dependency. The caller needs one of them; ``()``: needs none."""
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
"""Transaction in the caller's tenant. The transaction is committed before the response is sent,
unlike with FastAPI's default.
"""


async def _turn(service: ServiceDep, principal: PrincipalDep) -> AsyncIterator[None]:
    async with service.database.turn(principal.tenant_id):
        yield


Turn = Depends(_turn, scope="function")
"""Limit on a tenant's connections, for routes that use the driver's pool."""
