"""Outgoing HTTP connections through aiohttp, for requests to models, tools and MCP servers.

A session can get a function that resolves host names, and a function that checks the address of
each socket just before the socket connects. A session measures the CPU time for the parsing of a
response. A session stores no cookies and decompresses nothing.

An API process loads this module and aiohttp when it sends its first outgoing request.
"""

import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from functools import cache, partial
from typing import Any

import aiohttp
import httpx2
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError

from bottega.clock import cpu_s
from bottega.errors import BottegaError
from bottega.network import AddressRefusedError, Guard, Resolver
from bottega.outside import MOST_UNITS, STEP_BYTES, BoundedReader, OutsideError

NETWORK_ERRORS = (aiohttp.ClientError, ssl.SSLError, OSError, TimeoutError)
"""Errors of sending a request and reading its answer."""

_FREE_FRAMING = STEP_BYTES
"""Number of bytes that the head and the chunk sizes of an answer may always have together."""


@cache
def certificates() -> ssl.SSLContext:
    """Load the trusted certificates once for all clients, because loading takes 20 ms."""
    return httpx2.create_ssl_context()


def open_session(
    timeout: aiohttp.ClientTimeout,
    *,
    most: int,
    kept_s: float,
    most_idle: int | None = None,
    tls: ssl.SSLContext | None = None,
    look_up: Resolver | None = None,
    guard: Guard | None = None,
) -> aiohttp.ClientSession:
    """Return a session for the running event loop.

    Args:
        most: maximum number of connections in use; further requests wait. 0: no limit.
        kept_s: number of seconds for which an idle connection stays open.
        most_idle: maximum number of idle connections; ``None``: no limit.
        tls: TLS context to use; ``None``: the context of :func:`certificates`.
        look_up: function that replaces the system's resolver.
        guard: function that checks the address of each connection; ``None``: any address is
            allowed.
    """
    connector = _Connector(
        most_idle,
        limit=most,
        keepalive_timeout=kept_s,
        ssl=tls or certificates(),
        resolver=None if look_up is None else _Resolver(look_up),
        use_dns_cache=look_up is None,
        socket_factory=None if guard is None else _guarded(guard),
    )
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # BoundedReader decompresses
        read_bufsize=STEP_BYTES,
        timeout=timeout,
    )
    session._retry_connection = False  # a retry by aiohttp could send a request twice
    return session


def reader_of(
    response: aiohttp.ClientResponse, most_bytes: int, units: int = MOST_UNITS
) -> BoundedReader:
    """Return a reader for an answer's body.

    Raises:
        OutsideError: the body's encoding is unknown.
    """
    encoding = response.headers.get("content-encoding", "")
    return BoundedReader(most_bytes, units=units, encoding=encoding)


async def body_of(
    response: aiohttp.ClientResponse, reader: BoundedReader
) -> AsyncGenerator[bytes, None]:
    """Yield the decompressed bytes of an answer as they arrive.

    Raises:
        NETWORK_ERRORS: the connection was lost.
        OutsideError: the body is too large, cannot be decompressed, or costs too much CPU time.
    """
    charge = charging(response, reader)
    while piece := await response.content.readany():
        charge()
        async for step in reader.steps(piece):
            yield step


def charging(response: aiohttp.ClientResponse, reader: BoundedReader) -> Callable[[], None]:
    """Return a function that charges a response's CPU time to its reader; call it after each read.

    The function raises ``OutsideError`` if the response has cost too much CPU time. The function
    also raises it if the response's head and chunk sizes are longer than its content, because
    parsing tiny chunks is slow.
    """
    protocol = response.connection and response.connection.protocol
    if not isinstance(protocol, _Protocol):  # the whole response has arrived
        return _free
    content = response.content

    def charge() -> None:
        reader.charge(protocol.spent())
        framing = protocol.parsed - content.total_bytes
        if framing > content.total_bytes + _FREE_FRAMING:
            raise OutsideError("chunks of a few bytes")

    return charge


def _free() -> None:
    """Charge nothing."""


class _Protocol(ResponseHandler):
    """A connection that measures the CPU time for parsing a response.

    Attributes:
        parsed: number of parsed bytes of the current response, including its head and chunk sizes.
    """

    parsed = 0
    _received = 0
    _heads = 0
    _spent_s = 0.0
    _is_fresh = False

    def set_response_params(self, **params: Any) -> None:
        self.parsed = self._received = self._heads = 0
        self._spent_s = 0.0
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._is_fresh = True
        if self._received <= STEP_BYTES:  # as in BoundedReader, do not measure the first bytes
            super().data_received(data)
            return
        began = cpu_s()
        super().data_received(data)
        self._spent_s += cpu_s() - began

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume once for all bytes that have arrived; aiohttp would resume after each chunk."""
        if self._reading_paused or self._is_fresh:
            super().resume_reading(resume_parser)
            self._is_fresh = False
            if not self._reading_paused:
                self.parsed = self._received

    def feed_data(self, data: Any, size: int = 0) -> None:
        self._heads += 1
        if self._heads <= 20:  # 19 interim heads (status 1xx) and the final head
            super().feed_data(data, size)
        elif self.transport is not None:
            self.set_exception(aiohttp.ClientPayloadError("too many heads of answers"))
            self.transport.close()

    def set_exception(self, exc: BaseException, *causes: BaseException) -> None:
        super().set_exception(exc, *causes)
        # Without this error, a reader of the body would wait for ever after a malformed chunk.
        if self._payload is not None and isinstance(exc, HttpProcessingError):
            self._payload.set_exception(aiohttp.ClientPayloadError("the body is not valid HTTP"))

    def spent(self) -> float:
        """Return the CPU time for parsing since the last call of this method, in seconds."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent


class _Connector(aiohttp.TCPConnector):
    def __init__(self, most_idle: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._most_idle = most_idle
        self._factory = partial(_Protocol, self._loop)  # type: ignore[assignment]

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        if self._most_idle is not None:
            should_close |= sum(map(len, self._conns.values())) >= self._most_idle
        super()._release(key, protocol, should_close=should_close)


class _Resolver(AbstractResolver):
    """Resolver in place of aiohttp's, because all of aiohttp's look-ups share a few threads."""

    def __init__(self, look_up: Resolver) -> None:
        self._look_up = look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await self._look_up(host, port)
        ]

    async def close(self) -> None:
        """Do nothing, because other sessions use the same resolver."""


def _guarded(guard: Guard) -> Callable[[Any], socket.socket]:
    def connect(found: Any) -> socket.socket:
        family, kind, proto, _, address = found
        try:
            guard(str(address[0]))
        except BottegaError as error:
            raise AddressRefusedError(error.detail) from None
        return socket.socket(family=family, type=kind, proto=proto)

    return connect
