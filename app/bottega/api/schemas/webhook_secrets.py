"""Webhook secrets on the wire."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from bottega.api.schemas.base import Answer

_EXAMPLE: JsonDict = {
    "id": "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11",
    "created_at": "2026-11-02T08:30:00Z",
    "expires_at": None,
}


class WebhookSecret(Answer):
    """A secret that signs the tenant's webhooks, without its value."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: Annotated[UUID | None, Field(description="Null: the server's `BOTTEGA_WEBHOOK_SECRET`.")]
    created_at: datetime | None
    expires_at: Annotated[
        datetime | None,
        Field(description="Until then it signs beside newer ones; null: until the next one."),
    ]


class MadeWebhookSecret(WebhookSecret):
    """A new webhook secret with its value, which no later response shows."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{**_EXAMPLE, "secret": "whsec_<44 characters>"}]}
    )

    secret: Annotated[
        str, Field(description="Verify webhooks with it (Standard Webhooks). Shown only here.")
    ]


class WebhookSecrets(Answer):
    """The tenant's valid webhook secrets, newest first."""

    items: list[WebhookSecret]
