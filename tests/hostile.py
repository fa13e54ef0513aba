"""Bytes that a hostile server, program or client sends, and the CPU that they cost."""

import asyncio
import gc
import gzip
import socket
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

STEP = 65_536
SSE = "text/event-stream"
JSON = "application/json"


@dataclass(frozen=True)
class Body:
    """The body of an answer.

    Attributes:
        size: bytes when inflated, or as sent if that is more.
    """

    sent: bytes
    media: str = SSE
    encoding: str = ""
    chunked: bool = False
    size: int = 0

    @property
    def steps(self) -> float:
        return max(len(self.sent), self.size, 1) / STEP

    def answer(self) -> bytes:
        """Return a whole HTTP answer."""
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {self.media}\r\nconnection: close\r\n"
        head += f"content-encoding: {self.encoding}\r\n" if self.encoding else ""
        how = "transfer-encoding: chunked" if self.chunked else f"content-length: {len(self.sent)}"
        return f"{head}{how}\r\n\r\n".encode() + self.sent


def chunks(body: bytes, size: int) -> bytes:
    """Return a body in chunks of a size."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def filled(piece: bytes, size: int = 8 * STEP) -> bytes:
    return piece * (size // len(piece))


_ZEROS = 64 * 1024 * 1024
_PACKED = gzip.compress(bytes(_ZEROS), 9)

STREAMS: Mapping[str, Body] = {
    "line feeds": Body(filled(b"\n", 64 * STEP)),
    "line feeds, packed": Body(gzip.compress(b"\n" * 63_000_000), encoding="gzip", size=63_000_000),
    "carriage returns": Body(filled(b"\r", 64 * STEP)),
    "CRLF": Body(filled(b"\r\n", 64 * STEP)),
    "comments": Body(filled(b":\n", 32 * STEP)),
    "lines of data": Body(filled(b"data:\n", 32 * STEP)),
    "empty events": Body(filled(b"data:\n\n")),
    "events that are numbers": Body(filled(b"data:1\n\n")),
    "events that are empty objects": Body(filled(b"data:{}\n\n", 16 * STEP)),
    "events without a choice": Body(filled(b'data:{"choices":[]}\n\n', 16 * STEP)),
    "one line": Body(filled(b"x", 64 * STEP)),
    "one event": Body(b"data:" + filled(b"[", 64 * STEP)),
    "a wide event": Body(b"data:[" + filled(b"[],", 16 * STEP) + b"1]\n\n"),
    "a wide object": Body(
        b"data:{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}\n\n"
    ),
    "zeros, packed": Body(_PACKED, encoding="gzip", size=_ZEROS),
    "zeros, packed twice": Body(gzip.compress(_PACKED), encoding="gzip", size=STEP),
    "zeros, deflated": Body(zlib.compress(bytes(_ZEROS), 9), encoding="deflate", size=_ZEROS),
    "two encodings": Body(gzip.compress(b"x"), encoding="gzip, gzip"),
    "brotli": Body(b"\x8b\x00\x80x\x03", encoding="br"),
    "not packed": Body(filled(b"x"), encoding="gzip"),
    "many streams of gzip": Body(
        gzip.compress(b"") * (8 * STEP // len(gzip.compress(b""))), encoding="gzip"
    ),
    "deep JSON": Body(filled(b"[", 64 * STEP), JSON),
    "wide JSON": Body(b"[" + filled(b"[],", 16 * STEP) + b"1]", JSON),
    "a long number": Body(filled(b"1", 16 * STEP), JSON),
    "blanks": Body(filled(b" ", 64 * STEP), JSON),
}
"""Bodies that any reader of events or JSON may get."""

PIECES_OF_CALLS = {
    "pieces of a call": Body(
        filled(
            b'data:{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f",'
            b'"arguments":"}"}}]}}]}\n\n',
            64 * STEP,
        )
    ),
    "pieces of many calls": Body(
        b"".join(
            b'data:{"choices":[{"delta":{"tool_calls":[{"index":%d,"id":"c%d","function":'
            b'{"name":"f","arguments":"{}"}}]}}]}\n\n' % (number, number)
            for number in range(40_000)
        )
    ),
}


def _choices(delta: bytes) -> bytes:
    return b'data:{"choices":[{"delta":{%b}}]}\n\n' % delta


UNKNOWN_FIELDS = {
    "unknown fields": Body(
        b"".join(
            _choices(b'"x%d":[{"type":"a","index":%d}]' % (number % 50, number))
            for number in range(40_000)
        )
    ),
    "many unknown fields": Body(
        b"".join(_choices(b'"x%d":"a"' % number) for number in range(40_000))
    ),
    "wide unknown lists": Body(_choices(b'"x":[' + filled(b"{},", STEP // 2) + b"1]") * 16),
    "wide unknown objects": Body(
        _choices(b'"x":{' + b",".join(b'"%d":"a"' % name for name in range(4000)) + b"}") * 16
    ),
    "short unknown lists": Body(filled(_choices(b'"x":[{},{},{},{},{},{},{},{}]'), 16 * STEP)),
}
"""Fields of a model's answer that its server wants back, merged over all pieces."""

CHUNKS = {
    "chunks of a byte": Body(chunks(filled(b"data: x\n", 4 * STEP), 1), chunked=True),
    "few chunks of a byte": Body(chunks(filled(b"data: x\n", STEP // 6), 1), chunked=True),
    "short chunks": Body(chunks(filled(b"data: x\n", 4 * STEP), 8), chunked=True),
}
"""Bodies whose framing a parser reads that is not ours."""

DEAR = frozenset(each.sent for each in (*CHUNKS.values(), *UNKNOWN_FIELDS.values()))
"""Bodies that cost 6 to 10 ms for each 64 KB on a quiet machine; others cost less than 5."""

MOST_S = 1.0
LONGEST_TURN_S = 0.2
"""Of a busy machine, whose CPU is shared; some 70 ms of a quiet one."""
_PER_STEP_S = 0.01
_BUSY = 2
"""How much more CPU the same work takes while others use the machine's caches."""
_BASE_S = 0.02
"""Of a call without any hostile bytes, in a process that has made one: the first one loads much."""


def allowed_s(body: Body, messages: int = 1) -> float:
    """Return the CPU that a body may cost: 10 ms for each 64 KB, and a second at most.

    Args:
        messages: times that the body is read.
    """
    per_step_s = _PER_STEP_S * (_BUSY if body.sent in DEAR else 1)
    return messages * (min(MOST_S, body.steps * per_step_s) + _BASE_S)


@contextmanager
def sending(answer: bytes) -> Iterator[int]:
    """Answer every request with these bytes, from threads; yield the port."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=100)

    def one(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(STEP)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            for _ in iter(partial(connection.recv, STEP), b""):
                pass

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=one, args=listening.accept()[:1], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


HARMLESS = Body(b"{}", JSON)


@dataclass(frozen=True)
class Cost:
    """CPU seconds of the event loop: of all, and of the longest turn."""

    whole_s: float
    turn_s: float


async def cost_of(act: Callable[[], Awaitable[object]]) -> Cost:
    """Return what an action costs; its errors are no matter."""
    spent = [0.0]
    run = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        spent.append(time.thread_time() - began)

    async def acted() -> None:
        with suppress(Exception):
            await act()

    gc.disable()  # what other tests have left is not collected meanwhile
    try:
        with patch.object(asyncio.Handle, "_run", measured):
            await asyncio.create_task(acted())  # its last turn is over when this one begins
    finally:
        gc.enable()
    return Cost(sum(spent), max(spent))
