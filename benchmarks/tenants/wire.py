"""HTTP/1.1 and WebSocket connections with very little overhead, for attackers."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

_KEY = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@dataclass(slots=True)
class Target:
    """The server, as a tenant reaches it.

    Attributes:
        port: on this machine.
        key: the tenant's.
        seen: statuses of answers, by number, and other outcomes.
    """

    port: int
    key: str
    seen: Counter[str] = field(default_factory=Counter)
    _idle: list["Connection"] = field(default_factory=list)

    async def send(
        self, method: str, path: str, body: bytes = b"", media: str = "application/json"
    ) -> int:
        """Send a request on a kept connection, read the whole answer, and count its status."""
        return (await self.ask(method, path, body, media))[0]

    async def ask(
        self, method: str, path: str, body: bytes = b"", media: str = "application/json"
    ) -> tuple[int, bytes]:
        """Do as :meth:`send`; return also the answer's body. Status 0: it was closed."""
        connection = self._idle.pop() if self._idle else await self.open()
        try:
            status, found = await connection.send(method, path, body, media)
        except (OSError, asyncio.IncompleteReadError):
            connection.close()
            self.seen["closed"] += 1
            return 0, b""
        self._idle.append(connection)
        self.seen[str(status)] += 1
        return status, found

    async def open(self) -> "Connection":
        """Open a connection, which the caller closes."""
        streams = await asyncio.open_connection("127.0.0.1", self.port)
        return Connection(self.key, *streams)


@dataclass(slots=True)
class Connection:
    """A kept connection; one request at a time."""

    key: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def begin(self, method: str, path: str, body: bytes, media: str, accept: str = "*/*") -> None:
        """Send a request."""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self.key}\r\n"
            f"accept: {accept}\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)

    async def send(self, method: str, path: str, body: bytes, media: str) -> tuple[int, bytes]:
        """Send a request, and read its whole answer; return status and body."""
        self.begin(method, path, body, media)
        await self.writer.drain()
        head = await self.reader.readuntil(b"\r\n\r\n")
        fields, found = head.lower(), b""
        if b"content-length:" in fields:
            length = int(fields.split(b"content-length:")[1].split(b"\r\n")[0])
            found = await self.reader.readexactly(length)
        elif b"chunked" in fields:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                found += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        return int(head.split(b" ", 2)[1]), found

    async def upgrade(self, path: str) -> int:
        """Ask for a WebSocket; return the status."""
        head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self.key}\r\n"
        fields = b"upgrade: websocket\r\nconnection: upgrade\r\n" + _KEY
        self.writer.write(head.encode() + fields + b"\r\n")
        return int((await self.reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1])

    def ping(self) -> None:
        """Send an empty ping, as a client masks it."""
        self.writer.write(b"\x89\x80\x00\x00\x00\x00")

    def close(self) -> None:
        self.writer.close()


async def paced(per_s: float, act: Callable[[], Awaitable[object]], most: int = 32) -> None:
    """Begin ``act`` so many times per second, at most ``most`` at a time, until cancelled."""
    loop = asyncio.get_running_loop()
    slots, began, number = asyncio.Semaphore(most), loop.time(), 0

    async def one() -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await act()
        slots.release()

    async with asyncio.TaskGroup() as tasks:
        while True:
            if (ahead := began + number / per_s - loop.time()) > 0:
                await asyncio.sleep(ahead)
            await slots.acquire()
            tasks.create_task(one())
            number += 1
