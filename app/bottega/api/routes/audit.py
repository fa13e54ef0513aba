"""The route of the audit log."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from pydantic import ConfigDict, Field

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Page, PlaceInTime
from bottega.api.shared.deps import AdminTenant, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.tenants import audit

router = APIRouter(prefix="/v1/audit", tags=["operations"])


class AuditEntry(Answer):
    """An action that the audit log recorded."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11",
                    "at": "2026-11-02T08:30:00Z",
                    "actor": "key:btg_4fqx0a1b",
                    "action": "run.cancel",
                    "target": "01980c52-9f10-7a51-9c56-2f8d3f0f2c77",
                    "details": {},
                }
            ]
        }
    )

    id: UUID
    at: datetime
    actor: Annotated[
        str,
        Field(description="`key:` and the prefix of a key, `local` (no keys), or `cli`."),
    ]
    action: Annotated[str, Field(description="Kind of action: `run.cancel`, `session.delete` …")]
    target: Annotated[str, Field(description="Id or name of its object.")]
    details: dict[str, Any]


class AuditQuery(PageQuery):
    """Query parameters of the audit log."""

    action: Annotated[
        str | None, Field(pattern=r"^[a-z_]{1,32}\.[a-z_]{1,32}$", description="Only this action.")
    ] = None
    noted_after: PlaceInTime | None = None
    noted_before: PlaceInTime | None = None


@router.get(
    "",
    operation_id="list_audit_log",
    summary="List the audit log",
    description=(
        "Keys and secrets made or revoked, runs and tasks cancelled, feedback, changes of "
        "patterns, learning and maintenance on demand, and deletions. Each entry is stored in "
        "the transaction of its action. The API cannot change the log."
    ),
    response_model=Page[AuditEntry],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: AdminTenant,
    query: Annotated[AuditQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await audit.page(
        tx,
        tenant,
        action=query.action,
        noted_after=query.noted_after,
        noted_before=query.noted_before,
        after=query.place(UUID),
        descending=query.descending,
        limit=query.limit,
    )
    return query.page(request, response, found, lambda entry: entry["id"])
