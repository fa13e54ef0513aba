"""A model that costs next to nothing, so that a benchmark measures the service and not the model.

    python -m benchmarks.model [--latency-ms 0] [--token-delay-ms 0]

It gives the demo model's answers over bare HTTP/1.1 on loopback. An answer is built once for each
different request and then sent from memory. It prints its port when it accepts requests.
"""

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from pydantic_core import from_json, to_json

from benchmarks.harness import cpu_s
from bottega.llm.demo_model import server as demo_server
from bottega.llm.demo_model.rules import Answer, decide

_MOST = 10_000
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


def encoded(answer: Answer, request: dict[str, Any]) -> Sequence[bytes]:
    """Return an answer as HTTP: the pieces of a stream if the request asks for one, else one."""
    if not request.get("stream"):
        body = to_json(demo_server.completion(answer, request))
        return [_WHOLE % (len(body), body)]
    parts = demo_server.chunks(answer, request)
    return [_STREAM, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


class ModelConnection(asyncio.Protocol):
    """A connection that sends one answer after another; a subclass may choose them."""

    answers: ClassVar[dict[bytes, Sequence[bytes]]] = {}
    latency_s = 0.0
    token_delay_s = 0.0

    def __init__(self) -> None:
        self._read = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._read += data
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._read[:end]).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if len(self._read) < end + 4 + length:
            return
        body = bytes(self._read[end + 4 : end + 4 + length])
        del self._read[: end + 4 + length]
        wait_s = self.latency_of(body)
        asyncio.get_running_loop().call_later(wait_s, self._send, self.parts(body))

    def latency_of(self, body: bytes) -> float:
        """Return the seconds before the answer to a request."""
        return self.latency_s

    def parts(self, body: bytes) -> Sequence[bytes]:
        """Return the pieces of the answer to a request."""
        parts = self.answers.get(body)
        if parts is None:
            if len(self.answers) >= _MOST:
                self.answers.clear()
            request = from_json(body)
            parts = self.answers[body] = encoded(decide(request), request)
        return parts

    def _send(self, parts: Sequence[bytes]) -> None:
        if self.token_delay_s and len(parts) > 1:
            self._write(parts[0])
            asyncio.get_running_loop().call_later(self.token_delay_s, self._send, parts[1:])
        else:
            self._write(b"".join(parts))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _serve(connection: type[ModelConnection]) -> None:
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class FastModel:
    """The model's process.

    Attributes:
        base_url: for the service's settings.
    """

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._pid = process.pid
        self.base_url = f"http://127.0.0.1:{port}/v1"

    def cpu_s(self) -> float:
        return cpu_s(self._pid)


@asynccontextmanager
async def fast_model(
    *, latency_ms: float = 0, token_delay_ms: float = 0, module: str = "benchmarks.model"
) -> AsyncIterator[FastModel]:
    """Start the model in a process of its own for the duration of the block.

    Args:
        latency_ms: milliseconds before each answer.
        token_delay_ms: milliseconds between the parts of an answer.
        module: whose command it is.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        *("--latency-ms", str(latency_ms), "--token-delay-ms", str(token_delay_ms)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield FastModel(process, int(await process.stdout.readline()))
    finally:
        process.terminate()
        await process.wait()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(connection: type[ModelConnection] = ModelConnection) -> None:
    """Serve connections of a class."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--latency-ms", type=float, default=0)
    parser.add_argument("--token-delay-ms", type=float, default=0)
    options = parser.parse_args()
    connection.latency_s = options.latency_ms / 1000
    connection.token_delay_s = options.token_delay_ms / 1000
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_serve(connection))


if __name__ == "__main__":
    main()
