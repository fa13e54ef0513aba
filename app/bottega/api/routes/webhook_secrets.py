"""Routes of the secrets that sign a tenant's webhooks."""

from typing import Any

from fastapi import APIRouter, Response

from bottega.api.errors import headers, problems
from bottega.api.schemas.webhook_secrets import MadeWebhookSecret, WebhookSecrets
from bottega.api.shared.deps import Actor, AdminTenant, ServiceDep, Transaction
from bottega.tenants import webhook_secrets

router = APIRouter(prefix="/v1/webhook-secret", tags=["webhooks"])


@router.post(
    "",
    operation_id="rotate_webhook_secret",
    summary="Make the tenant's next webhook secret",
    description=(
        "Only this response holds the secret. The previous secret signs too for a day: each "
        "delivery carries a signature of every valid secret, so that receivers can change over. "
        "There is no `Idempotency-Key`, which would store the response: if it is lost, make "
        "another secret. At most 5 are valid at the same time (409 `too_many`)."
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
    response_model=WebhookSecrets,
    responses=problems(),
)
async def get(tx: Transaction, tenant: AdminTenant, service: ServiceDep) -> Any:
    has_first = service.settings.webhook_secret is not None
    return {"items": await webhook_secrets.page(tx, tenant, has_first=has_first)}
