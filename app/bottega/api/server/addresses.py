"""Limits per client address: open connections, and requests without a valid key."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.types import Scope

from bottega.clock import monotonic
from bottega.tenants.ratelimit import Decision, Rate, RateLimits

RawHeader = tuple[bytes, bytes]
"""A header in ASGI's form: name, in lower case, and value."""
_ALWAYS: tuple[RawHeader, ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # A browser that shows a response as a page must not load or run anything. Routes of HTML pages
    # set their own policy.
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
_OF_API: tuple[RawHeader, ...] = (*_ALWAYS, (b"cache-control", b"no-store"))


def for_path(path: str) -> tuple[RawHeader, ...]:
    """Return the default headers of a response at ``path``."""
    return _OF_API if path.startswith(("/v1/", "/openai/")) else _ALWAYS


def sent(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values that a request sent for a header; ``name`` must be in lower case."""
    return [value for each, value in scope["headers"] if each == name]


Networks = Sequence[IPv4Network | IPv6Network]
_Address = IPv4Address | IPv6Address
_MOST_HOPS = 20


@dataclass(frozen=True, slots=True)
class Addresses:
    """Open connections, counted by client address.

    Args:
        each: maximum number of open connections per address; for IPv6, per /64 network.
        trusted: networks of proxies, to which the limit does not apply.
    """

    each: int
    trusted: Networks
    _open: Counter[str] = field(default_factory=Counter)

    def enter(self, client: tuple[str, int] | None) -> int:
        """Count a connection; return by how many connections the address exceeds the limit."""
        address = _address_of(client)
        place = _place(address)
        self._open[place] += 1
        # `None`: a connection without a network address
        is_exempt = address is None or _is_in(address, self.trusted)
        return 0 if is_exempt else max(0, self._open[place] - self.each)

    def leave(self, client: tuple[str, int] | None) -> None:
        """Count the end of a connection that :meth:`enter` counted."""
        place = _place(_address_of(client))
        self._open[place] -= 1
        if not self._open[place]:
            del self._open[place]


class KeylessRates:
    """Rate limit of requests without a valid key, per address; for IPv6, per /64 network.

    Behind a trusted proxy, ``X-Forwarded-For`` has the client's address.

    Args:
        per_s: average number of requests of an address per second; up to 4 times as many may arrive
            at once.
    """

    def __init__(
        self, per_s: float, trusted: Networks, clock: Callable[[], float] = monotonic
    ) -> None:
        self._trusted = trusted
        self._limits: RateLimits[str] = RateLimits(Rate.of(per_s, seconds=4), clock)

    @property
    def rate(self) -> Rate:
        return self._limits.rate

    def take(self, scope: Scope) -> Decision:
        """Decide if a request may pass now, and count the request."""
        return self._limits.take(_place(self.client(scope)))

    def look(self, scope: Scope) -> Decision:
        """Decide if a request may pass; do not count the request, because its key may be valid."""
        return self._limits.look(_place(self.client(scope)))

    def client(self, scope: Scope) -> _Address | None:
        """Return the client's address: the nearest address that is no trusted proxy's address."""
        address = _address_of(scope.get("client"))
        named = b",".join(sent(scope, b"x-forwarded-for")).decode("latin-1")
        for hop in reversed(named.rsplit(",", _MOST_HOPS)[-_MOST_HOPS:] if named else []):
            if address is None or not _is_in(address, self._trusted):
                break
            if (before := _parsed(hop)) is None:
                break
            address = before
        return address


def _is_in(address: _Address, networks: Networks) -> bool:
    return any(address in network for network in networks)


def _address_of(client: tuple[str, int] | None) -> _Address | None:
    return None if client is None else _parsed(client[0])


def _parsed(text: str) -> _Address | None:
    host = text.strip().strip('"')
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        # On a socket for both address families, IPv4 addresses have this form.
        return address.ipv4_mapped
    return address


def _place(address: _Address | None) -> str:
    if address is None:
        return ""
    return str(ip_network((address, 64), strict=False) if address.version == 6 else address)
