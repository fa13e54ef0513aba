"""Rules about the servers that a secret may be sent to. Pure."""

from collections.abc import Iterable
from ipaddress import ip_address

import httpx2

from bottega.errors import InvalidInputError
from bottega.tools.guard import AllowList, host_address


def refuse_stored(name: str, hosts: Iterable[str], url: str, allowed: AllowList) -> None:
    """Refuse to send a stored secret to a URL of another host, or unencrypted over a network.

    Args:
        hosts: hosts that may get the secret.
        allowed: private hosts and networks that the operator allows.

    Raises:
        InvalidInputError: ``secret_not_for_host``, ``secret_needs_https``.
    """
    parsed = httpx2.URL(url)
    host = _host_of(parsed)
    if host not in hosts:
        raise InvalidInputError(
            f"the secret '{name}' must not be sent to {host}: its hosts are {', '.join(hosts)}",
            code="secret_not_for_host",
        )
    if parsed.scheme != "https" and not _is_open_loopback(host, allowed):
        raise InvalidInputError(
            f"the secret '{name}' is sent over https only: write the address of {host} with https",
            code="secret_needs_https",
        )


def refuse_environment(
    name: str, hosts: Iterable[str] | None, url: str, *, may_be_unset: bool
) -> None:
    """Refuse to send a secret of the operator's environment to a URL.

    Args:
        hosts: hosts of the secret in ``BOTTEGA_SECRET_HOSTS``; ``None``: this has no such entry.
        may_be_unset: true: a secret without an entry may be sent to any host.

    Raises:
        InvalidInputError: ``secret_host_unset``, ``secret_not_for_host``.
    """
    if hosts is None:
        if may_be_unset:
            return
        raise InvalidInputError(
            f"the secret '{name}' has no hosts: store it with PUT /v1/secrets/{name}, or have the "
            "operator of this server name its hosts in BOTTEGA_SECRET_HOSTS",
            code="secret_host_unset",
        )
    host = _host_of(httpx2.URL(url))
    if host not in map(str.lower, hosts):
        raise InvalidInputError(
            f"the secret '{name}' must not be sent to {host}: BOTTEGA_SECRET_HOSTS names other "
            "hosts for it",
            code="secret_not_for_host",
        )


def as_compared(host: str) -> str:
    """Return a host's name or address in the form in which hosts are compared.

    Raises:
        InvalidInputError: the text is neither a name nor an address.
    """
    address = host_address(host)
    return host.removesuffix(".") if address is None else str(address)


def _host_of(url: httpx2.URL) -> str:
    host = url.raw_host.decode("ascii").lower()
    try:
        return as_compared(host)
    except InvalidInputError:
        return host  # an invalid name, which equals no secret's host


def _is_open_loopback(host: str, allowed: AllowList) -> bool:
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    return address.is_loopback and (allowed.has_name(host) or allowed.has_address(address))
