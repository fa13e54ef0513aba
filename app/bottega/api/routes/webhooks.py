"""Routes of the secrets that sign a tenant's webhooks, and of webhook deliveries."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from bottega.api.auth import acts_for
from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Page
from bottega.api.schemas.runs import DeliveryStatus
from bottega.api.shared.deps import (
    Actor,
    AdminTenant,
    PrincipalDep,
    ServiceDep,
    Tenant,
    Transaction,
)
from bottega.api.shared.pages import LINK, PageQuery, QueriedUser, Seq
from bottega.runs import read
from bottega.tenants import webhook_secrets


class WebhookSecret(Answer):
    """A secret that signs the tenant's webhooks, without its value."""

    id: UUID | None
    """Id of the secret; null: the secret is the server's `BOTTEGA_WEBHOOK_SECRET`."""
    created_at: datetime | None
    """Time at which the secret was created; null: it is the server's own secret."""
    expires_at: datetime | None
    """Time until which this secret signs together with newer secrets; null: it is the newest."""


class MadeWebhookSecret(WebhookSecret):
    """A new webhook secret with its value, which no later response shows."""

    secret: str
    """Secret for verifying webhooks (Standard Webhooks). No later response shows it."""


class WebhookSecrets(Answer):
    """The tenant's valid webhook secrets, newest first."""

    items: list[WebhookSecret]
    """The valid secrets, newest first."""


router = APIRouter(prefix="/v1/webhook-secret", tags=["webhooks"])


@router.post(
    "",
    operation_id="rotate_webhook_secret",
    summary="Make the tenant's next webhook secret",
    description=(
        "Only this response contains the secret. The previous secret stays valid for a day: each "
        "delivery has a signature of every valid secret, so that receivers can change over. There "
        "is no `Idempotency-Key`, because it would store the response; if you lose the secret, "
        "make another secret. At most 5 secrets are valid at the same time (409 `too_many`)."
    ),
    status_code=201,
    response_model=MadeWebhookSecret,
    responses={
        **problems(409),
        201: headers(Location="Path of the tenant's secrets.", Cache_Control="Always `no-store`."),
    },
)
async def rotate(tx: Transaction, tenant: AdminTenant, actor: Actor, response: Response) -> Any:
    row, secret = await webhook_secrets.rotate(tx, tenant, actor)
    response.headers["Location"] = "/v1/webhook-secret"
    response.headers["Cache-Control"] = "no-store"
    return {**row, "secret": secret}


@router.get(
    "",
    operation_id="get_webhook_secrets",
    summary="List the tenant's valid webhook secrets, without the secrets themselves",
    description="Shows which secrets sign webhooks, and until when; never their values.",
    response_model=WebhookSecrets,
    responses=problems(),
)
async def get(tx: Transaction, tenant: AdminTenant, service: ServiceDep) -> Any:
    has_first = service.settings.webhook_secret is not None
    return {"items": await webhook_secrets.page(tx, tenant, has_first=has_first)}


deliveries_router = APIRouter(prefix="/v1/webhook-deliveries", tags=["webhooks"])


class Delivery(Answer):
    """A webhook request that was sent, or will be sent."""

    run_id: UUID
    seq: int
    """Number of the event that the request reports: of a `run.waiting`, or of a batch's end (after
    a retry, a batch ends again); 0: the request reports a run's end."""
    event: Annotated[str, Field(examples=["run.completed"])]
    """Type of the event that the request reports."""
    url: str
    """URL of the receiver, without its query string, which may contain a secret."""
    status: DeliveryStatus
    """Status of the delivery; after `failed` there is no further try."""
    tries: int
    answer: int | None
    """HTTP status of the receiver's answer to the last try; null: no answer."""
    error: str | None
    """Error of the last try to deliver."""
    next_at: datetime | None
    """Time of the next try; null: there is no next try."""
    ended_at: datetime | None


class DeliveryQuery(PageQuery):
    status: DeliveryStatus | None = None
    run_id: UUID | None = None
    user: QueriedUser = None


@deliveries_router.get(
    "",
    operation_id="list_webhook_deliveries",
    summary="List deliveries of webhooks by the age of their runs",
    description=(
        "Shows which webhooks did not arrive, and why; newest last, unless `order` says otherwise."
    ),
    response_model=Page[Delivery],
    responses={**problems(), 200: headers(Link=LINK)},
)
async def list_(
    tx: Transaction,
    tenant: Tenant,
    principal: PrincipalDep,
    query: Annotated[DeliveryQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    rows = await read.deliveries_page(
        tx,
        tenant,
        query.model_dump(include={"status", "run_id"}),
        user=acts_for(principal, query.user, None).user,
        **query.window(tuple[UUID, Seq]),
    )
    return query.page(request, response, rows, lambda each: [each["run_id"], each["seq"]])
