"""Objects for outgoing requests: HTTP client, tenants' secrets, and access to MCP servers.

This module also divides the process's file descriptors between incoming and outgoing connections.
"""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bottega.db.embedded import folder_of
from bottega.db.pool import Database
from bottega.events.listener import NotifyListener
from bottega.logger import Logger
from bottega.logs import clean_of_tenants
from bottega.secrets import rows as secret_rows
from bottega.secrets.lookup import SecretLookup, SecretRules
from bottega.settings import Settings, keyring, secrets
from bottega.tools.guard import ModelHosts

log = Logger(__name__)

MOST = 65_536
MAX_CONNECTIONS = 10_000
"""Maximum number of client connections, at most half of the descriptors (``ulimit -Hn``)."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The soft and the hard limit on the number of this process's open file descriptors."""

    soft: int
    hard: int

    @property
    def connections(self) -> int:
        """Maximum number of connections of clients to this process."""
        return max(1, min(MAX_CONNECTIONS, self.soft // 2))

    def note(self) -> None:
        log.info("limits.descriptors", soft=self.soft, hard=self.hard, connections=self.connections)

    @property
    def calls_of_tenant(self) -> int:
        """Maximum number of concurrent outgoing calls of one tenant."""
        return max(1, self.soft // 4)


def raise_limit() -> Descriptors:
    """Raise the soft limit to the hard limit, but not above ``MOST``; return both limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY:
        return Descriptors(MOST, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return Descriptors(max(soft, wanted), hard)


async def warn_when_exhausted(found: Descriptors) -> None:
    """Log the limits once, and log an error every 5 s while no descriptor is free.

    The event loop itself logs nothing when it drops a connection because no descriptor is free.
    """
    found.note()
    while True:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            log.error("limits.descriptors_exhausted", soft=found.soft, error=error.strerror)
        await asyncio.sleep(5.0)


if TYPE_CHECKING:
    from bottega.engine.mcp import McpAccess
    from bottega.tools.egress import Egress


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The objects with which this process sends requests to other servers."""

    egress: "Egress"
    secrets: SecretLookup
    mcp: "McpAccess"
    model_hosts: ModelHosts


@asynccontextmanager
async def open_outgoing(
    settings: Settings,
    url: str,
    database: Database,
    listener: NotifyListener,
    is_open: Callable[[], Awaitable[bool]],
    descriptors: Descriptors,
) -> AsyncIterator[Outgoing]:
    """Yield the objects that send requests; close their connections at the end of the block.

    Args:
        url: URL of the database.
        is_open: a function that returns true if the server has no API keys.
    """
    from bottega.engine.mcp import McpAccess
    from bottega.tools.egress import Egress
    from bottega.tools.mcp import StdioCommand

    hosts = ModelHosts(settings.egress_allow, folder_of(url, settings.data_dir), is_open)
    lookup = SecretLookup(secret_rules(settings, hosts), partial(secret_rows.read, database.pool))
    lookup.watch(listener)
    clean_of_tenants(lookup.of_name)
    commands = {
        key: StdioCommand(each.command, each.args, each.plain_env, tuple(each.secrets))
        for key, each in settings.mcp_stdio.items()
    }
    egress = Egress(settings.egress_allow, each=descriptors.calls_of_tenant)
    async with aclosing(egress):
        yield Outgoing(egress, lookup, McpAccess(commands, lookup), hosts)


def secret_rules(settings: Settings, hosts: ModelHosts) -> SecretRules:
    """Return the operator's rules for secrets, from the settings."""
    return SecretRules(
        keyring=partial(keyring, settings, hosts.folder),
        environment=secrets,
        hosts=settings.hosts_of_secret,
        allowed=hosts.allowed,
        is_open=hosts.is_open,
    )
