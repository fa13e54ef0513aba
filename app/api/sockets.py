"""uvicorn's connections, with what ASGI lacks, as functions in the scope's extensions.

A way to be rid of a client that does not read: a closing handshake waits until it has read all that
was sent before. And a way to send many frames at once: a system call for each of a thousand
subscribers costs more than all the rest.
"""

import socket
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

DROP = "bottega.drop"
"""Extension of the scope: ``drop(code, reason)`` of a WebSocket, ``drop()`` of a request."""
SEND = "bottega.send"
"""Extension of a WebSocket's scope: ``await send(texts)``; texts are UTF-8, a frame each."""
ABORT_AFTER_S = 5.0
_KERNEL_BYTES = 128 * 1024
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpProtocol(HttpToolsProtocol):
    """HTTP, with ``drop()`` in the scope. The kernel keeps little for a client that is slow."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: Any = cycle.scope
        scope.setdefault("extensions", {})[DROP] = self.transport.abort
        super()._start_asgi_task(cycle, app)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSockets, with ``drop(code, reason)`` and ``send(texts)`` in the scope."""

    _pong = b""

    async def run_asgi(self) -> None:
        extensions: Any = self.scope["extensions"]
        extensions[DROP] = self._drop
        extensions[SEND] = self._send
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
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # It cannot even be read as a handshake: uvicorn would leave it open without an answer.
            self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST)
            self.transport.close()

    def handle_ping(self) -> None:
        """Answer, but while the client reads nothing keep the newest answer only."""
        pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pong)
        else:
            self._pong = pong or self._pong  # empty: it was among the last

    def resume_writing(self) -> None:
        pong, self._pong = self._pong, b""
        if pong and not (self.close_sent or self.transport.is_closing()):
            self.transport.write(pong)
        super().resume_writing()

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
