"""Tickets for browsers, whose WebSockets and EventSources cannot send an Authorization header.

``bottega.api.auth`` redeems them before any route. A ticket has the scopes of the key that
requested it, and ends with that key.
"""

import secrets
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter
from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from bottega.api.errors import problems
from bottega.api.schemas.base import Answer, Body
from bottega.api.shared.deps import PrincipalDep, ReadTenant, ServiceDep
from bottega.db.engine import acting_as
from bottega.tenants.keys import hashed

router = APIRouter(prefix="/v1/ws-tickets", tags=["runs"])

VALID_S: dict[str, float] = {"websocket": 30.0, "sse": 3600.0}
"""By what a ticket opens, in seconds."""

_ISSUE = """
INSERT INTO ws_tickets (tenant_id, ticket_hash, opens, run_id, expires_at, scopes, key_id)
VALUES ($1, $2, $3, $4, now() + make_interval(secs => $5), $6, $7) RETURNING expires_at
"""


class NewTicket(Body):
    """A request for a ticket."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})

    opens: Annotated[
        Literal["websocket", "sse"],
        Field(
            alias="for",
            description="`websocket`: it opens one WebSocket within 30 seconds. `sse`: it opens "
            "the event stream of its run for an hour, so that an EventSource can reconnect.",
        ),
    ] = "websocket"
    run_id: Annotated[
        Annotated[UUID, Field(strict=False)] | None,
        Field(
            validate_default=True,
            description="Valid for this run only; null: for all of the tenant's, but not `sse`.",
        ),
    ] = None

    @field_validator("run_id")
    @classmethod
    def _names_one_for_sse(cls, value: UUID | None, info: ValidationInfo) -> UUID | None:
        if value is None and info.data.get("opens") == "sse":
            raise PydanticCustomError("missing", "a ticket for 'sse' opens one run: name it")
        return value


class Ticket(Answer):
    """A ticket, which opens a WebSocket or an event stream."""

    ticket: Annotated[
        str,
        Field(
            description='WebSocket: offer the subprotocols `["bottega.v1", "ticket.<ticket>"]`. '
            "EventSource: add `?ticket=<ticket>` to the URL of the run's events."
        ),
    ]
    expires_at: datetime


@router.post(
    "",
    operation_id="create_ws_ticket",
    summary="Get a ticket for a WebSocket or an EventSource",
    description=(
        "For browsers, which cannot send an Authorization header with them. The ticket is valid "
        "at any API process, with the scopes of your key, as long as your key is."
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
    row = (
        *(tenant, hashed(ticket), body.opens, body.run_id, VALID_S[body.opens]),
        *(list(principal.scopes), principal.key_id),
    )
    async with acting_as(service.database.pool, tenant) as connection:
        expires_at = await connection.fetchval(_ISSUE, *row)
    return Ticket(ticket=ticket, expires_at=expires_at)
