"""HTTP connections with limits on size, time and number, which uvicorn lacks."""

import logging
import socket
from asyncio import TimerHandle
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bottega.api.errors import problem_response
from bottega.api.server.addresses import Addresses
from bottega.api.server.headers import for_path

DROP = "bottega.drop"
"""Scope extension: ``drop(code, reason)`` of a WebSocket, ``drop()`` of a request."""
RECEIVED = "bottega.received"
"""Scope extension of a request: ``received()`` returns the bytes that have come for it so far."""
UPLOADS = ("POST", "/v1/files")
"""Method and path of requests whose body may take longer: only their silence is limited."""
MAX_URL_BYTES = 8000
MAX_FIELDS = 100
MAX_FIELD_BYTES = 8000
MAX_HEAD_BYTES = 32 * 1024
MAX_PIPELINED = 16
LINGER_S = 1.0
_KERNEL_BYTES = 128 * 1024
# uvicorn warns about each unreadable request: anyone could fill the log.
_LOGGER = logging.getLogger("uvicorn.error.http")
_LOGGER.setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on clients.

    Attributes:
        patience_s: seconds for a request's head to arrive, and again for its body; of an upload,
            the longest silence.
        slow_reader_s: seconds that a client may read nothing of a response.
        connections: of all clients together.
    """

    patience_s: float
    slow_reader_s: float
    connections: int


class _RefusedError(Exception):
    """A request exceeds a limit."""


class HttpProtocol(HttpToolsProtocol):
    """HTTP protocol with limits, and with ``drop()`` in the scope.

    The kernel buffers little for a slow client. A refusal is sent if no other response is in
    progress on the connection, which then closes.
    """

    _timer: TimerHandle | None = None
    _reading: TimerHandle | None = None
    _unread = 0
    _refusal: Response | None = None
    _in_head = False
    _in_body = False
    _upgraded = False
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
            self._refuse_at_once("this server has reached its limit of connections: close one")
            return
        if beyond > 0:
            why = f"your address has {self._addresses.each} connections here: close one"
            if beyond > self._addresses.each:
                self._refuse_at_once(why)
            else:
                self._refuse(_busy(why))
            return
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
        self._wait()

    def _refuse_at_once(self, why: str) -> None:
        """Answer and close; a client that has already sent something may miss the response."""
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
        elif self._timer is None and not (self._answering or self._upgraded):
            self._wait()  # for the request after empty lines, which may stand between requests

    # Callbacks of the parser, which turns an exception into send_400_response.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
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
            self._stop_parsing(_too_large(f"one of more than {MAX_FIELD_BYTES} bytes"))
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop_parsing(_too_large(f"more than {MAX_HEAD_BYTES} bytes"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            detail = f"more than {MAX_PIPELINED} requests were sent before the first was answered"
            self._stop_parsing(problem_response(400, "too_many_pipelined", detail))
        self._unfinished = 0
        self._in_head, self._in_body = False, True
        self._stop_waiting()
        self._wait()
        super().on_headers_complete()
        self._is_upload = (self.scope["method"], self.scope.get("path")) == UPLOADS

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)
        if self._is_upload and self._answering:
            self._heard_at = self.loop.time()

    def on_message_complete(self) -> None:
        self._unfinished = 0
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        if self._answering:  # the responses would mix, and the first would miss the disconnect
            detail = "a WebSocket was requested before the previous request was answered"
            self._refuse(problem_response(400, "bad_handshake", detail))
            return
        self._upgraded = True
        self._stop_waiting()
        self._stop_watching()
        super().handle_websocket_upgrade()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: Any = cycle.scope
        begun = self._received_before
        extensions = scope.setdefault("extensions", {})
        extensions[DROP] = self.transport.abort
        extensions[RECEIVED] = lambda: self._received - begun
        super()._start_asgi_task(cycle, app)

    # A response stays buffered until it is read, even after the connection ended.

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
        """Answer a request that the parser, or a limit, stopped."""
        stopped = self._refusal or problem_response(
            400, "bad_request", "this cannot be read as an HTTP/1.1 request"
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
        if not (self._in_head or self._in_body):  # no request has begun
            self.transport.close()
            return
        if self._in_body and self._is_upload and self._answering:
            if self.flow.read_paused:  # the server still stores what the client sent
                self._heard_at = self.loop.time()
            left = self._heard_at + self._bounds.patience_s - self.loop.time()
            if left > 0:
                self._timer = self.loop.call_later(left, self._too_slow)
                return
        part = "body" if self._in_body else "head"
        detail = f"the request's {part} did not arrive within {self._bounds.patience_s:g} seconds"
        self._refuse(problem_response(408, "request_timeout", detail))

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _refuse(self, answer: Response) -> None:
        """Answer and close; abort if the client could take it for another request's response."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = answer
        self._stop_waiting()
        self._unset_keepalive_if_required()
        free = not self._answering
        if self._in_body:  # its head was accepted, so its response may have begun
            free = not (free or self.pipeline or self.cycle.response_started)
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not free:
            self.transport.abort()
            return
        self.transport.write(raw_answer(answer, self.server_state.default_headers))
        # Closing with unread input would reset the connection and lose the response.
        self.flow.resume_reading()
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)


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
