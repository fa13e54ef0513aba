"""Limits of tenants with keys: who asks too much is told so, and costs nobody else anything."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from starlette.types import Message, Receive, Scope, Send

from app.api.limits import LimitTenants

A, B = UUID(int=1), UUID(int=2)


@dataclass(frozen=True)
class Somebody:
    tenant_id: UUID
    key_id: UUID | None = UUID(int=9)


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body"})


async def asked(app: Any, who: Somebody | None, **scope: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what is answered to ``who``."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("the body is not read")

    state = {} if who is None else {"principal": who}
    whole = {"type": "http", "path": "/v1/agents", "headers": [], "state": state, **scope}
    await app(whole, receive, send)
    headers = {name.decode(): value.decode() for name, value in messages[0].get("headers", [])}
    return messages[0]["status"], headers, b"".join(m.get("body", b"") for m in messages)


async def test_who_asks_too_often_is_refused_and_told_when_to_come_back() -> None:
    now = 1000.0
    app = LimitTenants(ok, per_s=0.5, streams=1, clock=lambda: now)
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


async def test_without_keys_there_is_no_limit() -> None:
    app = LimitTenants(ok, per_s=0.5, streams=1, clock=lambda: 0.0)
    for who in (None, Somebody(A, key_id=None)):
        for _ in range(5):
            status, headers, _ = await asked(app, who)
            assert status == 200
            assert "ratelimit" not in headers


async def test_streams_are_counted_and_a_closed_one_makes_room() -> None:
    end = asyncio.Event()
    begun: list[Scope] = []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope)
        await end.wait()
        await ok(scope, receive, send)

    app = LimitTenants(stream, per_s=1000, streams=2, clock=lambda: 0.0)
    sse = {"path": "/v1/runs/x/events", "headers": [(b"accept", b"text/event-stream")]}
    open_ = [asyncio.ensure_future(asked(app, Somebody(A), **sse)) for _ in range(2)]
    while len(begun) < 2:
        await asyncio.sleep(0)
    status, headers, body = await asked(app, Somebody(A), **sse)
    assert status == 429
    assert json.loads(body)["code"] == "too_many_streams"
    assert headers["retry-after"] == "1"
    end.set()
    await asyncio.gather(*open_)
    assert (await asked(app, Somebody(A), **sse))[0] == 200
    assert not app.open
