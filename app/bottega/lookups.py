"""Look-ups of the host names that tenants choose: a few at a time for each tenant.

A look-up at a slow name server takes half a minute; the caller's time limit does not end it.
Without a bound, the look-ups of one tenant could use up the process's threads and memory.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

from bottega.agents.threads import run_in_thread

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host name and port, as text. Raises ``OSError`` if there are none."""

LOOKUPS_OF_TENANT = 8


async def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the system's resolver, in a thread that goes on if the caller is cancelled."""
    found = await run_in_thread(
        partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    )
    return [str(place[0]) for *_, place in found]


class DnsResolver:
    """Look-ups of names: at most ``LOOKUPS_OF_TENANT`` of a tenant at a time; its others wait.

    A look-up counts until it ends, even if its caller no longer waits for it.

    Args:
        resolve: replaces the system's resolver.
    """

    def __init__(self, resolve: Resolver = resolve) -> None:
        self._resolve = resolve
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._asked: set[asyncio.Future[Sequence[str]]] = set()

    async def addresses(self, tenant: str, host: str, port: int) -> Sequence[str]:
        """Return a name's addresses, as text.

        Raises:
            OSError: the name has no addresses.
            UnicodeError: it is not a host name.
        """
        slot = self._slots.setdefault(tenant, asyncio.Semaphore(LOOKUPS_OF_TENANT))
        await slot.acquire()
        asked = asyncio.ensure_future(self._resolve(host, port))
        self._asked.add(asked)
        asked.add_done_callback(partial(self._ended, slot))
        return await asyncio.shield(asked)

    def close(self) -> None:
        """Stop waiting for the look-ups in progress."""
        for asked in self._asked:
            asked.cancel()

    def _ended(self, slot: asyncio.Semaphore, asked: asyncio.Future[Sequence[str]]) -> None:
        slot.release()
        self._asked.discard(asked)
        if not asked.cancelled():
            asked.exception()  # otherwise asyncio logs it if nobody waits for the look-up now
