"""Limits per tenant: exceeding them is refused with a reason, and costs other tenants nothing."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
import websockets
from starlette.types import Message, Receive, Scope, Send

from bottega.api.server.connections import PING_BURST
from bottega.api.server.middleware import LimitRequests
from bottega.settings import Settings
from bottega.tenants.limits import NO_LIMITS, StoredLimits
from tests.growing import growing
from tests.service import Running, running
from tests.tenants import ApiKey, holder
from tests.waiting import until

A, B = UUID(int=1), UUID(int=2)


@dataclass(frozen=True)
class Somebody:
    tenant_id: UUID
    key_id: UUID | None = UUID(int=9)
    limits: StoredLimits = NO_LIMITS

    @property
    def is_local(self) -> bool:
        return self.key_id is None


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body"})


async def asked(app: Any, who: Somebody | None, **scope: Any) -> tuple[int, dict[str, str], bytes]:
    """Return the status, headers and body of the answer to ``who``."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("the body is not read")

    state = {} if who is None else {"principal": who}
    request = {"type": "http", "method": "GET", "path": "/v1/agents", "headers": []}
    await app({**request, "state": state, **scope}, receive, send)
    headers = {name.decode(): value.decode() for name, value in messages[0].get("headers", [])}
    return messages[0]["status"], headers, b"".join(m.get("body", b"") for m in messages)


async def test_too_many_requests_are_refused_with_a_time_to_retry() -> None:
    now = 1000.0
    app = LimitRequests(ok, max_bytes=10**8, per_s=0.5, streams=1, clock=lambda: now)
    status, headers, _ = await asked(app, Somebody(A))
    assert status == 200
    assert headers["ratelimit-policy"] == '"requests";q=1;w=2'
    assert headers["ratelimit"] == '"requests";r=0;t=2'
    now += 0.5
    status, headers, body = await asked(app, Somebody(A))
    assert status == 429
    assert headers["retry-after"] == "2"
    assert headers["ratelimit"] == '"requests";r=0;t=2'
    assert headers["content-type"] == "application/problem+json"
    assert json.loads(body)["code"] == "rate_limited"
    assert (await asked(app, Somebody(B)))[0] == 200
    now += 1.5
    assert (await asked(app, Somebody(A)))[0] == 200


@pytest.mark.parametrize(
    ("size", "cost"), [(65_535, 1), (65_536, 2), (1_000_000, 16), (10**7, 153)]
)
async def test_a_long_body_counts_as_several_requests(size: int, cost: int) -> None:
    pieces = [b"x" * min(50_000, size - at) for at in range(0, size, 50_000)]

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while pieces:
            await receive()
        await ok(scope, receive, send)

    async def ignored(message: Message) -> None:
        pass

    app = LimitRequests(reads, max_bytes=10**8, per_s=10, streams=1, clock=lambda: 0.0)
    scope = {"type": "http", "method": "POST", "path": "/v1/agents", "headers": []}
    await app({**scope, "state": {"principal": Somebody(A)}}, receive, ignored)
    _, headers, _ = await asked(app, Somebody(A))
    left = max(0, 20 - cost - 1)
    assert headers["ratelimit"].startswith(f'"requests";r={left};')
    if cost > 20:
        assert int(headers["retry-after"]) == (cost - 20 + 1) // 10 + 1


async def test_a_long_answer_counts_as_several_requests() -> None:
    async def says(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 50_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"x" * 20_000})

    app = LimitRequests(says, max_bytes=10**8, per_s=10, streams=1, clock=lambda: 0.0)
    await asked(app, Somebody(A))
    _, headers, _ = await asked(app, Somebody(A))
    assert headers["ratelimit"].startswith('"requests";r=14;')  # of 20: twice one, and four
    assert (await asked(app, Somebody(B)))[1]["ratelimit"].startswith('"requests";r=19;')


async def test_without_keys_there_is_no_limit() -> None:
    app = LimitRequests(ok, max_bytes=10**8, per_s=0.5, streams=1, clock=lambda: 0.0)
    for who in (None, Somebody(A, key_id=None)):
        for _ in range(5):
            status, headers, _ = await asked(app, who)
            assert status == 200
            assert "ratelimit" not in headers


@pytest.mark.parametrize(
    "stream",
    [
        {"path": "/v1/runs/x/events", "headers": [(b"accept", b"text/event-stream")]},
        {"path": "/v1/runs", "method": "POST", "query_string": b"w%61it=60"},
        {"path": "/mcp/", "method": "POST"},
        {"path": "/openai/v1/responses", "method": "POST"},
    ],
)
async def test_event_streams_are_bounded_and_a_closed_one_makes_room(
    stream: dict[str, Any],
) -> None:
    end = asyncio.Event()
    begun: list[Scope] = []

    async def lasting(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope)
        await end.wait()
        await ok(scope, receive, send)

    app = LimitRequests(lasting, max_bytes=10**8, per_s=1000, streams=2, clock=lambda: 0.0)
    open_ = [asyncio.ensure_future(asked(app, Somebody(A), **stream)) for _ in range(2)]
    await until(lambda: len(begun) >= 2)
    status, headers, body = await asked(app, Somebody(A), **stream)
    assert status == 429
    assert json.loads(body)["code"] == "too_many_streams"
    assert headers["retry-after"] == "1"
    end.set()
    await asyncio.gather(*open_)
    assert (await asked(app, Somebody(A), **stream))[0] == 200
    assert not app.open


async def test_the_limit_is_per_tenant_and_unknown_keys_do_not_use_it(
    settings: Settings, database_url: str
) -> None:
    few = settings.model_copy(update={"requests_per_s": 0.001})
    somebody = await holder(database_url)
    neighbour = await holder(database_url, "neighbour")
    async with (
        running(few, database_url) as server,
        somebody.client(server) as client,
        neighbour.client(server) as other,
    ):
        for _ in range(5):
            assert (await server.client.get("/v1/agents")).status_code == 401
            assert (await server.client.get("/healthz")).status_code == 200
        first = await client.get("/v1/agents/nobody")
        assert first.status_code == 404
        assert first.headers["ratelimit-policy"] == '"requests";q=1;w=1000'
        assert first.headers["ratelimit"] == '"requests";r=0;t=1000'
        refused = await client.post("/v1/agents", json={})
        assert refused.status_code == 429
        assert refused.json()["code"] == "rate_limited"
        assert 990 <= int(refused.headers["retry-after"]) <= 1000
        assert refused.headers["x-content-type-options"] == "nosniff"
        url = f"ws://127.0.0.1:{server.port}/v1/runs/{UUID(int=1)}/ws"
        with pytest.raises(websockets.InvalidStatus) as denied:
            async with websockets.connect(url, additional_headers=somebody.headers):
                pass
        assert denied.value.response.status_code == 429
        assert (await other.get("/v1/agents")).status_code == 200


async def _run_of(server: Running, somebody: ApiKey) -> str:
    """Create a run of a tenant that no worker executes."""
    async with somebody.client(server) as client:
        await client.post("/v1/agents", json={"name": "a", "system_message": "x"})
        run: str = (await client.post("/v1/runs", json={"agent": "a", "input": "x"})).json()["id"]
    return run


async def test_a_stream_over_the_limit_is_refused_until_one_closes(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.main.MAX_STREAMS", 1)
    somebody = await holder(database_url)
    async with running(settings, database_url) as server, somebody.client(server) as client:
        path = f"/v1/runs/{await _run_of(server, somebody)}"
        url = f"ws://127.0.0.1:{server.port}{path}/ws"
        sse = {"accept": "text/event-stream"}
        async with websockets.connect(url, additional_headers=somebody.headers) as socket:
            refused = await client.get(f"{path}/events", headers=sse)
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
            with pytest.raises(websockets.InvalidStatus):
                await websockets.connect(url, additional_headers=somebody.headers)
            assert (await client.get(f"{path}/events")).status_code == 200
            await socket.close()
        await until(lambda: not server.service.wakeups.watched())
        async with client.stream("GET", f"{path}/events", headers=sse) as answer:
            assert answer.status_code == 200


async def test_the_past_of_a_streamed_run_counts_like_a_long_answer(
    settings: Settings, database_url: str
) -> None:
    async with running(settings, database_url) as server, growing(server) as run:
        await run.warn(8, size=10_000)
        await run.finish()
    somebody = await holder(database_url, "default")
    slow = settings.model_copy(update={"requests_per_s": 0.001})
    async with running(slow, database_url) as server, somebody.client(server) as client:
        stream = await client.get(f"{run.path}/events", headers={"accept": "text/event-stream"})
        assert stream.status_code == 200
        refused = await client.get("/v1/agents")
        assert refused.status_code == 429
        units = len(stream.content) // (16 * 1024)
        assert int(refused.headers["retry-after"]) // 1000 in (units, units + 1)


@pytest.mark.parametrize(("per_s", "cancelled"), [(1e6, True), (0.001, False)])
async def test_cancel_frames_count_as_requests_but_waits_and_pings_do_not(
    settings: Settings, database_url: str, per_s: float, cancelled: bool
) -> None:
    somebody = await holder(database_url)
    async with running(settings, database_url) as server:
        run = await _run_of(server, somebody)
    limited = settings.model_copy(update={"requests_per_s": per_s})
    async with running(limited, database_url) as server:
        url = f"ws://127.0.0.1:{server.port}/v1/runs/{run}/ws"
        async with websockets.connect(url, additional_headers=somebody.headers) as socket:
            for _ in range(PING_BURST):
                await socket.send('{"type":"ping"}')
            received: list[str] = []
            while sum("pong" in frame for frame in received) < PING_BURST:
                received.append(str(await socket.recv()))
            await socket.send('{"type":"cancel"}')
            if cancelled:
                while not any("cancel.accepted" in frame for frame in received):
                    received.append(str(await socket.recv()))
            server.service.wakeups.close()
            received += [str(frame) async for frame in socket]
        assert any("cancel.accepted" in frame for frame in received) == cancelled


async def test_the_frames_of_chunks_count_too(settings: Settings, database_url: str) -> None:
    somebody = await holder(database_url)
    slow = settings.model_copy(update={"requests_per_s": 0.001})
    async with running(slow, database_url) as server, somebody.client(server) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = "POST /v1/agents HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
        fields = "".join(f"{name}: {value}\r\n" for name, value in somebody.headers.items())
        writer.write(f"{head}{fields}\r\n".encode() + b"1\r\n1\r\n" * 30_000 + b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        writer.close()
        refused = await client.get("/v1/agents")
        assert refused.status_code == 429
        assert 2900 <= int(refused.headers["retry-after"]) <= 3000  # 180 KB are two more
