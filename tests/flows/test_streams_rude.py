"""Clients of WebSockets that do not behave."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from app.api.sockets import MAX_PIECES
from app.settings import Settings
from tests.flows.test_streams_slow import narrow
from tests.growing import growing
from tests.service import Running, running

HANDSHAKE = (
    "Host: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


@pytest.fixture
async def bare(settings: Settings, database_url: str) -> AsyncIterator[Running]:
    """An API without a worker."""
    async with running(settings, database_url) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        ("", "cookie: " + "x" * 9_000 + "\r\n", 431),
        ("", "".join(f"x-{number}: 1\r\n" for number in range(200)), 431),
        ("?types=" + "x" * 9_000, "", 414),
        ("", "content-length: 5\r\n", 400),
    ],
)
async def test_a_handshake_that_cannot_be_read_is_answered(
    bare: Running, path: str, more: str, status: int
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bare.port)
    writer.write(f"GET /v1/runs/1/ws{path} HTTP/1.1\r\n{HANDSHAKE}{more}\r\n".encode())
    assert (await reader.read()).startswith(f"HTTP/1.1 {status} ".encode())
    writer.close()


async def test_clients_that_vanish_at_any_time_are_no_errors(bare: Running) -> None:
    """Some while they are let in, some while they are sent to."""
    async with growing(bare) as run:
        request = f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode()
        with capture_logs() as logs:
            for turns in range(100):
                _, writer = await asyncio.open_connection("127.0.0.1", bare.port)
                writer.write(request)
                for _ in range(turns):
                    await asyncio.sleep(0)
                writer.transport.abort()
                await run.warn(1)
            await run.finish()
            while bare.service.feed.watched():
                await asyncio.sleep(0)
            assert len(await bare.frames(f"{run.path}/ws")) == run.seq
        assert logs == []


async def test_pings_of_who_does_not_read_are_not_all_answered(bare: Running) -> None:
    """Their pongs would wait in the server's memory."""
    pings = 50_000
    async with growing(bare) as run:
        reader, writer = await asyncio.open_connection(sock=narrow(bare.port), limit=1024)
        writer.write(f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
        await reader.readuntil(b"run.started")
        for _ in range(pings // 100):
            writer.write((b"\x89\xe4" + bytes(4) + b"x" * 100) * 100)
            await writer.drain()
        writer.write(b"\x88\x80" + bytes(4))
        while bare.service.feed.watched():
            await asyncio.sleep(0)
        received = await reader.read(-1)
        pongs = received.count(b"\x8a\x64" + b"x" * 100)
        assert 0 < pongs < pings / 2
        writer.close()


async def test_a_message_in_too_many_pieces_is_refused(bare: Running) -> None:
    """Empty ones count nothing towards its size."""
    async with growing(bare) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", bare.port)
        writer.write(f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
        await reader.readuntil(b"run.started")
        writer.write(b"\x01\x80" + bytes(4) + (b"\x00\x80" + bytes(4)) * MAX_PIECES)
        assert (1009).to_bytes(2) + b"more than" in await reader.read()
        writer.close()
    assert not bare.service.feed.watched()
