"""A client that costs next to nothing: posts runs, and watches each over a WebSocket to its end."""

import asyncio
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic_core import from_json, to_json

_FINAL = (b"run.completed", b"run.failed", b"run.timeout", b"run.cancelled")
_HANDSHAKE = (
    b"GET /v1/runs/%b/ws HTTP/1.1\r\nhost: 127.0.0.1\r\n%bupgrade: websocket\r\n"
    b"connection: upgrade\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"sec-websocket-version: 13\r\n\r\n"
)


@dataclass(slots=True)
class Watched:
    """Times of a run at its client, in seconds.

    Attributes:
        took_s: from the request to the last event here.
        started_s: from the request to ``run.started`` here.
        queued_s: from queued to started, by the events' times.
        answered_s: from the request to its answer.
    """

    took_s: float
    started_s: float
    queued_s: float
    answered_s: float


@dataclass(slots=True)
class Client:
    """Requests to one API, on connections that are used again.

    Attributes:
        port: of the API on this machine.
        run: body of the request that starts a run, as JSON has it.
        headers: lines of its requests' heads.
    """

    port: int
    run: object
    headers: bytes = b""
    _idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    async def request(self, method: str, path: str, body: bytes = b"") -> Any:
        """Return the answer's content.

        Raises:
            SystemExit: the answer is an error.
        """
        link = self._idle.pop() if self._idle else await self._connect()
        if link[0].at_eof():  # the server closes what is idle for seconds
            link = await self._connect()
        reader, writer = link
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        length = b"content-length: %d\r\n\r\n" % len(body)
        writer.write(b"".join([head.encode(), self.headers, length, body]))
        answer = await reader.readuntil(b"\r\n\r\n")
        size = int(answer.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        content = await reader.readexactly(size)
        self._idle.append(link)
        if b" 20" not in answer[:12]:
            raise SystemExit(f"{method} {path}: {content.decode()}")
        return from_json(content)

    async def post(self) -> str:
        """Start a run; return its id."""
        run = await self.request("POST", "/v1/runs", to_json(self.run))
        return str(run["id"])

    async def waited(self, runs: int, concurrency: int) -> None:
        """Wait for the ends of ``runs`` runs in the answers, ``concurrency`` at a time."""
        slots = asyncio.Semaphore(concurrency)

        async def slot() -> None:
            async with slots:
                run = await self.request("POST", "/v1/runs?wait=60", to_json(self.run))
                if run["status"] != "completed":
                    raise SystemExit(f"the run did not complete: {run}")

        await asyncio.gather(*(slot() for _ in range(runs)))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def watched(self) -> Watched:
        """Start a run, and watch it to its end."""
        began = time.perf_counter()
        run_id = (await self.post()).encode()
        answered = time.perf_counter()
        loop = asyncio.get_running_loop()
        transport, socket = await loop.create_connection(
            lambda: _Socket(run_id, self.headers), "127.0.0.1", self.port
        )
        try:
            last = await socket.ended
        finally:
            transport.close()
        if b"run.completed" not in last[:400]:
            raise SystemExit(f"run {run_id.decode()} did not complete: {last.decode()}")
        ended = time.perf_counter()
        started_s = socket.started_at - began
        return Watched(ended - began, started_s, socket.queued_s(), answered - began)

    async def many(self, runs: int, concurrency: int) -> list[Watched]:
        """Watch ``runs`` runs, ``concurrency`` at a time."""
        slots = asyncio.Semaphore(concurrency)

        async def slot() -> Watched:
            async with slots:
                return await self.watched()

        return await asyncio.gather(*(slot() for _ in range(runs)))

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


class _Socket(asyncio.Protocol):
    """A WebSocket that only reads."""

    def __init__(self, run_id: bytes, headers: bytes) -> None:
        self._run_id, self._headers = run_id, headers
        self._read = bytearray()
        self._is_open = False
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.started_at = 0.0
        self._queued = self._started = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_HANDSHAKE % (self._run_id, self._headers))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(b"the connection was closed: " + bytes(self._read))

    def data_received(self, data: bytes) -> None:
        self._read += data
        if not self._is_open:
            end = self._read.find(b"\r\n\r\n")
            if end < 0:
                return
            if b" 101 " not in self._read[:20]:
                self.ended.set_result(bytes(self._read))
                return
            del self._read[: end + 4]
            self._is_open = True
        position = 0
        while (place := _frame(self._read, position)) is not None:
            first, position = place
            self._see(bytes(self._read[first:position]))
        del self._read[:position]

    def _see(self, event: bytes) -> None:
        head = event[:400]
        if b'"run.' not in head:
            return
        if b'"run.started"' in head:
            self.started_at, self._started = time.perf_counter(), event
        elif b'"run.queued"' in head:
            self._queued = event
        elif any(kind in head for kind in _FINAL) and not self.ended.done():
            self.ended.set_result(event)

    def queued_s(self) -> float:
        """Return the seconds from queued to started."""
        times = (from_json(event)["at"] for event in (self._queued, self._started))
        queued, started = map(datetime.fromisoformat, times)
        return (started - queued).total_seconds()


def _frame(data: bytearray, position: int) -> tuple[int, int] | None:
    """Return the first and the last place of a frame's content, if it is complete."""
    if len(data) < position + 2:
        return None
    length, first = data[position + 1] & 127, position + 2
    if length >= 126:
        size = 2 if length == 126 else 8
        if len(data) < first + size:
            return None
        length, first = int.from_bytes(data[first : first + size]), first + size
    return (first, first + length) if len(data) >= first + length else None
