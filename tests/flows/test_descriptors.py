"""Bounds that follow from the number of file descriptors of a process."""

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest
from pydantic import ValidationError

from bottega.settings import Settings
from bottega.tools.egress import Egress, EgressError
from tests.fake_model import FakeModel
from tests.flows.test_processes import environment
from tests.flows.test_streams_rude import HANDSHAKE
from tests.growing import growing
from tests.processes import limited_command
from tests.service import running
from tests.waiting import until

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(port: int | None, address: str, sent: bytes = HEALTH) -> Streams:
    """Open a connection from an address of this machine."""
    made = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    made[1].write(sent)
    return made


async def status(reader: asyncio.StreamReader) -> bytes:
    return (await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)).split()[1]


@pytest.mark.deep
async def test_half_sent_heads_of_one_address_block_no_other(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model)
    serve = ("serve", "--no-worker", "--port", "0")
    async with (
        limited_command((100, 400), *serve, **with_model) as api,
        AsyncExitStack() as stack,
    ):
        (line,) = [line for line in api.log if "limits.descriptors" in line]
        assert '"connections": 200, "hard": 400, "soft": 400' in line
        flood = [await connected(api.port, "127.0.0.9", b"GET /") for _ in range(60)]
        for _, writer in flood:
            stack.callback(writer.close)
        refused = [await status(reader) for reader, _ in flood[50:]]
        assert refused == [b"503"] * 10
        for _ in range(20):
            reader, writer = await connected(api.port, "127.0.0.8")
            stack.callback(writer.close)
            assert await status(reader) == b"200"
        flood[0][1].close()
        await flood[0][1].wait_closed()

        async def answer() -> bytes:
            reader, writer = await connected(api.port, "127.0.0.9")
            try:
                return await status(reader)
            except (OSError, EOFError):  # refused at once: nothing is read
                return b""
            finally:
                writer.close()

        # Until the server knows that one was closed.
        await until(answer, lambda seen: seen == b"200")


async def test_websockets_count_until_they_are_closed(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.outgoing.MAX_CONNECTIONS", 8)
    few = settings.model_copy(update={"trusted_proxies": ["127.0.0.1", "10.0.0.0/8"]})
    async with running(few, database_url) as server, growing(server) as run:
        upgrade = f"GET {run.path}/ws HTTP/1.1\r\n{HANDSHAKE}\r\n".encode()
        open_ = [await connected(server.port, "127.0.0.9", upgrade) for _ in range(2)]
        for reader, _ in open_:
            assert await status(reader) == b"101"
        reader, writer = await connected(server.port, "127.0.0.9")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert b" 503 " in answer
        assert b'"too_many_connections"' in answer
        writer.close()
        for _, writer in open_:
            writer.close()
        await until(lambda: not server.service.wakeups.watched())
        reader, writer = await connected(server.port, "127.0.0.9")
        assert await status(reader) == b"200"
        writer.close()
        trusted = [await connected(server.port, "127.0.0.1") for _ in range(4)]
        for reader, writer in trusted:
            assert await status(reader) == b"200"
            writer.close()


async def test_calls_wait_only_for_calls_of_the_same_tenant() -> None:
    asked: list[str] = []
    gate = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().split()[1])
        await gate.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
        aclosing(Egress(["127.0.0.1"], each=2)) as egress,
    ):
        origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        async def ask(tenant: str, number: int, timeout_s: float = 10) -> int:
            url = f"{origin}/{tenant}{number}"
            told = {"timeout_s": timeout_s, "max_bytes": 10, "tenant": tenant}
            return (await egress.request("GET", url, **told)).status  # type: ignore[arg-type]

        first = [asyncio.ensure_future(ask("a", number)) for number in range(3)]
        await until(lambda: len(asked) >= 2)
        with pytest.raises(EgressError, match="within"):
            await ask("a", 3, timeout_s=0.05)
        other = asyncio.ensure_future(ask("b", 0))
        await until(lambda: "/b0" in asked)
        assert sorted(asked) == ["/a0", "/a1", "/b0"]
        waiting = first.pop()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        last = asyncio.ensure_future(ask("a", 4))
        gate.set()
        assert await asyncio.gather(*first, other, last) == [204] * 4
        assert "/a2" not in asked
        assert "/a3" not in asked


def test_a_trusted_proxy_is_an_address_or_a_network() -> None:
    assert Settings(_env_file=None, trusted_proxies="10.0.0.0/8, ::1").trusted_proxies == [
        "10.0.0.0/8",
        "::1",
    ]
    with pytest.raises(ValidationError, match="not an address or CIDR"):
        Settings(_env_file=None, trusted_proxies="proxy.example")
