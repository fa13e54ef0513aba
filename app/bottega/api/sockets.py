"""uvicorn's WebSockets, with what ASGI lacks, as functions in the scope's extensions.

A way to be rid of a client that does not read: a closing handshake waits until it has read all that
was sent before. And a way to send many frames at once: a system call for each of a thousand
subscribers costs more than all the rest. And a bound on pings.
"""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Response

from bottega.api.edge import DROP, Addresses, raw_answer
from bottega.api.errors import problem_response
from bottega.api.headers import for_path
from bottega.tenants.ratelimit import Rate, decide

SEND = "bottega.send"
"""Extension of a WebSocket's scope: ``await send(texts)``; texts are UTF-8, a frame each."""
MAY_PING = "bottega.may_ping"
"""Extension of a WebSocket's scope: ``may_ping()`` counts a frame of the client as a ping. It
returns false if that is one too many; nothing more is read of the client then."""
TOO_MANY_PINGS = "bottega.too_many_pings"
"""Extension that the application sets: called once, when the client sent too many pings."""
PINGS_PER_S, PING_BURST = 1.0, 20
ABORT_AFTER_S = 5.0
MAX_PIECES = 100
_PINGS = Rate(PINGS_PER_S, PING_BURST)
_SLICE_BYTES = 1024
"""Frames are read so many bytes at a time: too many pings are noticed before all are parsed."""
_NO_HANDSHAKE = "bad_handshake", "this cannot be read as the opening of a WebSocket"


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSockets, with ``drop(code, reason)``, ``send(texts)`` and ``may_ping()`` in the scope."""

    _paid_at = 0.0
    _deaf = False

    def __init__(self, *args: Any, addresses: Addresses, **options: Any) -> None:
        super().__init__(*args, **options)
        self._addresses = addresses
        self.conn.reject = _refuse  # type: ignore[method-assign]

    def connection_lost(self, exc: Exception | None) -> None:
        self._addresses.leave(self.client)  # the connection was entered before its upgrade
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
            # uvicorn takes a refusal, which it sent, for no answer, and logs an error; the same
            # where nobody is left to be answered.
            answered = self.initial_response is not None or self.transport.is_closing()
            self.handshake_complete |= answered

        return wrapped

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if self._deaf:
                return
            super().data_received(data[start : start + _SLICE_BYTES])
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # It cannot even be read as a handshake: uvicorn would leave it open without an answer.
            unreadable = problem_response(400, *_NO_HANDSHAKE)
            self.transport.write(b"".join(self.conn.data_to_send()) or raw_answer(unreadable))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """uvicorn bounds a message's size, not the number of its pieces, which may be empty."""
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
        """Count a pong as a ping: the server sends no pings, so nobody asked for it."""
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
        """Send frames once there is room for them.

        Raises:
            ClientDisconnected: the client has gone, or says goodbye.
        """
        await self._room()
        try:
            for text in texts:
                self.conn.send_text(text)
        except InvalidState as error:
            raise ClientDisconnected from error
        self.transport.write(b"".join(self.conn.data_to_send()))

    async def send(self, message: Any) -> None:
        await self._room()
        await super().send(message)

    async def _room(self) -> None:
        """Wait until there is room; uvloop fails on what is written to a connection that is gone.

        Raises:
            ClientDisconnected: the client has gone.
        """
        await self.writable.wait()
        if self.transport.is_closing():
            raise ClientDisconnected

    def _drop(self, code: int, reason: str) -> None:
        """Say so behind what is still to be read, and break the connection off soon after."""
        if self.transport.is_closing() or self.close_sent:
            return
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(ABORT_AFTER_S, self.transport.abort)

    def shutdown(self) -> None:
        """The server stops: the application says goodbye to those who read, and nobody waits
        for those who do not."""
        if not self.writable.is_set():
            self.transport.abort()
        elif self.close_sent or not self.handshake_complete:
            super().shutdown()


def _refuse(status: int, text: str) -> Response:
    """As :meth:`ServerProtocol.reject`, but a problem."""
    code = "internal" if status == HTTPStatus.INTERNAL_SERVER_ERROR else "bad_handshake"
    problem = problem_response(status, code, text.strip())
    fields = [*problem.headers.items(), *for_path(""), ("Connection", "close")]
    phrase = HTTPStatus(status).phrase
    return Response(status, phrase, Headers(fields), bytes(problem.body))
