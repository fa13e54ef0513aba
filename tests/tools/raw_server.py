"""An HTTP server on loopback whose answers a test gives byte by byte."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

Writer = asyncio.StreamWriter
Answer = bytes | Callable[[Writer], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Request:
    """Received request."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def target(self) -> str:
        return self.line.split(" ")[1]


def answer(
    body: bytes | str = b"",
    *,
    status: int = 200,
    content_type: str = "text/plain; charset=utf-8",
    headers: tuple[str, ...] = (),
) -> bytes:
    """Build a whole answer."""
    content = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", *headers]
    lines.append(f"content-length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


@dataclass
class RawServer:
    """Server that answers every request with ``reply`` while the ``async with`` block lasts.

    Attributes:
        requests: received requests.
        connections: number of opened ones.
        greeting: sent at once, unasked.
        keep_alive: whether a connection stays open after an answer.
        host, port: where it listens; port 0 picks one.
    """

    reply: Answer = field(default_factory=lambda: answer("hello"))
    tls: ssl.SSLContext | None = None
    keep_alive: bool = True
    greeting: bytes = b""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self._writers: list[Writer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, self.host, self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def url(self, path: str = "/", host: str | None = None) -> str:
        return f"{'https' if self.tls else 'http'}://{host or self.host}:{self.port}{path}"

    @property
    def open(self) -> int:
        """Return the number of open connections."""
        return sum(not writer.transport.is_closing() for writer in self._writers)

    def hang_up(self) -> None:
        """Close the open connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.append(writer)
        self.connections += 1
        try:
            writer.write(self.greeting)
            while True:
                self.requests.append(await _read(reader))
                if isinstance(self.reply, bytes):
                    writer.write(self.reply)
                    await writer.drain()
                else:
                    await self.reply(writer)
                if not self.keep_alive:
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            self.closed.set()


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
    line, *fields = head.rstrip().split("\r\n")
    headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in fields)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(line, headers, body)
