"""API keys on the wire."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict

from bottega.api.schemas.base import Answer, Body, PlaceInTime
from bottega.tenants.keys import SCOPES, Scope

_EXAMPLE: JsonDict = {
    "id": "01980c53-6b1e-7cc0-8f3e-6a3c1b0f4d11",
    "name": "the nightly reports",
    "prefix": "btg_4fqx0a1b",
    "scopes": ["run", "define"],
    "require_user": False,
    "created_at": "2026-11-02T08:30:00Z",
    "expires_at": "2027-11-02T08:30:00Z",
    "last_used_at": None,
    "revoked_at": None,
}


class NewKey(Body):
    """An API key to create."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "the nightly reports", "scopes": ["run"]}]}
    )

    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=100),
        Field(description="Purpose of the key, to find it again when it must be revoked."),
    ]
    scopes: Annotated[
        list[Scope],
        Field(
            min_length=1,
            max_length=len(SCOPES),
            description=(
                "What it may do. `read`: reading and searching; `run`: starting runs, and all "
                "changes that no other scope names; `define`: changing agents, graphs, providers "
                "and schedules; `approve`: decisions that only people may take; `admin`: "
                "everything. `run` and `define` include `read`."
            ),
        ),
    ]
    expires_at: Annotated[
        Annotated[PlaceInTime, Field(strict=False)] | None,
        Field(description="End of its validity; null: valid until revoked."),
    ] = None
    require_user: Annotated[
        bool,
        Field(
            description="Its requests that start work, and those for lists of what users have, "
            "must name a `user` (else 422 `user_required`)."
        ),
    ] = False


class Key(Answer):
    """An API key, without its secret."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: UUID
    name: str
    prefix: Annotated[str, Field(description="Beginning of the key.")]
    scopes: Annotated[list[Scope], Field(description="In a fixed order, each once.")]
    require_user: Annotated[bool, Field(description="Its requests must name a `user`.")]
    created_at: datetime
    expires_at: datetime | None
    last_used_at: Annotated[
        datetime | None, Field(description="To about a minute; null: never used.")
    ]
    revoked_at: datetime | None


class MadeKey(Key):
    """A new API key with its secret, which no later response shows."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{**_EXAMPLE, "key": "btg_4fqx0a1b_<43 characters>"}]}
    )

    key: Annotated[
        str, Field(description="Send it as `Authorization: Bearer <key>`. Shown only here.")
    ]
