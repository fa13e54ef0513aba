"""Means by which this process sends requests: guarded client, tenants' secrets, MCP servers."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bottega.db.engine import Database
from bottega.descriptors import Descriptors
from bottega.events.listener import NotifyListener
from bottega.logs import clean_of_tenants
from bottega.secrets import rows as secret_rows
from bottega.secrets.lookup import SecretLookup, SecretRules
from bottega.settings import Settings, keyring, secrets
from bottega.tools.guard import AllowList

if TYPE_CHECKING:
    from bottega.engine.mcp import McpAccess
    from bottega.tools.egress import Egress


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Means by which a process sends requests."""

    egress: "Egress"
    secrets: SecretLookup
    mcp: "McpAccess"


@asynccontextmanager
async def open_outgoing(
    settings: Settings,
    database: Database,
    listener: NotifyListener,
    is_open: Callable[[], Awaitable[bool]],
    descriptors: Descriptors,
) -> AsyncIterator[Outgoing]:
    """Yield it, and close its connections at the end.

    Args:
        is_open: returns true if the server has no keys.
    """
    from bottega.engine.mcp import McpAccess
    from bottega.mcp.servers import StdioCommand
    from bottega.tools.egress import Egress

    lookup = SecretLookup(secret_rules(settings, is_open), partial(secret_rows.read, database.pool))
    lookup.watch(listener)
    clean_of_tenants(lookup.of_name)
    commands = {
        key: StdioCommand(each.command, each.args, each.plain_env, tuple(each.secrets))
        for key, each in settings.mcp_stdio.items()
    }
    egress = Egress(settings.egress_allow, each=descriptors.calls_of_tenant)
    async with aclosing(egress):
        yield Outgoing(egress, lookup, McpAccess(commands, lookup))


def secret_rules(settings: Settings, is_open: Callable[[], Awaitable[bool]]) -> SecretRules:
    """Return what the operator has set about secrets.

    Raises:
        ValueError: the keys are none.
    """
    return SecretRules(
        keyring=keyring(settings),
        environment=secrets,
        hosts=settings.hosts_of_secret,
        allowed=AllowList.parse(settings.egress_allow),
        is_open=is_open,
    )
