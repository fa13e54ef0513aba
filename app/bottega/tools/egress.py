"""HTTP client with limits, for the requests that tools, webhooks and MCP connections send.

:mod:`bottega.tools.guard` checks the address of each connection. The client ignores redirects,
cookies, and proxies in environment variables. Model calls do not use this client, but sessions of
:mod:`bottega.llm.provider`, which has the same checks for servers that a tenant chooses.
"""

import asyncio
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import httpx2

from bottega.network import DnsResolver, Resolver, resolve
from bottega.outside import BoundedReader
from bottega.tools.guard import (
    AddressGuard,
    AllowList,
    Asking,
    EgressError,
    EgressRefusedError,
    address_in,
    asking,
    check_address,
)

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Egress", "EgressError", "EgressRefusedError", "Reply", "checked_url", "refuse_inside"]

_LONGEST_URL = 8192


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer.

    Attributes:
        body: the body after decompression (gzip, deflate), cut at the requested limit.
        truncated: true if the body was cut.
    """

    status: int
    headers: httpx2.Headers
    body: bytes
    truncated: bool = False


def checked_url(url: str) -> httpx2.URL:
    """Parse an http(s) URL that has a host and no user or password; remove the fragment.

    Raises:
        EgressRefusedError: the URL is not valid.
    """
    try:
        parsed = httpx2.URL(url[: _LONGEST_URL + 1])
    except httpx2.InvalidURL as error:
        raise EgressRefusedError(f"this is not a valid URL: {error}") from None
    if len(url) > _LONGEST_URL:
        raise EgressRefusedError(f"the URL is longer than {_LONGEST_URL} characters")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise EgressRefusedError("the URL must have the form http(s)://host/path")
    if parsed.userinfo:
        raise EgressRefusedError("a URL must not contain a user name or password")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise EgressRefusedError(f"{parsed.port} is not a valid port")
    address_in(parsed.raw_host.decode("ascii"))
    return parsed.copy_with(fragment=None)


def refuse_inside(url: str, allowed: AllowList) -> None:
    """Refuse a URL whose host is a forbidden address.

    The function accepts all host names: their addresses are checked later, by each request.

    Raises:
        EgressRefusedError: the address is forbidden, or :func:`checked_url` refuses the URL.
    """
    host = checked_url(url).raw_host.decode("ascii")
    if (address := address_in(host)) is not None and not allowed.has_name(host):
        check_address(host, address, allowed)


class Egress:
    """HTTP client for public addresses, and for other addresses that the operator allows.

    A client belongs to the event loop of its first request. A process sends all requests by one
    client, so the requests share connections.

    Args:
        allow: hosts, addresses and CIDR blocks that are allowed although they are not public
            (``BOTTEGA_EGRESS_ALLOW``).
        resolve: function that replaces the system's resolver.
        ssl_context: TLS context; by default a context with the system's certificates.
        each: maximum number of concurrent requests per tenant; further requests wait.

    Attributes:
        lookups: resolver of host names, also for other connections to tenants' hosts.

    Raises:
        InvalidInputError: an entry of ``allow`` is not valid.
    """

    def __init__(
        self,
        allow: Sequence[str] | AllowList = (),
        *,
        resolve: Resolver = resolve,
        ssl_context: ssl.SSLContext | None = None,
        each: int = 256,
    ) -> None:
        self.lookups = DnsResolver(resolve)
        allowed = allow if isinstance(allow, AllowList) else AllowList.parse(allow)
        self._guard = AddressGuard(allowed, self.lookups)
        self._ssl_context = ssl_context
        self._each = each
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @cached_property
    def _session(self) -> "aiohttp.ClientSession":
        import aiohttp

        from bottega.http_sessions import open_session

        return open_session(
            aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            most=0,  # no limit: otherwise a tenant's slow servers could use all connections
            kept_s=10.0,
            most_idle=20,
            tls=self._ssl_context,
            look_up=self._guard.look_up,
            guard=self._guard.check,
        )

    async def aclose(self) -> None:
        """Close all connections; requests that still run fail."""
        if "_session" in self.__dict__:
            await self._session.close()
        self.lookups.close()

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        timeout_s: float,
        max_bytes: int,
        tenant: str = "",
    ) -> Reply:
        """Send one request and return the answer, whatever its status.

        Args:
            timeout_s: seconds for the whole call, including the wait for the tenant's semaphore.
            max_bytes: size in bytes at which the decoded body is cut.
            tenant: name of the tenant that sends the request.

        Raises:
            EgressRefusedError: the URL, or an address of its host, is not allowed.
            EgressError: there was no answer in time, or the answer is invalid.
            InvalidInputError: a header is reserved or invalid.
        """
        from bottega.tools import sending

        target = checked_url(url)
        fields = sending.fields_of(target, headers or {})
        failure: Exception
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit, self.turn(tenant):
                try:
                    answer = await self._send(method, target, fields, content, tenant)
                    try:
                        body, is_cut = await sending.read(answer, max_bytes)
                        answer_headers = httpx2.Headers(answer.raw_headers)
                        return Reply(answer.status, answer_headers, body, is_cut)
                    finally:
                        answer.release()
                except sending.FAILURES as error:
                    failure = error
        except TimeoutError as error:
            if not limit.expired():
                raise
            failure = error
        # Raise the error outside of the ``except`` blocks: inside, Python would attach the handled
        # error, which may quote the request.
        raise sending.explained(failure, target.host, timeout_s)

    def turn(self, tenant: str) -> asyncio.Semaphore:
        """Return the semaphore that limits a tenant's concurrent requests.

        :meth:`request` acquires the semaphore. A caller of :meth:`stream` must acquire it first.
        """
        return self._slots.setdefault(tenant, asyncio.Semaphore(self._each))

    async def stream(
        self, request: httpx2.Request, tenant: str, reader: BoundedReader
    ) -> httpx2.Response:
        """Send a request; return the answer, whose body the caller reads.

        The caller must first acquire the semaphore (:meth:`turn`), limit the time, and close the
        answer.

        Args:
            reader: limits the size of the body. Reading the body raises the reader's errors.

        Raises:
            EgressRefusedError: the URL, or an address of its host, is not allowed.
            EgressError: there was no answer, or the answer is invalid.
        """
        from bottega.tools import sending

        url = checked_url(str(request.url))
        content = await request.aread()
        fields = request.headers.multi_items()
        try:
            answer = await self._send(request.method, url, fields, content or None, tenant)
        except sending.FAILURES as error:
            failure = error
        else:
            return httpx2.Response(
                answer.status,
                headers=answer.raw_headers,
                stream=sending.Body(answer, reader, url.host),
                request=request,
            )
        raise sending.explained(failure, url.host, 0)

    async def _send(
        self,
        method: str,
        url: httpx2.URL,
        fields: Iterable[tuple[str, str]],
        content: bytes | None,
        tenant: str,
    ) -> "aiohttp.ClientResponse":
        from yarl import URL

        asking.set(Asking(tenant, url.raw_host.decode("ascii")))
        return await self._session.request(
            method,
            URL(str(url), encoded=True),
            headers=list(fields),
            data=content,
            skip_auto_headers=("Content-Type",),
            allow_redirects=False,
        )
