"""Address checks of outgoing HTTP, when a socket is opened.

A name is resolved once, here, and the connection goes to a checked address: a later DNS answer has
no effect. ``Host``, SNI and the certificate still use the name.
"""

import socket
import ssl
from collections.abc import Iterable
from contextvars import ContextVar
from ipaddress import ip_address
from typing import Any

import httpcore2

from bottega.errors import InvalidInputError
from bottega.lookups import NameLookups
from bottega.tools.addresses import Address, AllowList, host_address, why_refused

asking: ContextVar[str] = ContextVar("asking", default="")
"""The tenant whose request opens a connection."""

_CONNECT_S = 5.0
_MOST_ADDRESSES = 8


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


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Opens sockets to public and allowed addresses only."""

    def __init__(self, allowed: AllowList, lookups: NameLookups) -> None:
        self._allowed = allowed
        self._lookups = lookups
        self._sockets = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: Exception = socket.gaierror(f"{host} has no address")
        for address in await self._addresses(host, port):
            try:
                return _Stream(
                    await self._sockets.connect_tcp(
                        str(address), port, timeout=_CONNECT_S, socket_options=socket_options
                    )
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _addresses(self, host: str, port: int) -> list[Address]:
        """Resolve ``host`` for a connection; a single forbidden address refuses the host."""
        literal = address_in(host)
        found = [literal] if literal is not None else await self._look_up(host, port)
        if not self._allowed.has_name(host):
            for address in found:
                check_address(host, address, self._allowed)
        return found[:_MOST_ADDRESSES]

    async def _look_up(self, host: str, port: int) -> list[Address]:
        try:
            found = await self._lookups.addresses(asking.get(), host, port)
            return list(dict.fromkeys(map(ip_address, found)))
        except ValueError:  # or UnicodeError: not a DNS name
            raise EgressRefusedError(f"the name {host} does not resolve to addresses") from None


class _Stream(httpcore2.AsyncNetworkStream):
    """A connection that is closed if its TLS handshake is cancelled."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            return await self._stream.start_tls(ssl_context, server_hostname, timeout)
        except BaseException:
            await self._stream.aclose()
            raise

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
