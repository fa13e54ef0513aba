"""WebSocket clients that misbehave."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from pydantic_core import from_json

from bottega.api.server.connections import MAX_PIECES, PING_BURST
from bottega.settings import Settings
from tests.growing import growing
from tests.log_entries import capture_logs
from tests.service import Running, running
from tests.team import define
from tests.waiting import until

HANDSHAKE = (
    "Host: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


@pytest.fixture(scope="module")
async def bare(module_settings: Settings, module_database_url: str) -> AsyncIterator[Running]:
    """An API without a worker, and a team."""
    async with running(module_settings, module_database_url) as server:
        await define(server.client)
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
    """Disconnect some during the handshake, some while events are sent."""
    async with growing(bare, defined=True) as run:
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
            await until(lambda: not bare.service.wakeups.watched())
            assert len(await bare.frames(f"{run.path}/ws")) == run.seq
        assert logs == []


JSON_PING = b'{"type":"ping"}'


def masked(opcode: int, payload: bytes = b"") -> bytes:
    """Return a client's frame, masked with zeros."""
    return bytes([0x80 | opcode, 0x80 | len(payload)]) + bytes(4) + payload


PING, PONG, TEXT, BINARY = 0x9, 0xA, 0x1, 0x2


@pytest.mark.parametrize(
    "frame",
    [
        masked(PING),
        masked(PING, b"x" * 125),
        masked(PONG),
        masked(TEXT, JSON_PING),
        masked(TEXT),
        masked(TEXT, b"[]"),
        masked(TEXT, b'{"type":"cancel","and":1}'),
        masked(BINARY, JSON_PING),
    ],
    ids=["ping", "full_ping", "pong", "json_ping", "empty", "array", "unknown", "binary"],
)
async def test_a_socket_with_too_many_pings_is_closed(bare: Running, frame: bytes) -> None:
    """Check it for any frame; the rest is not read, and the run is not watched any more."""
    async with growing(bare, defined=True) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", bare.port)
        writer.write(f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
        await reader.readuntil(b"run.started")
        writer.write(frame * 10_000)
        reason = b"too many pings; resume after=%d" % run.seq
        received = await asyncio.wait_for(reader.readuntil(reason), 30)
        assert (4008).to_bytes(2) + reason in received
        async with asyncio.timeout(30):
            await until(lambda: not bare.service.wakeups.watched())
        answers = sum(map(received.count, (b'"pong"', b'"error"', b"\x8a\x00", b"\x8a\x7d")))
        answered = 0 if frame == masked(PONG) else PING_BURST
        assert answered <= answers <= answered + 1024 // len(frame)
        writer.close()


async def test_a_cancel_frame_is_not_delayed_by_pings(bare: Running) -> None:
    """Check it on a socket that has used up its pings."""
    async with growing(bare, defined=True) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", bare.port)
        writer.write(f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
        await reader.readuntil(b"run.started")
        writer.write(masked(PING) * 10 + masked(TEXT, JSON_PING) * (PING_BURST - 10))
        cancel = masked(TEXT, b'{"type":"cancel"}')
        writer.write(cancel * 30)
        received = b""
        async with asyncio.timeout(30):
            while received.count(b"cancel.accepted") < 30:
                received += await reader.read(65_536)
        assert received.count(b'"pong"') == PING_BURST - 10
        writer.close()


async def test_a_message_in_too_many_pieces_is_refused(bare: Running) -> None:
    """Check it with empty pieces, which add nothing to the size."""
    async with growing(bare, defined=True) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", bare.port)
        writer.write(f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
        await reader.readuntil(b"run.started")
        writer.write(b"\x01\x80" + bytes(4) + (b"\x00\x80" + bytes(4)) * MAX_PIECES)
        assert (1009).to_bytes(2) + b"more than" in await reader.read()
        writer.close()
    await until(lambda: not bare.service.wakeups.watched())


@pytest.fixture(scope="module")
async def hasty(
    module_settings: Settings, module_database_url: str, bare: Running
) -> AsyncIterator[Running]:
    """Another one, with a very short request timeout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bottega.main.REQUEST_TIMEOUT_S", 0.3)
        async with running(module_settings, module_database_url) as server:
            yield server


@pytest.mark.parametrize(
    ("busy", "kept_alive"), [(False, False), (True, True)], ids=["idle, first", "busy, kept alive"]
)
async def test_a_socket_stays_open_longer_than_a_request_may_take(
    hasty: Running, busy: bool, kept_alive: bool
) -> None:
    """Check it for a first and a later request on a connection, idle or with frames."""
    async with growing(hasty, defined=True) as run:
        connection = await asyncio.open_connection("127.0.0.1", hasty.port)
        reader, writer = connection
        if kept_alive:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await reader.readuntil(b'{"status":"ok"}')
        writer.write(f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
        await reader.readuntil(b"run.started")
        for _ in range(5):
            if busy:
                await run.warn(1)
                writer.write(b"\x89\x80" + bytes(4))
            await _request_timeout(hasty)
        assert not reader.at_eof()
        await run.finish()
        received = await asyncio.wait_for(reader.readuntil(b"run.completed"), 30)
        assert received.count(b"\x8a\x00") == 5 * busy
        writer.close()


async def test_a_refused_upgrade_is_answered_and_closed(hasty: Running) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(f"GET /v1/runs/1/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 30)
    assert answer.startswith(b"HTTP/1.1 422 ")
    assert from_json(answer.partition(b"\r\n\r\n")[2])["code"] == "invalid"
    writer.close()


async def test_an_upgrade_to_another_protocol_does_not_lift_the_request_timeout(
    hasty: Running,
) -> None:
    """Check that the upgrade is ignored, as RFC 9110 allows: the connection stays HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    upgrade = HANDSHAKE.replace("Upgrade: websocket", "Upgrade: h2c")
    writer.write(f"GET /healthz HTTP/1.1\r\n{upgrade}\r\n".encode())
    await reader.readuntil(b'{"status":"ok"}')
    writer.write(b"GET /heal")
    assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_an_upgrade_behind_an_unfinished_answer_closes_the_connection(
    bare: Running,
) -> None:
    """Check it because two answers would mix, and the stream would miss the disconnect."""
    async with growing(bare, defined=True) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", bare.port)
        head = "Host: 127.0.0.1\r\nAccept: text/event-stream\r\n"
        writer.write(f"GET {run.path}/events HTTP/1.1\r\n{head}\r\n".encode())
        await reader.readuntil(b"run.started")
        writer.write(f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
        received = await asyncio.wait_for(_rest(reader), 30)
        assert b"101 Switching" not in received
        writer.close()
        async with asyncio.timeout(30):
            await until(lambda: not bare.service.wakeups.watched())


async def _request_timeout(server: Running) -> None:
    """Wait as long as the server waits for a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /")
    assert b" 408 " in await reader.read()
    writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection ends, in any way."""
    received = b""
    try:
        while piece := await reader.read(65_536):
            received += piece
    except ConnectionError:
        pass
    return received
