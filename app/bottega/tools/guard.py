"""Checks of the addresses of outgoing HTTP requests, after DNS look-up and for each socket.

The guard resolves a name once, and connects to a checked address. So a later DNS answer for the
name has no effect. The header ``Host``, SNI and the check of the certificate use the name.
"""

import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path
from typing import NamedTuple, Self

from bottega.errors import InvalidInputError, UnavailableError
from bottega.network import AddressRefusedError, DnsResolver

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NAME = re.compile(
    r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*"
)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def _networks(blocks: Iterable[tuple[str, str]]) -> tuple[tuple[Network, str], ...]:
    return tuple((ip_network(block), reason) for block, reason in blocks)


# Blocks of addresses that are not public. Source: the IANA special-purpose address registries. Of
# IPv6, only 2000::/3 can be public. 168.63.129.16 is public, but at this address Azure gives each
# machine the machine's secrets.
_REFUSED = _networks(
    (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "private"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "cloud metadata"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "reserved"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "private"),
        ("198.51.100.0/24", "reserved"),
        ("203.0.113.0/24", "reserved"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "private"),
        ("ff00::/8", "multicast"),
        ("2001::/23", "reserved"),  # contains Teredo's block
        ("2001:db8::/32", "reserved"),
        ("2002::/16", "reserved"),  # 6to4, which can reach any IPv4 address
        ("3fff::/20", "reserved"),
    )
)
_GLOBAL_IPV6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


def why_refused(address: Address) -> str | None:
    """Return the reason why an address is not public, in one or two words; ``None``: it is public.

    If an IPv6 address contains an IPv4 address (mapped, NAT64), the IPv4 address is checked.
    """
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return "link-local"
        if embedded := _embedded(address):
            return why_refused(embedded)
    for network, reason in _REFUSED:
        if address in network:
            return reason
    if isinstance(address, IPv6Address) and address not in _GLOBAL_IPV6:
        return "reserved"
    # A newer Python may know blocks that are not in the table above.
    return None if address.is_global else "reserved"


def _embedded(address: IPv6Address) -> IPv4Address | None:
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped


def host_address(host: str) -> Address | None:
    """Parse ``host`` as an address; return ``None`` for a name.

    Args:
        host: host of a URL in lower case, without the brackets of an IPv6 address.

    Raises:
        InvalidInputError: ``host`` is neither an address nor a name. IPv4 addresses in spellings
            that only some resolvers accept (decimal, octal, hexadecimal, short) are invalid.
    """
    try:
        return ip_address(host)
    except ValueError:
        pass
    name = host.removesuffix(".")
    if _NUMBER.fullmatch(name.rsplit(".", 1)[-1]):
        raise InvalidInputError(f"'{host}' is an unusual spelling of an IP address: write a.b.c.d")
    # DNS names have at most 253 characters.
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise InvalidInputError(f"'{host[:100]}' is not a valid host name")
    return None


@dataclass(frozen=True, slots=True)
class AllowList:
    """Hosts and networks that are allowed although they are not public.

    Attributes:
        names: host names that are allowed, whatever their addresses.
        networks: networks whose addresses are allowed, whatever the host name.
    """

    names: frozenset[str]
    networks: tuple[Network, ...]

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Self:
        """Parse host names, addresses and CIDR blocks.

        Raises:
            InvalidInputError: an entry is not valid.
        """
        names: set[str] = set()
        networks: list[Network] = []
        for entry in entries:
            text = entry.strip().lower().removeprefix("[").removesuffix("]")
            try:
                networks.append(ip_network(text))
                continue
            except ValueError as error:
                if "/" in text:
                    raise InvalidInputError(f"'{entry}' is not a CIDR block: {error}") from None
            try:
                host_address(text)
            except InvalidInputError:
                raise InvalidInputError(
                    f"'{entry}' is not a host, address or CIDR block such as 10.1.0.0/16"
                ) from None
            names.add(text.removesuffix("."))
        return cls(frozenset(names), tuple(networks))

    def has_name(self, host: str) -> bool:
        return host.removesuffix(".") in self.names

    def has_address(self, address: Address) -> bool:
        """Return true if an address, or the IPv4 address in it, is in an allowed network."""
        if any(address in network for network in self.networks):
            return True
        embedded = _embedded(address) if isinstance(address, IPv6Address) else None
        return embedded is not None and self.has_address(embedded)


@dataclass(frozen=True, slots=True)
class HostGuard:
    """Function that raises EgressRefusedError if a connection's address is refused."""

    host: str
    allowed: AllowList

    def __call__(self, address: str) -> None:
        if not self.allowed.has_name(self.host):
            check_address(self.host, ip_address(address), self.allowed)


_LOOPBACK = ("localhost", "127.0.0.0/8", "::1")


class ModelHosts:
    """Hosts that are allowed for tenants' model servers although they are not public.

    The operator's list is allowed. Loopback is also allowed while the database is embedded and
    Bottega's server, without keys, listens on loopback: then only local programs use the server.

    Args:
        allow: hosts, addresses and CIDR blocks that the operator allows.
        folder: folder of the embedded database, or ``None`` if the database is not embedded.
        is_open: function that returns true if the server has no keys.
    """

    def __init__(
        self, allow: Sequence[str], folder: Path | None, is_open: Callable[[], Awaitable[bool]]
    ) -> None:
        self.folder = folder
        self.is_open = is_open
        self._usual = AllowList.parse(allow)
        self._local = AllowList.parse([*allow, *_LOOPBACK])

    async def allowed(self) -> AllowList:
        is_local = self.folder is not None and await self.is_open()
        return self._local if is_local else self._usual


class Asking(NamedTuple):
    """Tenant and host of a request, for the checks when the request opens a connection."""

    tenant: str
    host: str


asking: ContextVar[Asking] = ContextVar("asking")


class EgressRefusedError(InvalidInputError):
    """A request was for an address that outgoing HTTP must not use; a retry does not help."""

    code = "egress_refused"


class EgressError(UnavailableError):
    """A request got no answer or an invalid answer.

    The code is ``egress_unreachable``, ``egress_timeout``, ``egress_tls`` or ``egress_bad_answer``.
    """

    code = "egress_unreachable"


def address_in(host: str) -> Address | None:
    """Parse a URL's host as an address; return ``None`` for a name.

    Raises:
        EgressRefusedError: the host is neither an address nor a valid name.
    """
    try:
        return host_address(host)
    except InvalidInputError as error:
        raise EgressRefusedError(error.detail) from None


def check_address(host: str, address: Address, allowed: AllowList) -> None:
    """Refuse an address that is neither public nor allowed.

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
    """Guard that permits only public or allowed addresses for the request in :data:`asking`."""

    def __init__(self, allowed: AllowList, lookups: DnsResolver) -> None:
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
        """Resolve a name, and check all its addresses.

        Raises:
            OSError: the name has no address, or one of its addresses is forbidden.
        """
        try:
            address_list = await self._lookups.addresses(asking.get().tenant, host, port)
            addresses = [str(ip_address(each)) for each in dict.fromkeys(address_list)]
        except ValueError:  # UnicodeError if the host is not a DNS name
            raise AddressRefusedError(f"the name {host} does not resolve to addresses") from None
        if not addresses:
            raise socket.gaierror(f"{host} has no address")
        for address in addresses:
            try:
                self.check(address)
            except EgressRefusedError as error:
                raise AddressRefusedError(error.detail) from None
        return addresses[:8]
