"""Routes of providers: model servers of a tenant, and those of the operator."""

import asyncio
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any

import httpx2
from fastapi import Response
from sqlalchemy import select

from bottega.api.schemas.providers import NewProvider, Provider, ProviderBody, ProviderSummary
from bottega.api.shared.definitions import Caller, answer, definition_router
from bottega.db.tables import tenants
from bottega.definitions import store
from bottega.definitions.store import PROVIDERS
from bottega.errors import InvalidInputError, NotFoundError
from bottega.settings import Settings
from bottega.tools.addresses import AllowList
from bottega.tools.egress import refuse_inside
from bottega.tools.guard import EgressRefusedError, check_address, resolve
from bottega.tools.http import SecretHeader

_RESOLVE_S = 3.0


async def _prepare(caller: Caller, name: str, body: ProviderBody) -> dict[str, Any]:
    settings = caller.service.settings
    if body.name not in (None, name):
        raise InvalidInputError(
            f"the name is '{name}' in the path, and another one in the body", pointer="/name"
        )
    host = httpx2.URL(body.base_url).host
    secrets = [("/key", body.key)] if body.key else []
    secrets += [
        (f"/headers/{header}", value)
        for header, value in body.headers.items()
        if isinstance(value, SecretHeader)
    ]
    if secrets:
        tenant = await _name_of(caller)
        is_open = caller.principal.key_id is None
        _refuse_foreign(settings, tenant, host, secrets, is_open=is_open)
    await _refuse_private(body.base_url, host, AllowList.parse(settings.egress_allow))
    return body.model_dump(exclude={"name"})


async def _name_of(caller: Caller) -> str:
    query = select(tenants.c.name).where(tenants.c.id == caller.tenant)
    name: str = (await caller.tx.execute(query)).scalar_one()
    return name


def _refuse_foreign(
    settings: Settings,
    tenant: str,
    host: str,
    secrets: Iterable[tuple[str, SecretHeader]],
    *,
    is_open: bool,
) -> None:
    """Refuse secrets that must not be sent to a host.

    Args:
        secrets: each with its place in the body.
        is_open: the server has no keys; then a secret without hosts may go anywhere.

    Raises:
        InvalidInputError: ``secret_host_unset``, ``secret_not_for_host``.
    """
    for pointer, header in secrets:
        allowed = settings.may_send(tenant, header.secret, host)
        if allowed is None and not is_open:
            raise InvalidInputError(
                f"the secret '{header.secret}' has no hosts: the operator of this server has to "
                "name them in BOTTEGA_SECRET_HOSTS",
                code="secret_host_unset",
                pointer=pointer,
            )
        if allowed is False:
            raise InvalidInputError(
                f"the secret '{header.secret}' must not be sent to {host}: BOTTEGA_SECRET_HOSTS "
                "names other hosts for it",
                code="secret_not_for_host",
                pointer=pointer,
            )


async def _refuse_private(base_url: str, host: str, allowed: AllowList) -> None:
    """Refuse an address that is not public, now rather than at the first call.

    Raises:
        InvalidInputError: ``egress_forbidden``.
    """
    try:
        refuse_inside(base_url, allowed)
        if allowed.has_name(host):
            return
        try:
            async with asyncio.timeout(_RESOLVE_S):
                addresses = await resolve(host, httpx2.URL(base_url).port or 443)
        except (OSError, UnicodeError, TimeoutError):
            return  # each connection is checked, too
        for address in addresses:
            check_address(host, ip_address(address), allowed)
    except EgressRefusedError as error:
        raise InvalidInputError(
            error.detail, code="egress_forbidden", pointer="/base_url"
        ) from None


async def _show(caller: Caller, name: str, response: Response) -> dict[str, Any]:
    try:
        return answer(await store.get(caller.tx, PROVIDERS, caller.tenant, name), response)
    except NotFoundError:
        known = caller.service.settings.operator_providers.get(name)
        if known is None:
            raise
        shown = dict.fromkeys(Provider.model_fields)
        return shown | {
            "name": name,
            "version": 0,
            "owner": "operator",
            "dialect": known.dialect,
            "models": known.models,
            "headers": {},
        }


router = definition_router(
    PROVIDERS,
    new=NewProvider,
    content=ProviderBody,
    output=Provider,
    summary=ProviderSummary,
    prepare=_prepare,
    show=_show,
)
