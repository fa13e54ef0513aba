"""Keys that become invalid during use, and servers that stop being open."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import asyncpg
import httpx2
import pytest
import websockets
from pydantic_core import from_json

from benchmarks.chaos.proxy import Proxy
from bottega.settings import Settings
from tests.growing import Growing, growing
from tests.service import Running, client_of, running
from tests.tenants import ApiKey, holder
from tests.waiting import until

REVOKE = "UPDATE api_keys SET revoked_at = now() WHERE id = $1"
EXPIRE = "UPDATE api_keys SET expires_at = now() - interval '1 s' WHERE id = $1"


@pytest.fixture
async def held(database_url: str) -> ApiKey:
    return await holder(database_url, "default", "run", "define")


@pytest.fixture
async def closed(settings: Settings, database_url: str, held: ApiKey) -> AsyncIterator[Running]:
    """A server that has keys, and a client with one."""
    async with running(settings, database_url) as server, held.client(server) as client:
        yield replace(server, client=client)


@pytest.fixture
async def run(closed: Running) -> AsyncIterator[Growing]:
    async with growing(closed) as run:
        yield run


async def quietly(owner: asyncpg.Pool, statement: str, *arguments: object) -> None:
    """Execute without a notification, as if it was lost."""
    async with owner.acquire() as connection, connection.transaction():
        await connection.execute("SET LOCAL session_replication_role = replica")
        await connection.execute(statement, *arguments)


async def cut_all(owner: asyncpg.Pool) -> None:
    """Cut every connection that the server has to the database."""
    await owner.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'bottega'"
    )


async def refused(client: httpx2.AsyncClient, path: str = "/v1/runs", **headers: str) -> str:
    """Send requests until one is refused, but not for its rate; return the code."""
    answer = await until(
        lambda: client.get(path, headers=headers),
        lambda answer: answer.is_error and answer.status_code != 429,
    )
    code: str = answer.json()["code"]
    return code


async def once_back(
    client: httpx2.AsyncClient, path: str, *, within: float = 30
) -> httpx2.Response:
    """Ask until the server has its database back; return that answer."""
    return await until(
        lambda: client.get(path), lambda answer: answer.status_code != 503, within=within
    )


@pytest.mark.parametrize(
    ("statement", "lost"),
    [(REVOKE, "nothing"), (EXPIRE, "notification"), (REVOKE, "connection")],
)
async def test_a_key_becomes_invalid_everywhere(
    closed: Running, held: ApiKey, owner: asyncpg.Pool, statement: str, lost: str
) -> None:
    assert (await closed.client.get("/v1/runs")).status_code == 200
    if lost == "connection":
        await cut_all(owner)
    if lost == "nothing":
        await owner.execute(statement, held.key_id)
    else:
        await quietly(owner, statement, held.key_id)
    code = await until(  # its connections were cut just now
        lambda: refused(closed.client), lambda code: code != "database_unavailable", within=5
    )
    assert code == ("bad_key" if statement == REVOKE else "key_expired")


async def test_a_key_that_was_revoked_at_one_server_is_refused_at_another(
    closed: Running, settings: Settings, database_url: str, held: ApiKey
) -> None:
    admin = await holder(database_url, "default")
    async with (
        running(settings, database_url) as other,
        admin.client(other) as there,
    ):
        assert (await closed.client.get("/v1/runs")).status_code == 200
        assert (await there.delete(f"/v1/keys/{held.key_id}")).status_code == 204
        assert await refused(closed.client) == "bad_key"
        assert (await there.get("/v1/runs")).status_code == 200


@asynccontextmanager
async def watched(server: Running, run: Growing, over: str, headers: Any) -> AsyncIterator[Any]:
    """Yield a wait for the end of the run's stream, and the stream."""
    if over == "sse":
        client = client_of(server.port, headers={**headers, "accept": "text/event-stream"})
        async with client, client.stream("GET", f"{run.path}/events") as response:
            lines = response.aiter_lines()
            while "run.started" not in await anext(lines):
                pass

            async def ended() -> str:
                return "\n".join([line async for line in lines])

            yield ended
    else:
        url = f"ws://127.0.0.1:{server.port}{run.path}/ws"
        async with websockets.connect(url, additional_headers=headers) as socket:
            while from_json(await socket.recv())["type"] != "run.started":
                pass

            async def closing() -> str:
                with pytest.raises(websockets.ConnectionClosedError):
                    await socket.recv()
                assert socket.close_code == 4001
                return socket.close_reason or ""

            yield closing


@pytest.mark.parametrize(("over", "statement"), [("sse", REVOKE), ("websocket", EXPIRE)])
async def test_streams_of_an_invalid_key_end(
    closed: Running, run: Growing, held: ApiKey, owner: asyncpg.Pool, over: str, statement: str
) -> None:
    other = await holder(closed.service.database.url, "default", "read")
    async with (
        watched(closed, run, over, held.headers) as ended,
        watched(closed, run, over, other.headers) as going_on,
    ):
        await quietly(owner, statement, held.key_id)
        async with asyncio.timeout(10):
            assert "revoked" in await ended()
        still = asyncio.ensure_future(going_on())
        await run.warn(1)
        await asyncio.sleep(0)
        assert not still.done()
        still.cancel()
        await asyncio.gather(still, return_exceptions=True)


async def test_the_first_key_counts_before_the_server_needs_one(
    settings: Settings, database_url: str, owner: asyncpg.Pool
) -> None:
    async with running(settings, database_url) as server:
        unknown = {"Authorization": f"Bearer {'x' * 56}"}
        assert (await server.client.get("/v1/runs", headers=unknown)).status_code == 200
        await owner.execute("DROP TRIGGER announce_keys ON api_keys")
        held = await holder(database_url, "acme", "read")
        async with held.client(server) as client:
            assert (await client.delete("/v1/agents/a")).status_code == 403


@pytest.mark.parametrize("lost", [pytest.param("nothing", marks=pytest.mark.deep), "notification"])
async def test_the_first_key_closes_a_server_that_was_open(
    settings: Settings, database_url: str, owner: asyncpg.Pool, lost: str
) -> None:
    async with running(settings, database_url) as server:
        assert (await server.client.get("/v1/runs")).status_code == 200
        if lost == "notification":
            await owner.execute("DROP TRIGGER announce_keys ON api_keys")
            await owner.execute("INSERT INTO first_key DEFAULT VALUES")
        held = await holder(database_url)
        async with asyncio.timeout(10):
            assert await refused(server.client) == "unauthenticated"
        async with held.client(server) as client:
            assert (await client.get("/v1/runs")).status_code == 200
            foreign = {"host": "example.com", "origin": "https://evil.example"}
            assert (await client.get("/v1/runs", headers=foreign)).status_code == 200
        await owner.execute("DELETE FROM api_keys")
        async with running(settings, database_url) as another:
            for each in (server, another):
                assert (await each.client.get("/v1/runs")).status_code == 401


@pytest.mark.parametrize("over", [pytest.param("sse", marks=pytest.mark.deep), "websocket"])
async def test_streams_of_a_server_that_was_open_end_with_the_first_key(
    settings: Settings, database_url: str, over: str
) -> None:
    async with (
        running(settings, database_url) as server,
        growing(server) as run,
        watched(server, run, over, {}) as ended,
    ):
        await holder(database_url)
        assert "revoked" in await ended()


class Line:
    """Line to the database, which may be down or silent."""

    def __init__(self, database_url: str) -> None:
        address = urlsplit(database_url)
        self._socket = f"{parse_qs(address.query)['host'][0]}/.s.PGSQL.5432"
        self._path = address.path
        self._down = False
        self._proxy = Proxy(self._dial)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._proxy.port}{self._path}"

    async def _dial(self) -> Any:
        if self._down:
            raise OSError
        return await asyncio.open_unix_connection(self._socket)

    async def __aenter__(self) -> Self:
        await self._proxy.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._proxy.close()

    @contextmanager
    def away(self, how: str) -> Iterator[None]:
        if how == "silent":
            self._proxy.answering.clear()
        else:
            self._down = True
            self._proxy.cut()
        yield
        self._down = False
        self._proxy.cut()
        self._proxy.answering.set()


NOTHING = "/v1/nothing"
"""A path of which only the key is checked, so that no route asks the database."""


@pytest.mark.deep
@pytest.mark.parametrize("how", [pytest.param("down", marks=pytest.mark.deep), "silent"])
async def test_without_the_database_keys_are_soon_refused(
    settings: Settings, database_url: str, held: ApiKey, how: str
) -> None:
    unknown = {"authorization": f"Bearer {'x' * 40}"}
    async with (
        Line(database_url) as line,
        running(settings, line.url) as server,
        held.client(server) as client,
    ):
        assert (await client.get(NOTHING)).status_code == 404
        with line.away(how):
            async with asyncio.timeout(10):
                await until(lambda: client.get(NOTHING), lambda answer: answer.status_code == 503)
            assert (await server.client.get(NOTHING)).status_code == 401
            assert (await client.get(NOTHING, headers=unknown)).status_code == 503
            assert (await client.get("/healthz")).status_code == 200
        await once_back(client, NOTHING)
        await once_back(client, "/v1/runs")
        assert (await client.get("/v1/runs")).status_code == 200


@pytest.mark.deep
@pytest.mark.parametrize("how", ["down", pytest.param("silent", marks=pytest.mark.deep)])
async def test_an_open_server_checks_for_a_first_key(
    settings: Settings, database_url: str, how: str
) -> None:
    async with Line(database_url) as line, running(settings, line.url) as server:
        assert (await server.client.get(NOTHING)).status_code == 404
        with line.away(how):
            async with asyncio.timeout(10):
                await until(
                    lambda: server.client.get(NOTHING), lambda answer: answer.status_code == 503
                )
            await holder(database_url)
        assert (await once_back(server.client, NOTHING, within=10)).status_code == 401


async def test_a_flood_of_unknown_keys_does_not_lock_out_a_valid_one(closed: Running) -> None:
    over = asyncio.Event()

    async def flood(number: int) -> set[int]:
        seen, count = set(), 0
        async with client_of(closed.port) as client:
            while not over.is_set():
                count += 1
                key = f"btg_{number:08}_{count:043}"
                answer = await client.get("/v1/runs", headers={"authorization": f"Bearer {key}"})
                seen.add(answer.status_code)
        return seen

    flooding = [asyncio.ensure_future(flood(number)) for number in range(20)]
    for _ in range(25):
        assert (await closed.client.get("/v1/runs")).status_code == 200
    over.set()
    assert set().union(*await asyncio.gather(*flooding)) <= {401, 503}


async def test_a_wait_for_a_run_returns_nothing_after_revocation(
    closed: Running, held: ApiKey
) -> None:
    await closed.client.post("/v1/agents", json={"name": "a", "system_message": "x"})
    body = {"agent": "a", "input": "x"}
    waiting = asyncio.ensure_future(closed.client.post("/v1/runs?wait=20", json=body))
    await until(lambda: closed.service.wakeups.watched())
    await closed.owner.execute(REVOKE, held.key_id)
    answer = await waiting
    assert (answer.status_code, answer.json()["code"]) == (401, "bad_key")
