"""Readers that stop reading: they cost nothing, delay no other, and can resume."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import websockets
from pydantic_core import from_json

from bottega.api.server import connections
from bottega.db.pool import open_database
from bottega.settings import Settings
from tests.growing import Growing, growing, growing_on
from tests.processes import command
from tests.service import Running, client_of, frames, running
from tests.team import define, start
from tests.waiting import until

SLOW_S = 1.0
ENOUGH = 3_000
"""Number of events of about 1 KB that exceeds the kernel buffers of both ends."""


@pytest.fixture
async def strict(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    """An API without a worker, with little patience for slow readers."""
    monkeypatch.setattr(connections, "SLOW_READER_S", SLOW_S)
    async with running(settings, database_url) as server:
        yield server


def narrow(port: int | None) -> socket.socket:
    """Open a connection with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    return connection


def idle(port: int | None, path: str) -> Any:
    """Open a WebSocket that reads a few frames, then only on request."""
    url = f"ws://127.0.0.1:{port}{path}"
    return websockets.connect(url, sock=narrow(port), max_queue=1, ping_interval=None)


async def readers_are(count: int, server: Running, run: Growing) -> None:
    """Wait until so many readers watch the run."""
    await until(lambda: server.service.streams.watched().get(run.run_id, 0) == count)


async def to_the_end(slow: Any) -> list[dict[str, Any]]:
    """Read the rest, until the connection is closed with any code."""
    received = []
    with contextlib.suppress(websockets.ConnectionClosed):
        async for message in slow:
            received.append(from_json(message))
    return received


async def test_a_websocket_that_is_not_read_is_closed_with_the_place_to_resume(
    strict: Running,
) -> None:
    async with growing(strict) as run:
        other = asyncio.ensure_future(strict.frames(f"{run.path}/ws"))
        async with idle(strict.port, f"{run.path}/ws") as slow:
            await run.warn(ENOUGH, 1000)
            await readers_are(1, strict, run)
            await run.finish()
            everything = await other
            assert [event["seq"] for event in everything] == list(range(1, run.seq + 1))
            received = await to_the_end(slow)
        assert slow.close_code == 4008
        seen = received[-1]["seq"]
        assert slow.close_reason == f"slow; resume after={seen}"
        assert received == everything[:seen]
        rest = await strict.frames(f"{run.path}/ws?after={seen}")
        assert received + rest == everything


async def test_server_sent_events_that_are_not_read_are_cut_off(strict: Running) -> None:
    async with growing(strict) as run:
        other = asyncio.ensure_future(strict.frames(f"{run.path}/ws"))
        await until(lambda: strict.service.streams.watched())
        reader, writer = await asyncio.open_connection(sock=narrow(strict.port), limit=1024)
        request = f"GET {run.path}/events HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        writer.write(f"{request}accept: text/event-stream\r\n\r\n".encode())
        await readers_are(2, strict, run)
        await run.warn(ENOUGH, 1000)
        await readers_are(1, strict, run)
        await run.finish()
        assert len(await other) == run.seq
        received = bytearray()
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65536):
                received += part
        assert b"id: 1\r\n" in received
        assert f"id: {run.seq - 1}\r\n".encode() not in received
        writer.close()


@pytest.mark.parametrize("ending", ["keep-alive", "close"])
async def test_an_answer_that_is_not_read_is_not_kept(strict: Running, ending: str) -> None:
    """Check it because a page can have half a megabyte, and a client many connections."""
    async with growing(strict) as run:
        await run.warn(200, 10_000)
        request = f"GET {run.path}/events?limit=200 HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        with narrow(strict.port) as reader:
            reader.sendall(f"{request}connection: {ending}\r\n\r\n".encode())
            await connections_are(1, strict)
            await connections_are(0, strict)
        page = await strict.client.get(f"{run.path}/events?limit=200")
        assert len(page.content) > 40 * 10_000


async def connections_are(count: int, server: Running) -> None:
    """Wait until the server holds so many connections besides the test client's."""
    here = psutil.Process()

    def held() -> int:
        ends = here.net_connections("tcp4")
        return sum(each.status == "ESTABLISHED" and each.laddr.port == server.port for each in ends)

    await until(lambda: held() == count + 1)


@pytest.mark.deep
async def test_a_reader_that_stops_costs_no_memory(database_url: str, model_url: str) -> None:
    """Send 40 MB of events past a reader that reads none, in a server of its own."""
    environment = {
        "DATABASE_URL": database_url,
        "OPENAI_BASE_URL": model_url,
        "OPENAI_API_KEY": "none",
    }
    async with (
        command("serve", "--no-worker", "--port", "0", **environment) as server,
        client_of(server.port) as client,
        open_database(database_url) as database,
    ):
        await define(client)
        run_id = await start(client)
        async with growing_on(database, run_id) as run:
            warm = asyncio.ensure_future(frames(server.port, f"{run.path}/ws"))
            await run.warn(1_000, 4_000)
            process = psutil.Process(server.process.pid)
            async with idle(server.port, f"{run.path}/ws?after={run.seq}") as slow:
                before = process.memory_info().rss
                highest = before
                for _ in range(90):
                    await run.warn(100, 4_000)
                    highest = max(highest, process.memory_info().rss)
                await run.finish()
                assert len(await warm) == run.seq
                highest = max(highest, process.memory_info().rss)
                slow.transport.abort()
    assert highest - before < 20_000_000


@pytest.fixture
def model_url() -> str:
    """An address that no test asks."""
    return "http://127.0.0.1:9/v1"
