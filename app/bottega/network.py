"""Addresses of outgoing connections: look-ups of host names, and checks of addresses (guards).

:mod:`bottega.http_sessions` opens the connections.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

from bottega.agents.threads import run_in_thread

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that returns the addresses of a host name and port, or raises ``OSError`` if none."""

LOOKUPS_OF_TENANT = 8
"""Maximum number of concurrent host-name look-ups of a tenant. A look-up at a slow name server
takes half a minute, even beyond the caller's timeout. So without a limit, one tenant's look-ups
could use up the process's threads and memory."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Call the system's resolver in a thread. A cancelled caller does not stop the thread."""
    found = await run_in_thread(
        partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    )
    return [str(place[0]) for *_, place in found]


class DnsResolver:
    """Resolver of host names, with at most ``LOOKUPS_OF_TENANT`` concurrent look-ups per tenant.

    A look-up counts until it ends, even if its caller no longer waits.

    Args:
        resolve: a function that replaces the system's resolver.
    """

    def __init__(self, resolve: Resolver = resolve) -> None:
        self._resolve = resolve
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._asked: set[asyncio.Future[Sequence[str]]] = set()

    async def addresses(self, tenant: str, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a name as texts.

        Raises:
            OSError: the name has no addresses.
            UnicodeError: the name is not a host name.
        """
        slot = self._slots.setdefault(tenant, asyncio.Semaphore(LOOKUPS_OF_TENANT))
        await slot.acquire()
        asked = asyncio.ensure_future(self._resolve(host, port))
        self._asked.add(asked)
        asked.add_done_callback(partial(self._ended, slot))
        return await asyncio.shield(asked)

    def close(self) -> None:
        """Cancel all calls that wait for a look-up."""
        for asked in self._asked:
            asked.cancel()

    def _ended(self, slot: asyncio.Semaphore, asked: asyncio.Future[Sequence[str]]) -> None:
        slot.release()
        self._asked.discard(asked)
        if not asked.cancelled():
            asked.exception()  # retrieve the exception; otherwise asyncio logs it


Guard = Callable[[str], None]
"""Function that checks an address in text form, and raises a :class:`BottegaError` to refuse it."""


class AddressRefusedError(OSError):
    """The guard refused a connection's address; the error's text says why."""
