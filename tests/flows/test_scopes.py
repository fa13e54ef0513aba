"""Scopes of keys and tickets on streams: watching and cancelling."""

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from operator import not_
from typing import Any

import asyncpg
import pytest
import websockets
from pydantic_core import from_json

from bottega.errors import UnauthenticatedError
from bottega.settings import Settings
from tests.growing import Growing, growing
from tests.service import Running, client_of, running
from tests.tenants import ApiKey, holder
from tests.waiting import until

NOBODY = "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"
CANCEL = '{"type": "cancel"}'


@pytest.fixture
async def runner(database_url: str) -> ApiKey:
    return await holder(database_url, "default", "run", "define")


@pytest.fixture
async def reader(database_url: str) -> ApiKey:
    return await holder(database_url, "default", "read")


@pytest.fixture
async def closed(settings: Settings, database_url: str, runner: ApiKey) -> AsyncIterator[Running]:
    async with running(settings, database_url) as server, runner.client(server) as client:
        yield replace(server, client=client)


@pytest.fixture
async def run(closed: Running) -> AsyncIterator[Growing]:
    async with growing(closed) as run:
        yield run


def connect(server: Running, path: str, *protocols: str, **headers: str) -> websockets.connect:
    url = f"ws://127.0.0.1:{server.port}{path}"
    return websockets.connect(url, subprotocols=protocols or None, additional_headers=headers)  # type: ignore[arg-type]


async def refusal(server: Running, path: str, *protocols: str, **headers: str) -> tuple[int, str]:
    """Return the status and code of the answer to a handshake."""
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with connect(server, path, *protocols, **headers):
            pass
    answer = refused.value.response
    if answer.status_code == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, from_json(answer.body or b"")["code"]


async def ticket(held: ApiKey, server: Running, **body: Any) -> str:
    async with held.client(server) as client:
        answer = await client.post("/v1/ws-tickets", json=body)
    assert answer.status_code == 201, answer.text
    return f"ticket.{answer.json()['ticket']}"


async def answer_to(socket: websockets.ClientConnection, frame: str) -> dict[str, Any]:
    """Return the answer to a frame, skipping events already sent."""
    await socket.send(frame)
    while (received := from_json(await socket.recv())).get("run_id") or "seq" in received:
        pass
    answer: dict[str, Any] = received
    return answer


async def test_a_websocket_without_a_valid_key_is_refused_before_the_upgrade(
    closed: Running, run: Growing, database_url: str
) -> None:
    path = f"{run.path}/ws"
    unknown = {"authorization": f"Bearer btg_aaaaaaaa_{'A' * 43}"}
    foreign = (await holder(database_url, "umbrella")).headers
    for at in (path, f"/v1/runs/{NOBODY}/ws", "/nothing", f"{path}?after=x"):
        assert await refusal(closed, at) == (401, "unauthenticated")
        assert await refusal(closed, at, **unknown) == (401, "bad_key")
    assert await refusal(closed, path, **foreign) == (404, "not_found")
    for at in ("/nothing", "/healthz", "/docs-assets/swagger-ui.css"):
        assert await refusal(closed, at, **foreign) == (404, "not_found")
    assert await refusal(closed, "/docs-assets/swagger-ui.css") == (404, "not_found")


async def test_an_event_stream_without_a_valid_key_is_refused(
    closed: Running, run: Growing, database_url: str
) -> None:
    foreign = await holder(database_url, "umbrella")
    for headers, status in (({}, 401), (foreign.headers, 404)):
        async with client_of(closed.port) as client:
            accept = {"accept": "text/event-stream"}
            answer = await client.get(f"{run.path}/events", headers={**headers, **accept})
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_read_key_may_watch_but_not_cancel(
    closed: Running, run: Growing, reader: ApiKey, runner: ApiKey
) -> None:
    async with connect(closed, f"{run.path}/ws", **reader.headers) as socket:
        assert (await answer_to(socket, '{"type": "ping"}'))["type"] == "pong"
        for frame in (CANCEL, f'{{"type": "cancel", "task_id": "{NOBODY}"}}'):
            answer = await answer_to(socket, frame)
            assert (answer["type"], answer["code"]) == ("error", "insufficient_scope")
            assert "'run'" in answer["detail"]
    assert (await closed.client.get(run.path)).json()["status"] == "running"
    async with connect(closed, f"{run.path}/ws", **runner.headers) as socket:
        assert (await answer_to(socket, CANCEL))["type"] == "cancel.accepted"


@pytest.mark.parametrize("scope", ["read", "run"])
async def test_a_ticket_has_the_scope_of_its_key(
    closed: Running, run: Growing, reader: ApiKey, runner: ApiKey, scope: str, owner: asyncpg.Pool
) -> None:
    held = reader if scope == "read" else runner
    good = await ticket(held, closed)
    async with connect(closed, f"{run.path}/ws", "bottega.v1", good) as socket:
        answer = await answer_to(socket, CANCEL)
    if scope == "read":
        assert answer["code"] == "insufficient_scope"
        assert await owner.fetchval("SELECT count(*) FROM audit_log WHERE action ~ 'run'") == 0
    else:
        assert answer["type"] == "cancel.accepted"
        actors = await owner.fetch("SELECT actor FROM audit_log WHERE action = 'run.cancel'")
        assert [row["actor"] for row in actors] == [f"key:{runner.prefix}"]
    assert await refusal(closed, f"{run.path}/ws", good) == (401, "bad_ticket")


async def test_a_ticket_shows_no_run_of_another_tenant(
    closed: Running, run: Growing, database_url: str
) -> None:
    other = await holder(database_url, "umbrella")
    good = await ticket(other, closed)
    assert await refusal(closed, f"{run.path}/ws", good) == (404, "not_found")
    async with other.client(closed) as client:
        run_id = run.path.rpartition("/")[2]
        answer = await client.post("/v1/ws-tickets", json={"run_id": run_id})
    assert answer.status_code == 404


async def test_a_ticket_opens_nothing_but_a_run_s_websocket(
    closed: Running, run: Growing, runner: ApiKey
) -> None:
    for path in ("/nothing", "/v1/runs/nonsense/ws", f"{run.path}/ws/more"):
        good = await ticket(runner, closed)
        assert await refusal(closed, path, good) == (401, "bad_ticket")
    headers = {"sec-websocket-protocol": await ticket(runner, closed)}
    async with client_of(closed.port) as client:
        assert (await client.get("/v1/runs", headers=headers)).status_code == 401


async def test_a_ticket_is_valid_only_while_its_key_is(
    closed: Running, run: Growing, reader: ApiKey, owner: asyncpg.Pool
) -> None:
    good = await ticket(reader, closed)
    await owner.execute("UPDATE api_keys SET revoked_at = now() WHERE id = $1", reader.key_id)

    def is_valid() -> bool:
        with contextlib.suppress(UnauthenticatedError):
            closed.service.keys.tokens.verify(good.removeprefix("ticket."))
            return True
        return False

    await until(is_valid, not_, within=5)
    assert await refusal(closed, f"{run.path}/ws", good) == (401, "bad_ticket")


async def test_a_ticket_ends_with_its_key_at_the_latest(
    closed: Running, run: Growing, database_url: str
) -> None:
    brief = await holder(database_url, "default", "read", expires=timedelta(seconds=20))
    async with brief.client(closed) as client:
        for_stream = {"for": "sse", "run_id": run.path.rpartition("/")[2]}
        answer = (await client.post("/v1/ws-tickets", json=for_stream)).json()
    left = datetime.fromisoformat(answer["expires_at"]) - datetime.now(UTC)
    assert timedelta(0) < left <= timedelta(seconds=20)


@pytest.mark.deep
async def test_a_stream_that_a_ticket_opened_ends_with_its_key(
    closed: Running, run: Growing, reader: ApiKey, owner: asyncpg.Pool
) -> None:
    good = await ticket(reader, closed)
    async with connect(closed, f"{run.path}/ws", good) as socket:
        await socket.recv()
        await owner.execute("UPDATE api_keys SET revoked_at = now() WHERE id = $1", reader.key_id)
        with contextlib.suppress(websockets.ConnectionClosedError):
            while True:
                await socket.recv()
    assert socket.close_code == 4001
    assert re.fullmatch(
        r"key revoked, expired or missing; resume after=\d+", socket.close_reason or ""
    )


async def test_a_ticket_without_a_key_is_invalid_once_keys_exist(
    settings: Settings, database_url: str
) -> None:
    async with running(settings, database_url) as server, growing(server) as run:
        asked = await server.client.post("/v1/ws-tickets", json={})
        await holder(database_url)
        good = f"ticket.{asked.json()['ticket']}"

        async def is_closed() -> bool:
            return not await server.service.keys.is_open()

        await until(is_closed, within=5)
        assert await refusal(server, f"{run.path}/ws", good) == (401, "bad_ticket")
