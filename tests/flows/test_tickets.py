"""Tickets, by which a browser opens a WebSocket or an event stream."""

import asyncio
import re
import time
from operator import not_
from typing import Any

import httpx2
import pytest
import websockets
from pydantic_core import from_json

from bottega.db.tables import DEFAULT_TENANT
from bottega.settings import Settings
from bottega.tenants.tokens import Token
from tests.claims import sweep
from tests.growing import growing
from tests.service import Running, client_of, running
from tests.team import start
from tests.tenants import holder
from tests.waiting import until


@pytest.fixture
async def ended(settings: Settings, database_url: str) -> Any:
    """A server, and the path of a finished run."""
    async with running(settings, database_url) as server, growing(server) as run:
        await run.finish()
        yield server, run.path


async def ticket(client: httpx2.AsyncClient, **body: Any) -> str:
    answer = await client.post("/v1/ws-tickets", json=body)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["ticket"]
    return found


async def opened(server: Running, path: str, *protocols: str) -> str | None:
    """Return the subprotocol that the server chose, after all events came."""
    url = f"ws://127.0.0.1:{server.port}{path}/ws"
    async with websockets.connect(url, subprotocols=list(protocols) or None) as socket:  # type: ignore[arg-type]
        assert from_json([message async for message in socket][-1])["type"] == "run.completed"
        return socket.subprotocol


async def refused(server: Running, path: str, *protocols: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as answer:
        await opened(server, path, *protocols)
    assert answer.value.response.status_code == 401
    assert from_json(answer.value.response.body or b"")["code"] == "bad_ticket"


async def test_a_ticket_opens_one_websocket_at_any_server(
    ended: Any, settings: Settings, database_url: str
) -> None:
    server, path = ended
    for body in ({}, {"run_id": path.rpartition("/")[2]}):
        good = f"ticket.{await ticket(server.client, **body)}"
        async with running(settings, database_url) as other:
            assert await opened(other, path, "bottega.v1", good) == "bottega.v1"
        await refused(server, path, "bottega.v1", good)


async def test_a_ticket_used_concurrently_admits_one_client(ended: Any) -> None:
    server, path = ended
    good = f"ticket.{await ticket(server.client)}"
    tries = [opened(server, path, "bottega.v1", good) for _ in range(8)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert results.count("bottega.v1") == 1
    assert sum(isinstance(result, websockets.InvalidStatus) for result in results) == 7


async def test_the_protocol_may_be_offered_without_a_ticket(ended: Any) -> None:
    server, path = ended
    assert await opened(server, path, "bottega.v1") == "bottega.v1"
    assert await opened(server, path) is None


async def test_invalid_tickets_are_refused(ended: Any) -> None:
    server, path = ended
    other_run = await start(server.client)
    await refused(server, path, "bottega.v1", "ticket.unknown")
    await refused(server, path, "bottega.v1", "ticket.")
    foreign = await ticket(server.client, run_id=other_run)
    await refused(server, path, "bottega.v1", f"ticket.{foreign}")
    made = {"scopes": ("admin",), "opens": "websocket"}
    ended = Token(DEFAULT_TENANT, None, None, time.time() - 1, **made)  # type: ignore[arg-type]
    old, _ = server.service.keys.tokens.sign(ended)
    await refused(server, path, "bottega.v1", f"ticket.{old}")


async def test_a_used_ticket_is_stored_by_its_id_until_it_would_have_expired(ended: Any) -> None:
    server, path = ended
    pool, good = server.owner, await ticket(server.client)
    assert await pool.fetchval("SELECT count(*) FROM ended_tokens") == 0
    await opened(server, path, f"ticket.{good}")
    (row,) = await pool.fetch("SELECT jti, ended_tokens::text AS row FROM ended_tokens")
    assert row["jti"] == server.service.keys.tokens.verify(good).jti
    assert good not in row["row"]
    await pool.execute("UPDATE ended_tokens SET expires_at = now() - interval '1 s'")

    async def swept() -> int:
        await sweep(pool)  # the server's own sweep may hold the lock
        left: int = await pool.fetchval("SELECT count(*) FROM ended_tokens")
        return left

    assert await until(swept, not_) == 0


async def test_no_ticket_is_given_for_an_unknown_run(ended: Any) -> None:
    server, _ = ended
    nobody = "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"
    answer = await server.client.post("/v1/ws-tickets", json={"run_id": nobody})
    assert answer.status_code == 404


async def test_a_ticket_opens_the_event_stream_of_its_run_more_than_once(
    ended: Any, database_url: str
) -> None:
    server, path = ended
    somebody = await holder(database_url, "default")
    run_id, other = path.rpartition("/")[2], "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"
    async with somebody.client(server) as client, client_of(server.port) as browser:

        async def stream(pass_: str, of: str = path, **query: Any) -> httpx2.Response:
            accept = {"accept": "text/event-stream"}
            params = {"ticket": pass_, **query}
            return await browser.get(f"{of}/events", params=params, headers=accept)

        good = await ticket(client, **{"for": "sse", "run_id": run_id})
        for _ in range(2):
            answer = await stream(good)
            assert answer.status_code == 200, answer.text
            assert "event: run.completed\r\n" in answer.text
        unnamed = await stream(good, event="message")
        assert re.findall("event: (.*)\r", unnamed.text) == ["end"]
        assert '"type":"run.completed"' in unnamed.text
        for_socket = await ticket(client, run_id=run_id)
        refusals = [
            await stream(good, f"/v1/runs/{other}"),
            await stream(for_socket),
            await browser.get(path, params={"ticket": good}),
            await browser.post(f"{path}/cancel", params={"ticket": good}),
        ]
        assert [each.status_code for each in refusals] == [401] * 4
        await refused(server, path, "bottega.v1", f"ticket.{good}")
        await server.owner.execute(
            "UPDATE api_keys SET revoked_at = now() WHERE id = $1", somebody.key_id
        )
        last = await until(lambda: stream(good), lambda answer: answer.status_code == 401)
        assert last.json()["code"] == "bad_ticket"


async def test_a_ticket_for_an_event_stream_names_its_run(ended: Any) -> None:
    server, _ = ended
    answer = await server.client.post("/v1/ws-tickets", json={"for": "sse"})
    assert answer.status_code == 422
    assert [each["pointer"] for each in answer.json()["errors"]] == ["/run_id"]
