"""File descriptors: the limit of this process, and the shares for each use."""

import asyncio
import os
import resource
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

MOST = 65_536
MAX_CONNECTIONS = 10_000
"""Connections of clients; fewer if half of the descriptors are fewer (``ulimit -Hn``)."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The limits of this process: the current one, and the highest that it may set."""

    soft: int
    hard: int

    @property
    def connections(self) -> int:
        """Limit of client connections: at most half of the descriptors."""
        return max(1, min(MAX_CONNECTIONS, self.soft // 2))

    def note(self) -> None:
        log.info("limits.descriptors", soft=self.soft, hard=self.hard, connections=self.connections)

    @property
    def calls_of_tenant(self) -> int:
        """Limit of concurrent outgoing calls of one tenant."""
        return max(1, self.soft // 4)


def raise_limit() -> Descriptors:
    """Raise the soft limit to the hard one, or to ``MOST`` if that is less; return both."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY:
        return Descriptors(MOST, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return Descriptors(max(soft, wanted), hard)


async def warn_when_exhausted(found: Descriptors) -> None:
    """Log an error while no descriptor is left, until cancelled.

    The event loop silently drops connections that it cannot accept.
    """
    while True:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            log.error("limits.descriptors_exhausted", soft=found.soft, error=error.strerror)
        await asyncio.sleep(5.0)
