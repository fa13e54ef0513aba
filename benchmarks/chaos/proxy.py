"""A proxy that can cut connections or hold back answers."""

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self

Dial = Callable[[], Awaitable[tuple[StreamReader, StreamWriter]]]
Greet = Callable[[StreamReader, StreamWriter], Awaitable[bytes]]


class _RefusedError(Exception):
    """A client sent data to a server that had closed the connection."""


class Proxy:
    """Passes bytes between clients and a server, during the ``async with`` block.

    Args:
        dial: opens a connection to the server.
        greet: reads the first bytes of a client, and returns those for the server.

    Attributes:
        port: port on loopback.
        answering: while it is cleared, the server's bytes are held back.
        closing: while it is cleared, clients do not learn that the server has closed; those that
            send data are cut off.
        cuts: number of cut connections.
    """

    def __init__(self, dial: Dial, greet: Greet | None = None) -> None:
        self.port = 0
        self.answering = asyncio.Event()
        self.answering.set()
        self.closing = asyncio.Event()
        self.closing.set()
        self.cuts = 0
        self._dial = dial
        self._greet = greet
        self._links: list[tuple[StreamWriter, StreamWriter]] = []
        self._deaf: set[tuple[StreamWriter, StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def links(self) -> int:
        return len(self._links)

    def cut(self, chosen: Callable[[int], bool] = lambda index: True) -> None:
        """Break connections off, in both directions and without notice.

        Args:
            chosen: selects open connections by age.
        """
        for index, ends in enumerate(list(self._links)):
            if chosen(index):
                self.cuts += 1
                for end in ends:
                    end.transport.abort()

    def vanish(self) -> None:
        """Drop all further bytes of the open connections, and their ends."""
        self._deaf.update(self._links)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        self.answering.set()
        self.closing.set()
        await asyncio.gather(*self._tasks)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await self._dial()
        except OSError:  # the server is down: so is the proxy
            writer.transport.abort()
            return
        ends = (writer, upstream_writer)
        self._links.append(ends)
        try:
            if self._greet is not None:
                upstream_writer.write(await self._greet(reader, writer))
            async with asyncio.TaskGroup() as pumps:
                lost = partial(self._deaf.__contains__, ends)
                up = _pump(reader, upstream_writer, lost, refused=upstream_reader.at_eof)
                pumps.create_task(up)
                down = _pump(upstream_reader, writer, lost, self.answering, self.closing)
                pumps.create_task(down)
        except* _RefusedError:
            pass
        finally:
            self._links.remove(ends)
            self._deaf.discard(ends)
            for end in ends:
                end.transport.abort()


_ALWAYS = asyncio.Event()
_ALWAYS.set()


async def _pump(
    reader: StreamReader,
    writer: StreamWriter,
    lost: Callable[[], bool],
    flowing: asyncio.Event = _ALWAYS,
    closing: asyncio.Event = _ALWAYS,
    refused: Callable[[], bool] = lambda: False,
) -> None:
    """Copy bytes until either end closes or data is refused, and then close.

    Drop the bytes of a lost connection.
    """
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            if refused():
                raise _RefusedError
            await flowing.wait()
            if not lost():
                writer.write(data)
                await writer.drain()
    await closing.wait()
    if not lost():
        writer.close()
