"""The only HTTP client for outgoing requests: public addresses only, and bounded.

``tools.guard`` checks the address of each connection. No redirects, cookies or proxies of the
environment.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from weakref import WeakValueDictionary

import httpcore2
import httpx2

from bottega.errors import UnavailableError
from bottega.lookups import NameLookups, Resolver, resolve
from bottega.tools.addresses import AllowList
from bottega.tools.guard import (
    EgressRefusedError,
    GuardedBackend,
    address_in,
    asking,
    check_address,
)
from bottega.tools.headers import check_header

__all__ = ["Egress", "EgressError", "EgressRefusedError", "Reply", "checked_url", "refuse_inside"]

_IDLE_CONNECTIONS = 20
_IDLE_S = 10.0
_LONGEST_URL = 8192
_ENCODINGS = ("", "identity", "gzip", "deflate")
_FAILURES = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.TimeoutException,
    httpcore2.UnsupportedProtocol,
    httpx2.DecodingError,
    OSError,
)


class EgressError(UnavailableError):
    """No answer, or an invalid one.

    Codes: ``egress_unreachable``, ``egress_timeout``, ``egress_tls``, ``egress_bad_answer``.
    """

    code = "egress_unreachable"


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer.

    Attributes:
        body: decoded (gzip, deflate), cut at the requested limit.
        truncated: the body was cut.
    """

    status: int
    headers: httpx2.Headers
    body: bytes
    truncated: bool = False


def checked_url(url: str) -> httpx2.URL:
    """Parse an http(s) URL with a host and without user and password; drop its fragment.

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
        raise EgressRefusedError("a URL must not hold a user name or password")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise EgressRefusedError(f"{parsed.port} is not a valid port")
    address_in(parsed.raw_host.decode("ascii"))
    return parsed.copy_with(fragment=None)


def refuse_inside(url: str, allowed: AllowList) -> None:
    """Refuse a URL whose host is a forbidden address.

    A host name is checked when a request is sent, by the addresses that it resolves to.

    Raises:
        EgressRefusedError: the address is forbidden, or :func:`checked_url` refuses the URL.
    """
    host = checked_url(url).raw_host.decode("ascii")
    if (address := address_in(host)) is not None and not allowed.has_name(host):
        check_address(host, address, allowed)


@cache
def _certificates() -> ssl.SSLContext:
    """Load the trusted certificates once for all clients: it takes 20 ms."""
    return httpcore2.default_ssl_context()


class Egress:
    """Sends HTTP requests to public addresses, and to others that the operator allows.

    Belongs to the event loop that uses it first. All senders share it, to reuse connections.

    Args:
        allow: hosts, addresses and CIDR blocks that may be reached although they are not public
            (``BOTTEGA_EGRESS_ALLOW``).
        resolve: replaces the system's resolver.
        ssl_context: replaces the context with the system's certificates.
        each: concurrent requests per tenant; others wait.

    Attributes:
        lookups: of names, also for others that connect where a tenant wants.

    Raises:
        InvalidInputError: an entry of ``allow`` is not valid.
    """

    def __init__(
        self,
        allow: Sequence[str] = (),
        *,
        resolve: Resolver = resolve,
        ssl_context: ssl.SSLContext | None = None,
        each: int = 256,
    ) -> None:
        self.lookups = NameLookups(resolve)
        self._backend = GuardedBackend(AllowList.parse(allow), self.lookups)
        self._ssl_context = ssl_context
        self._each = each
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @cached_property
    def _pool(self) -> httpcore2.AsyncConnectionPool:
        return httpcore2.AsyncConnectionPool(
            ssl_context=self._ssl_context or _certificates(),
            # One tenant's slow servers must not take the connections of others.
            max_connections=None,
            max_keepalive_connections=_IDLE_CONNECTIONS,
            keepalive_expiry=_IDLE_S,
            network_backend=self._backend,
        )

    async def aclose(self) -> None:
        """Close the connections. Open requests fail."""
        if "_pool" in self.__dict__:
            await self._pool.aclose()
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
        """Send one request and read its answer, of any status.

        Args:
            timeout_s: seconds for the whole call, including the wait for a slot.
            tenant: the tenant that sends the request.
            max_bytes: limit of the decoded body; the rest is not read.

        Raises:
            EgressRefusedError: the URL, or an address of its host, is not allowed.
            EgressError: there was no answer in time, or an invalid one.
            InvalidInputError: a header is reserved or invalid.
        """
        target = checked_url(url)
        fields = _fields(target, headers or {})
        asking.set(tenant)
        failure: Exception
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit, self.turn(tenant):
                try:
                    return await self._exchange(method, target, fields, content, max_bytes)
                except _FAILURES as error:
                    failure = error
        except TimeoutError as error:
            if not limit.expired():
                raise
            failure = error
        # Raised outside of the handlers: their errors, which may quote the request, would be its
        # context.
        raise _explained(failure, target.host, timeout_s)

    def turn(self, tenant: str) -> asyncio.Semaphore:
        """Return what a tenant's request holds while it is sent and answered.

        :meth:`request` takes it by itself.
        """
        return self._slots.setdefault(tenant, asyncio.Semaphore(self._each))

    async def stream(self, request: httpx2.Request, tenant: str) -> httpx2.Response:
        """Send a request; return its answer with a body that is still to be read.

        The caller holds a :meth:`turn`, limits the time and the body, and closes the answer.

        Raises:
            EgressRefusedError: the URL, or an address of its host, is not allowed.
            EgressError: there was no answer, or an invalid one.
        """
        url = checked_url(str(request.url))
        asking.set(tenant)
        sent = httpcore2.Request(
            request.method, _place(url), headers=request.headers.raw, content=request.stream
        )
        try:
            answer = await self._pool.handle_async_request(sent)
        except _FAILURES as error:
            failure = error
        else:
            body = _Answer(answer, url.host)
            return httpx2.Response(
                answer.status, headers=answer.headers, stream=body, request=request
            )
        raise _explained(failure, url.host, 0)

    async def _exchange(
        self,
        method: str,
        url: httpx2.URL,
        fields: list[tuple[bytes, bytes]],
        content: bytes | None,
        max_bytes: int,
    ) -> Reply:
        async with self._pool.stream(
            method, _place(url), headers=fields, content=content
        ) as answer:
            headers = httpx2.Headers(answer.headers)
            if headers.get("content-encoding", "").strip().lower() not in _ENCODINGS:
                raise httpx2.DecodingError("unknown content-encoding")
            decoded = httpx2.Response(answer.status, headers=headers, stream=_Stream(answer))
            body, truncated = await _read(decoded, max_bytes)
            return Reply(answer.status, headers, body, truncated)


def _place(url: httpx2.URL) -> httpcore2.URL:
    return httpcore2.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )


def _fields(url: httpx2.URL, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Merge the caller's header fields with defaults and with fields that only we set."""
    for name, value in headers.items():
        check_header(name, value)
    fields = {"user-agent": "bottega", "accept": "*/*"}
    fields |= {name.lower(): value for name, value in headers.items()}
    fields |= {"host": url.netloc.decode("ascii"), "accept-encoding": "gzip, deflate"}
    return [(name.encode("ascii"), value.encode("ascii")) for name, value in fields.items()]


async def _read(response: httpx2.Response, max_bytes: int) -> tuple[bytes, bool]:
    """Read and decode the body, in pieces of at most 1 MiB; return it and if it was cut."""
    body = bytearray()
    async with contextlib.aclosing(response.aiter_bytes()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > max_bytes:
                return bytes(body[:max_bytes]), True
    return bytes(body), False


def _explained(error: Exception, host: str, timeout_s: float) -> EgressError:
    """Make an error that does not quote the request."""
    if isinstance(error, TimeoutError):
        return EgressError(
            f"no complete answer from {host} within {timeout_s:g} s", code="egress_timeout"
        )
    if (tls := _tls_reason(error)) is not None:
        return EgressError(f"no secure connection to {host}: {tls}", code="egress_tls")
    if isinstance(error, httpcore2.RemoteProtocolError):
        return EgressError(f"the answer of {host} is not valid HTTP", code="egress_bad_answer")
    if isinstance(error, httpx2.DecodingError):
        return EgressError(
            f"the answer of {host} has an encoding that cannot be read", code="egress_bad_answer"
        )
    if isinstance(error, socket.gaierror):
        return EgressError(f"the name {host} cannot be resolved")
    if isinstance(error, httpcore2.ConnectError | httpcore2.ConnectTimeout):
        return EgressError(f"cannot connect to {host}")
    return EgressError(f"the connection to {host} broke off before the answer was complete")


def _tls_reason(error: BaseException | None) -> str | None:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is not valid ({error.verify_message})"
        if isinstance(error, ssl.SSLError):
            return "the TLS handshake failed"
        error = error.__cause__ or error.__context__
    return None


class _Stream(httpx2.AsyncByteStream):
    """Adapter from httpcore2's answer to the stream that httpx2 decodes."""

    def __init__(self, answer: httpcore2.Response) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._answer.aiter_stream():
            yield part


class _Answer(_Stream):
    """The body of an answer that somebody else reads; its errors are explained."""

    def __init__(self, answer: httpcore2.Response, host: str) -> None:
        super().__init__(answer)
        self._host = host

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in super().__aiter__():
                yield part
        except _FAILURES as error:
            failure = error
        else:
            return
        raise _explained(failure, self._host, 0)

    async def aclose(self) -> None:
        await self._answer.aclose()
