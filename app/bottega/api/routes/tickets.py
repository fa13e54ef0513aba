"""Tickets for browsers, whose WebSockets cannot send an Authorization header.

``bottega.api.auth`` redeems them before any route. A ticket has the scopes of the key that
requested it, and ends with that key.
"""

import secrets
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter
from pydantic import ConfigDict, Field

from bottega.api.errors import problems
from bottega.api.schemas.base import Answer, Body
from bottega.api.shared.deps import PrincipalDep, ReadTenant, ServiceDep
from bottega.db.engine import acting_as
from bottega.tenants.keys import hashed

router = APIRouter(prefix="/v1/ws-tickets", tags=["runs"])

VALID_S = 30.0

_ISSUE = """
INSERT INTO ws_tickets (tenant_id, ticket_hash, run_id, expires_at, scopes, key_id)
VALUES ($1, $2, $3, now() + make_interval(secs => $4), $5, $6) RETURNING expires_at
"""


class NewTicket(Body):
    """A request for a ticket."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})

    run_id: Annotated[
        Annotated[UUID, Field(strict=False)] | None,
        Field(description="Valid for this run only; null: for all of the tenant's."),
    ] = None


class Ticket(Answer):
    """A ticket, which opens one WebSocket."""

    ticket: Annotated[
        str, Field(description='Offer the subprotocols `["bottega.v1", "ticket.<ticket>"]`.')
    ]
    expires_at: datetime


@router.post(
    "",
    operation_id="create_ws_ticket",
    summary="Get a ticket for a WebSocket",
    description=(
        "For browsers, whose WebSockets cannot send an Authorization header. The ticket is valid "
        "once, for 30 seconds, at any API process, with the scopes of your key."
    ),
    status_code=201,
    response_model=Ticket,
    responses=problems(400, 404, 413, 415),
)
async def create(
    service: ServiceDep, principal: PrincipalDep, tenant: ReadTenant, body: NewTicket
) -> Any:
    if body.run_id is not None:
        await service.streams.cursor_of(tenant, body.run_id)
    ticket = secrets.token_urlsafe(32)
    row = tenant, hashed(ticket), body.run_id, VALID_S, list(principal.scopes), principal.key_id
    async with acting_as(service.database.pool, tenant) as connection:
        expires_at = await connection.fetchval(_ISSUE, *row)
    return Ticket(ticket=ticket, expires_at=expires_at)
