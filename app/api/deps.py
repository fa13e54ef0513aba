"""What routes ask for: the service's parts, the tenant, and a transaction."""

from collections.abc import AsyncIterator
from typing import Annotated
from uuid import UUID

from fastapi import Depends, Request
from sqlalchemy.ext.asyncio import AsyncConnection

from app.container import Service
from app.db.base import DEFAULT_TENANT


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# Not awaiting anything, and still ``async``: FastAPI gives a plain function a thread to run in.
ServiceDep = Annotated[Service, Depends(_service)]


async def _tenant() -> UUID:
    """Until there are keys, everybody is the default tenant."""
    return DEFAULT_TENANT


Tenant = Annotated[UUID, Depends(_tenant)]


async def _actor() -> str:
    """Until there are keys, nobody has a name."""
    return "local"


Actor = Annotated[str, Depends(_actor)]
"""Who asks, for the audit log."""


async def _transaction(service: ServiceDep, tenant: Tenant) -> AsyncIterator[AsyncConnection]:
    async with service.database.begin(tenant) as connection:
        yield connection


Transaction = Annotated[AsyncConnection, Depends(_transaction, scope="function")]
"""A transaction that is committed *before* the answer leaves: a commit that fails is an error
answer. (FastAPI's default scope commits after the response was sent.)"""
