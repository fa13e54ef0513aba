"""uvicorn's WebSockets, with functions in the scope's extensions that ASGI lacks.

- Drop a client that does not read: a closing handshake would wait until it has read everything.
- Send many frames at once: with a thousand subscribers, system calls cost more than all the rest.
  The frames are not compressed, so their heads depend on their sizes only.
- Limit pings.
"""

import struct
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame
from websockets.http11 import Response
from websockets.protocol import State

from bottega.api.errors import problem_response
from bottega.api.server.addresses import Addresses
from bottega.api.server.headers import for_path
from bottega.api.server.http_protocol import DROP, raw_answer
from bottega.tenants.ratelimit import Rate, decide

SEND = "bottega.send"
"""Scope extension: ``await send(texts)`` sends UTF-8 texts, a frame each."""
MAY_PING = "bottega.may_ping"
"""Scope extension: ``may_ping()`` counts a client's frame as a ping.

It returns false beyond the limit; then nothing more is read from the client.
"""
TOO_MANY_PINGS = "bottega.too_many_pings"
"""Scope extension that the application sets: called once, if the client sends too many pings."""
PINGS_PER_S, PING_BURST = 1.0, 20
ABORT_AFTER_S = 5.0
MAX_PIECES = 100
_TEXT = 0x81
"""First byte of a text frame that is a whole message."""
_PINGS = Rate(PINGS_PER_S, PING_BURST)
_SLICE_BYTES = 1024
"""Bytes parsed at a time, so that excess pings are noticed before all are parsed."""
_NO_HANDSHAKE = "bad_handshake", "this is not a valid WebSocket handshake"


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSocket protocol with ``drop()``, ``send()`` and ``may_ping()`` in the scope."""

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
            # uvicorn takes a refusal, or a client that has gone, for a missing answer, and would
            # log an error.
            answered = self.initial_response is not None or self.transport.is_closing()
            self.handshake_complete |= answered

        return wrapped

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _SLICE_BYTES):
            if self._deaf:
                return
            super().data_received(data[start : start + _SLICE_BYTES])
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # Not even a readable handshake: uvicorn would leave it open without an answer.
            unreadable = problem_response(400, *_NO_HANDSHAKE)
            self.transport.write(b"".join(self.conn.data_to_send()) or raw_answer(unreadable))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """Limit a message's pieces: uvicorn limits its size, and pieces may be empty."""
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
        """Count a pong as a ping: the server sends no pings, so it expects no pong."""
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
        """Send frames as soon as there is room for them.

        Raises:
            ClientDisconnected: the client has gone, or is closing.
        """
        await self._room()
        if self.conn.state is not State.OPEN:
            raise ClientDisconnected
        parts = self.conn.data_to_send()
        for text in texts:
            parts.append(_head(len(text)))
            parts.append(text)
        self.transport.write(b"".join(parts))

    async def send(self, message: Any) -> None:
        await self._room()
        await super().send(message)

    async def _room(self) -> None:
        """Wait until there is room. (uvloop fails on writes to a closed connection.)

        Raises:
            ClientDisconnected: the client has gone.
        """
        await self.writable.wait()
        if self.transport.is_closing():
            raise ClientDisconnected

    def _drop(self, code: int, reason: str) -> None:
        """Send a close frame behind the unread data, and abort the connection soon after."""
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
        """Abort the connection if its client does not read; the application closes the others."""
        if not self.writable.is_set():
            self.transport.abort()
        elif self.close_sent or not self.handshake_complete:
            super().shutdown()


@lru_cache(10_000)
def _head(size: int) -> bytes:
    """Return the head of a text frame, as ``Frame.serialize`` writes it (RFC 6455, 5.2)."""
    if size < 126:
        return struct.pack("!BB", _TEXT, size)
    if size < 65536:
        return struct.pack("!BBH", _TEXT, 126, size)
    return struct.pack("!BBQ", _TEXT, 127, size)


def _refuse(status: int, text: str) -> Response:
    """Return a problem, where :meth:`ServerProtocol.reject` returns plain text."""
    code = "internal" if status == HTTPStatus.INTERNAL_SERVER_ERROR else "bad_handshake"
    problem = problem_response(status, code, text.strip())
    added = ((name.decode(), value.decode()) for name, value in for_path(""))
    fields = [*problem.headers.items(), *added, ("Connection", "close")]
    phrase = HTTPStatus(status).phrase
    return Response(status, phrase, Headers(fields), bytes(problem.body))
