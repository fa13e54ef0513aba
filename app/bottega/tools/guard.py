"""Address checks of outgoing HTTP: of all addresses of a name, and of each socket's.

A name is resolved once, here, and the connection goes to a checked address: a later DNS answer has
no effect. ``Host``, SNI and the certificate still use the name.
"""

import socket
from collections.abc import Sequence
from contextvars import ContextVar
from ipaddress import ip_address
from typing import NamedTuple

from bottega.errors import InvalidInputError
from bottega.lookups import NameLookups
from bottega.network import AddressRefusedError
from bottega.tools.addresses import Address, AllowList, host_address, why_refused

_MOST_ADDRESSES = 8


class Asking(NamedTuple):
    """A request that may open a connection: the tenant that sends it, and the URL's host."""

    tenant: str
    host: str


asking: ContextVar[Asking] = ContextVar("asking")


class EgressRefusedError(InvalidInputError):
    """An address that outgoing HTTP must not reach. A retry does not help."""

    code = "egress_refused"


def address_in(host: str) -> Address | None:
    """Parse a URL's host as an address; ``None`` if it is a name.

    Raises:
        EgressRefusedError: it is neither.
    """
    try:
        return host_address(host)
    except InvalidInputError as error:
        raise EgressRefusedError(error.detail) from None


def check_address(host: str, address: Address, allowed: AllowList) -> None:
    """Refuse an address that is neither public nor allowed.

    Args:
        host: the URL's host, for the message.

    Raises:
        EgressRefusedError: the address is refused.
    """
    reason = why_refused(address)
    if reason is not None and not allowed.has_address(address):
        raise EgressRefusedError(
            f"{host} is not a public address ({reason}): only the operator of this server can "
            "allow it, in BOTTEGA_EGRESS_ALLOW"
        )


class AddressGuard:
    """Lets connections of the request that is :data:`asking` reach public and allowed addresses."""

    def __init__(self, allowed: AllowList, lookups: NameLookups) -> None:
        self._allowed = allowed
        self._lookups = lookups

    def check(self, address: str) -> None:
        """Check the address of a socket.

        Raises:
            EgressRefusedError: the address is refused.
        """
        host = asking.get().host
        if not self._allowed.has_name(host):
            check_address(host, ip_address(address), self._allowed)

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        """Resolve a name; a single forbidden address refuses the name.

        Raises:
            OSError: it has no address, or a forbidden one.
        """
        try:
            found = await self._lookups.addresses(asking.get().tenant, host, port)
            addresses = [str(ip_address(each)) for each in dict.fromkeys(found)]
        except ValueError:  # or UnicodeError: not a DNS name
            raise AddressRefusedError(f"the name {host} does not resolve to addresses") from None
        if not addresses:
            raise socket.gaierror(f"{host} has no address")
        for address in addresses:
            try:
                self.check(address)
            except EgressRefusedError as error:
                raise AddressRefusedError(error.detail) from None
        return addresses[:_MOST_ADDRESSES]
