"""Connections of clients: uvicorn's protocols with limits, client addresses, and raw headers.

The protocols limit the size and time of requests, and the number of connections, also per address.

The extensions in the scope of a WebSocket have functions that ASGI does not define:

- ``DROP`` disconnects a client that does not read; a closing handshake would wait for reads.
- ``SEND`` sends many frames in one system call, because with a thousand subscribers the system
  calls cost more CPU time than all other work.
- ``MAY_PING`` limits pings.
"""

import logging
import socket
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Literal

from starlette.responses import Response
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame
from websockets.http11 import Response as Handshake
from websockets.protocol import State

from bottega.api.errors import problem_response
from bottega.clock import monotonic
from bottega.tenants.ratelimit import Decision, Rate, RateLimits, decide

RECEIVED = "bottega.received"
"""Scope extension of a request: ``received()`` returns the number of bytes that have arrived."""
DROP = "bottega.drop"
"""Scope extension of a WebSocket: ``drop(code, reason)`` closes the WebSocket at once."""
SEND = "bottega.send"
"""Scope extension: ``await send(texts)`` sends each UTF-8 text as a frame."""
MAY_PING = "bottega.may_ping"
"""Scope extension: ``may_ping()`` counts a client's frame as a ping.

Above the limit, the function returns false, and the server reads nothing more from the client.
"""
TOO_MANY_PINGS = "bottega.too_many_pings"
"""Scope extension that the application sets; called once if the client sends too many pings."""
PINGS_PER_S, PING_BURST = 1.0, 20
MAX_PIECES = 100
_PINGS = Rate(PINGS_PER_S, PING_BURST)
_SLICE_BYTES = 1024
"""Number of bytes that are parsed at once; small, so that too many pings are noticed early."""
UPLOADS = ("POST", "/v1/files")
"""Method and path of uploads. Only their pauses are limited, not the time of the whole body."""
MAX_FIELDS = 100
MAX_FIELD_BYTES = 8000
MAX_URL_BYTES = MAX_FIELD_BYTES
MAX_HEAD_BYTES = 32 * 1024
MAX_PIPELINED = 16
SLOW_READER_S = 10.0
"""Seconds after which a client is disconnected if it reads nothing of a response or stream."""
# Hide uvicorn's warnings about unreadable requests, because anyone could fill the log with these
# warnings.
_LOGGER = logging.getLogger("uvicorn.error.http")
_LOGGER.setLevel(logging.ERROR)


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
        addresses = b",".join(sent(scope, b"x-forwarded-for")).decode("latin-1")
        for hop in reversed(addresses.rsplit(",", _MOST_HOPS)[-_MOST_HOPS:] if addresses else []):
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


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits that apply to clients.

    Attributes:
        patience_s: maximum number of seconds in which a request's head must arrive, and then its
            body; for the body of an upload, the maximum pause between two pieces.
        slow_reader_s: maximum number of seconds for which a client may read nothing of a response.
        connections: maximum number of connections of all clients together.
    """

    patience_s: float
    slow_reader_s: float
    connections: int


LAST_ANSWERS = "last_answers"
"""Attribute of the server's state; if it is true, each connection closes after its next answer."""


class _RefusedError(Exception):
    """Signal to the parser that a request exceeds a limit."""


class HttpProtocol(HttpToolsProtocol):
    """HTTP protocol with limits.

    The socket's send buffer is small, so a slow client costs little memory. The server sends a
    refusal only if no response is in progress on the connection. After a refusal, the server closes
    the connection.
    """

    _timer: TimerHandle | None = None
    _reading: TimerHandle | None = None
    _unread = 0
    _refusal: Response | None = None
    _part: Literal["", "head", "body", "socket"] = ""
    """Part of a request that arrives now; ``socket``: the connection belongs to a WebSocket."""
    _is_upload = False
    _fields = 0
    _head_bytes = 0
    _unfinished = 0
    _received = _received_before = 0
    _heard_at = 0.0

    def __init__(self, *args: Any, bounds: Bounds, addresses: Addresses, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _LOGGER
        self._bounds = bounds
        self._addresses = addresses

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        beyond = self._addresses.enter(self.client)
        if len(self.connections) > self._bounds.connections:
            self._refuse_at_once("this server has reached its limit of connections: close some")
            return
        if beyond > 0:
            why = f"your address has {self._addresses.each} connections to this server: close some"
            if beyond > self._addresses.each:
                self._refuse_at_once(why)
            else:
                self._refuse(_busy(why))
            return
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 * 1024)
        self._wait()

    def _refuse_at_once(self, why: str) -> None:
        """Send the refusal and close at once; a client that is sending may miss the refusal."""
        self._refusal = _busy(why)
        self.transport.write(raw_answer(self._refusal, self.server_state.default_headers))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._addresses.leave(self.client)
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unfinished += len(data)
        self._received_before, self._received = self._received, self._received + len(data)
        super().data_received(data)
        if self._unfinished > MAX_HEAD_BYTES:
            self._refuse(_too_large(f"more than {MAX_HEAD_BYTES} bytes"))
        elif self._timer is None and not (self._answering or self._part):
            self._wait()  # so far only empty lines have arrived, which may precede a request

    # Callbacks of the parser. After an exception, the parser calls send_400_response.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"
        self._fields = self._head_bytes = 0
        if self._timer is None:
            self._wait()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            detail = f"the URL is longer than this server's limit of {MAX_URL_BYTES} bytes"
            self._stop_parsing(problem_response(414, "url_too_long", detail))

    def on_header(self, name: bytes, value: bytes) -> None:
        size = len(name) + len(value)
        self._fields += 1
        self._head_bytes += size
        if self._fields > MAX_FIELDS:
            self._stop_parsing(_too_large(f"more than {MAX_FIELDS}"))
        if size > MAX_FIELD_BYTES:
            self._stop_parsing(_too_large(f"a field has more than {MAX_FIELD_BYTES} bytes"))
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop_parsing(_too_large(f"more than {MAX_HEAD_BYTES} bytes"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            detail = f"more than {MAX_PIPELINED} requests were sent before the first was answered"
            self._stop_parsing(problem_response(400, "too_many_pipelined", detail))
        self._unfinished = 0
        self._part = "body"
        self._stop_waiting()
        self._wait()
        super().on_headers_complete()
        if getattr(self.server_state, LAST_ANSWERS, False) and self._answering:
            self.cycle.keep_alive = False
        scope: Any = self.scope
        self._is_upload = (scope["method"], scope.get("path")) == UPLOADS
        begun = self._received_before
        scope["extensions"] = {RECEIVED: lambda: self._received - begun}

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)
        if self._is_upload and self._answering:
            self._heard_at = self.loop.time()

    def on_message_complete(self) -> None:
        self._unfinished = 0
        self._part = ""
        self._stop_waiting()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        if (
            self._answering
            # Refuse: otherwise the two responses would mix, and the first response would not notice
            # a disconnect.
        ):
            detail = "a WebSocket was requested before the previous request was answered"
            self._refuse(problem_response(400, "bad_handshake", detail))
            return
        self._part = "socket"
        self._stop_waiting()
        self._stop_watching()
        super().handle_websocket_upgrade()

    # A timer ends a connection whose client does not read, because the connection's buffers would
    # stay full.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._bounds.slow_reader_s, self._drop_slow_reader)

    def _drop_slow_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    # Refusing

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser or a limit stopped."""
        stopped = self._refusal or problem_response(
            400, "bad_request", "this is not a valid HTTP/1.1 request"
        )
        self._refusal = None
        self._refuse(stopped)

    def _stop_parsing(self, why: Response) -> None:
        self._refusal = why
        raise _RefusedError

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self._bounds.patience_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if not self._part:  # no request has begun
            self.transport.close()
            return
        if self._part == "body" and self._is_upload and self._answering:
            if self.flow.read_paused:  # the server still buffers data of the client
                self._heard_at = self.loop.time()
            seconds_left = self._heard_at + self._bounds.patience_s - self.loop.time()
            if seconds_left > 0:
                self._timer = self.loop.call_later(seconds_left, self._too_slow)
                return
        patience = f"{self._bounds.patience_s:g} seconds"
        detail = f"the request's {self._part} did not arrive within {patience}"
        self._refuse(problem_response(408, "request_timeout", detail))

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _refuse(self, answer: Response) -> None:
        """Refuse and close; abort if the refusal could be read as an earlier request's response."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = answer
        self._stop_waiting()
        free = not self._answering
        if self._part == "body":  # the server accepted the head, so the response may have begun
            free = not (free or self.pipeline or self.cycle.response_started)
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not free:
            self.transport.abort()
            return
        self.transport.write(raw_answer(answer, self.server_state.default_headers))
        # With unread input, closing would reset the connection, and the client would lose the
        # response.
        self.flow.resume_reading()
        self.transport.write_eof()
        self._timer = self.loop.call_later(1.0, self.transport.abort)


def raw_answer(answer: Response, more: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return the bytes of a response that closes its connection."""
    phrase = HTTPStatus(answer.status_code).phrase
    fields = [
        *more,
        *for_path(""),
        *answer.raw_headers,
        (b"connection", b"close"),
    ]
    head = b"".join(b"%b: %b\r\n" % field for field in fields)
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (
        answer.status_code,
        phrase.encode(),
        head,
        bytes(answer.body),
    )


def _busy(why: str) -> Response:
    detail = f"{why}, or try again in a moment"
    return problem_response(503, "too_many_connections", detail, headers={"Retry-After": "1"})


def _too_large(what: str) -> Response:
    detail = f"the header fields are too large: {what}"
    return problem_response(431, "headers_too_large", detail)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSocket protocol with ``drop()``, ``send()`` and ``may_ping()`` in the scope."""

    _paid_at = 0.0
    _deaf = False

    def __init__(self, *args: Any, addresses: Addresses, **options: Any) -> None:
        super().__init__(*args, **options)
        self._addresses = addresses
        self.conn.reject = _rejection  # type: ignore[method-assign]

    def connection_lost(self, exc: Exception | None) -> None:
        # HttpProtocol counted this connection before the upgrade
        self._addresses.leave(self.client)
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        extensions: Any = self.scope["extensions"]
        extensions[DROP] = self._drop
        extensions[SEND] = self._send
        extensions[MAY_PING] = self._may_ping
        self.app = self._with_refusals(self.app)
        await super().run_asgi()

    def _with_refusals(self, app: Any) -> Any:
        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            # Tell uvicorn if the request was refused or the client left: otherwise uvicorn logs
            # that the response is missing.
            answered = self.initial_response is not None or self.transport.is_closing()
            self.handshake_complete |= answered

        return wrapped

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if self._deaf:
                return
            super().data_received(data[start : start + _SLICE_BYTES])
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # The handshake is unreadable. uvicorn would leave the connection open without an
            # answer.
            detail = "this is not a valid WebSocket handshake"
            unreadable = problem_response(400, "bad_handshake", detail)
            self.transport.write(b"".join(self.conn.data_to_send()) or raw_answer(unreadable))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """Limit the number of a message's frames, because uvicorn does not limit empty frames."""
        if self.close_sent:
            return
        if len(self.frames) >= MAX_PIECES:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_PIECES} pieces")
            self.handle_parser_exception()
        else:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self._may_ping():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        """Count a pong like a ping: the server sends no pings, so it expects no pongs."""
        self._may_ping()

    def _may_ping(self) -> bool:
        if self._deaf:
            return False
        decision = decide(_PINGS, self._paid_at, self.loop.time())
        self._paid_at = decision.paid_at
        if not decision.allowed:
            self._deaf = True
            extensions: Any = self.scope["extensions"]
            extensions.get(TOO_MANY_PINGS, self.transport.abort)()
        return decision.allowed

    async def _send(self, texts: Iterable[bytes]) -> None:
        await self._room()
        if self.conn.state is not State.OPEN:
            raise ClientDisconnected
        for text in texts:
            self.conn.send_text(text)
        self.transport.write(b"".join(self.conn.data_to_send()))

    async def send(self, message: Any) -> None:
        await self._room()
        await super().send(message)

    async def _room(self) -> None:
        """Wait until the buffer has room. (uvloop raises on writes to a closed connection.)

        Raises:
            ClientDisconnected: the client has disconnected.
        """
        await self.writable.wait()
        if self.transport.is_closing():
            raise ClientDisconnected

    def _drop(self, code: int, reason: str) -> None:
        """Send a close frame after the unread data, and abort the connection 5 s later."""
        if self.transport.is_closing() or self.close_sent:
            return
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(5.0, self.transport.abort)

    def shutdown(self) -> None:
        """Abort the connection if the client does not read. (The application closes all others.)"""
        if not self.writable.is_set():
            self.transport.abort()
        elif self.close_sent or not self.handshake_complete:
            super().shutdown()


def _rejection(status: int, text: str) -> Handshake:
    code = "internal" if status == HTTPStatus.INTERNAL_SERVER_ERROR else "bad_handshake"
    problem = problem_response(status, code, text.strip())
    added = ((name.decode(), value.decode()) for name, value in for_path(""))
    fields = [*problem.headers.items(), *added, ("Connection", "close")]
    phrase = HTTPStatus(status).phrase
    return Handshake(status, phrase, Headers(fields), bytes(problem.body))
