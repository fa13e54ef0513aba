"""Routes of a tenant's secrets."""

import asyncio
import re
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import AfterValidator, ConfigDict, Field, SecretStr, StringConstraints
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from bottega.api.errors import headers, problems
from bottega.api.schemas.base import Answer, Body, Page
from bottega.api.shared.definitions import ETAG, IfMatch, if_match_version
from bottega.api.shared.deps import Actor, DefineTenant, ServiceDep, Transaction
from bottega.api.shared.pages import LINK, PageQuery
from bottega.db.embedded import make_secrets_key
from bottega.errors import ConflictError, InvalidInputError
from bottega.redaction import SHORTEST
from bottega.sealing import Keyring
from bottega.secrets import rows
from bottega.secrets.rows import as_compared
from bottega.settings import keyring
from bottega.tools.http import UPPER_NAME
from bottega.tools.secrets import refuse_vocabulary

_LONGEST = 4096
_WORDS = re.compile(r"[\x21-\x7e]+(?: [\x21-\x7e]+){0,3}")
_EXAMPLE: JsonDict = {"value": "Bearer sk-4fqx0a1b2c3d", "hosts": ["api.example.com"]}


def _can_be_sent(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if len(text) > _LONGEST or not _WORDS.fullmatch(text):
        raise PydanticCustomError(
            "secret",
            "must be one to four words of printable ASCII characters, with one blank between two "
            "words, and have at most {longest} characters",
            {"longest": _LONGEST},
        )
    scheme, _, credential = text.rpartition(" ")
    if len(credential if " " not in scheme else text) < SHORTEST:
        raise PydanticCustomError(
            "secret",
            "is shorter than {shortest} characters, not counting a first word such as Bearer: use "
            "a longer secret, because a shorter secret cannot be redacted from logs and answers",
            {"shortest": SHORTEST},
        )
    return value


def _as_compared(host: str) -> str:
    try:
        return as_compared(host)
    except InvalidInputError:
        raise PydanticCustomError(
            "host", "must be a host's name or address in lower case, without scheme and port"
        ) from None


Host = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253, pattern=r"^[0-9a-z_.:-]+$"),
    AfterValidator(_as_compared),
]


class SecretContent(Body):
    """A secret's value, and the hosts that may get it."""

    model_config = ConfigDict(hide_input_in_errors=True, json_schema_extra={"examples": [_EXAMPLE]})

    value: Annotated[
        SecretStr,
        AfterValidator(_can_be_sent),
        Field(
            json_schema_extra={
                "minLength": SHORTEST,
                "maxLength": _LONGEST,
                "pattern": f"^{_WORDS.pattern}$",
            }
        ),
    ]
    """Value in the form in which the server sends it. For a header, include a scheme such as
    `Bearer`; for a provider's key, leave the scheme out. The value must have at least 8 characters,
    without the scheme. No response shows the value."""
    hosts: Annotated[list[Host], Field(min_length=1, max_length=20)]
    """Names or addresses of the hosts that may get the secret, only over https. Over http, only
    this machine may get the secret, and only if the operator allows it."""


class Secret(Answer):
    """A stored secret, without its value."""

    name: str
    """Name of the secret, which definitions use to refer to it."""
    version: int
    """Number of this version; a change of the value or of the hosts raises it."""
    hosts: list[str]
    """Hosts that may get the secret; no other host may."""
    created_at: datetime
    updated_at: datetime


router = APIRouter(prefix="/v1/secrets", tags=["secrets"])

Name = Annotated[
    str,
    Path(
        pattern=UPPER_NAME,
        max_length=64,
        description="Capital letters and digits, with single `_` between them.",
    ),
]


async def _keyring(service: ServiceDep, tenant: DefineTenant) -> Keyring:
    """Check the caller's scopes, and return the keys that encrypt secrets.

    If only this machine can reach the server and there is no key, this function makes a key in the
    data folder.
    """
    hosts = service.outgoing.model_hosts
    found = keyring(service.settings, hosts.folder)
    if found is None and hosts.folder is not None and await hosts.is_open():
        await asyncio.to_thread(make_secrets_key, hosts.folder)
        found = keyring(service.settings, hosts.folder)
    if found is None:
        raise ConflictError(
            "this server stores no secrets: its operator has to set BOTTEGA_SECRETS_KEY to the "
            "output of openssl rand -base64 32, and to the same value on every machine",
            code="no_secrets_key",
        )
    return found


KeyringDep = Annotated[Keyring, Depends(_keyring)]


@router.put(
    "/{name}",
    operation_id="put_secret",
    summary="Store a secret, or its next version",
    description=(
        "All runs send the new value within 5 seconds, even runs that have begun. No response, log "
        "or event shows the value. 422 `secret_is_vocabulary`: it is a word of this service, such "
        "as a status or a field's name, or a date or time. 409 `no_secrets_key`: the server has no "
        "`BOTTEGA_SECRETS_KEY`. A server on loopback with the embedded database and without API "
        "keys makes this key in its data folder."
    ),
    response_model=Secret,
    responses={
        **problems(400, 404, 409, 412, 413, 415),
        200: headers(ETag=ETAG),
        201: {
            "description": "The name is new.",
            "model": Secret,
            **headers(ETag=ETAG, Location="Path of the new resource."),
        },
    },
)
async def put(
    tx: Transaction,
    tenant: DefineTenant,
    actor: Actor,
    keys: KeyringDep,
    name: Name,
    body: SecretContent,
    response: Response,
    if_match: IfMatch = None,
) -> Any:
    value = body.value.get_secret_value()
    refuse_vocabulary(f"the secret '{name}'", value)
    row, is_new = await rows.put(
        tx,
        tenant,
        actor,
        keys,
        name=name,
        value=value,
        hosts=body.hosts,
        if_version=if_match_version(if_match),
    )
    response.headers["ETag"] = f'"{row["version"]}"'
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/secrets/{name}"
    return row


@router.get(
    "",
    operation_id="list_secrets",
    summary="List the tenant's secrets by name, without their values",
    description="Shows which secrets exist, and which hosts may get each of them.",
    response_model=Page[Secret],
    responses={**problems(409), 200: headers(Link=LINK)},
    dependencies=[Depends(_keyring)],
)
async def list_(
    tx: Transaction,
    tenant: DefineTenant,
    query: Annotated[PageQuery, Query()],
    request: Request,
    response: Response,
) -> Any:
    found = await rows.page(
        tx, tenant, after=query.place(str), descending=query.descending, limit=query.limit
    )
    return query.page(request, response, found, lambda secret: secret["name"])


@router.get(
    "/{name}",
    operation_id="get_secret",
    summary="Read a secret's version and hosts",
    description=(
        "Shows when a secret was last changed, and which hosts may get it; never its value."
    ),
    response_model=Secret,
    responses={**problems(404, 409), 200: headers(ETag=ETAG)},
    dependencies=[Depends(_keyring)],
)
async def get(tx: Transaction, tenant: DefineTenant, name: Name, response: Response) -> Any:
    row = await rows.get(tx, tenant, name)
    response.headers["ETag"] = f'"{row["version"]}"'
    return row


@router.delete(
    "/{name}",
    operation_id="delete_secret",
    summary="Delete a secret",
    description=(
        "After at most 5 seconds no run sends the secret. Runs whose agents or providers name it "
        "fail with `unknown_secret`, unless the operator's environment has a secret of this name."
    ),
    status_code=204,
    responses=problems(404, 409, 412),
    dependencies=[Depends(_keyring)],
)
async def delete(
    tx: Transaction, tenant: DefineTenant, actor: Actor, name: Name, if_match: IfMatch = None
) -> None:
    await rows.delete(tx, tenant, actor, name, if_match_version(if_match))
