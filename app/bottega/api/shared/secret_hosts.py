"""Checks that definitions send secrets to those secrets' hosts only."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import select

from bottega.api.shared.definitions import Caller
from bottega.db.tables import tenants
from bottega.errors import InvalidInputError
from bottega.secrets import rows
from bottega.secrets.hosts import refuse_environment, refuse_stored
from bottega.tools.addresses import AllowList


class Sending(NamedTuple):
    """A secret that a definition sends to a URL.

    Attributes:
        pointer: its place in the body.
    """

    pointer: str
    name: str
    url: str


async def refuse_foreign(caller: Caller, found: Sequence[Sending]) -> None:
    """Refuse secrets that must not be sent where a definition sends them.

    Raises:
        InvalidInputError: ``secret_host_unset``, ``secret_not_for_host``, ``secret_needs_https``.
    """
    if not found:
        return
    settings = caller.service.settings
    stored = await rows.hosts_of(caller.tx, caller.tenant, [each.name for each in found])
    query = select(tenants.c.name).where(tenants.c.id == caller.tenant)
    tenant: str = (await caller.tx.execute(query)).scalar_one()
    allowed = AllowList.parse(settings.egress_allow)
    is_open = caller.principal.key_id is None
    for each in found:
        try:
            if (hosts := stored.get(each.name)) is not None:
                refuse_stored(each.name, hosts, each.url, allowed)
            else:
                of_operator = settings.hosts_of_secret(tenant, each.name)
                refuse_environment(each.name, of_operator, each.url, may_be_unset=is_open)
        except InvalidInputError as error:
            raise InvalidInputError(error.detail, code=error.code, pointer=each.pointer) from None
