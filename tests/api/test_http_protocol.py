"""Limits of HTTP connections (sizes and times), and the headers of every answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from bottega.api.server import connections
from bottega.settings import Settings
from tests.service import Running, running

HOST = b"Host: 127.0.0.1\r\n"
UPGRADE = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)
SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


@pytest.fixture
async def hasty(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    """A server with very short timeouts."""
    monkeypatch.setattr("bottega.main.REQUEST_TIMEOUT_S", 0.1)
    async with running(settings, database_url) as server:
        yield server


async def sent(server: Running, *pieces: bytes) -> bytes:
    """Return everything that the server answers to raw bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


def problem(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    fields = [line.partition(": ") for line in head.decode().lower().split("\r\n")[1:]]
    found = {name: value for name, _, value in fields}
    assert len(found) == len(fields), fields
    assert found["content-type"] == "application/problem+json"
    assert found["connection"] == "close"
    assert "server" not in found
    assert SECURITY.items() <= found.items()
    said = json.loads(body)
    assert (said["status"], said["code"]) == (status, code)
    assert said["detail"]


@pytest.mark.parametrize("upgrade", [b"", UPGRADE], ids=["http", "websocket"])
@pytest.mark.parametrize(
    ("path", "fields", "status", "code"),
    [
        (b"/" + b"x" * connections.MAX_URL_BYTES, b"", 414, "url_too_long"),
        (b"/?q=" + b"x" * 10**6, b"", 414, "url_too_long"),
        (b"/", b"x: y\r\n" * 101, 431, "headers_too_large"),
        (b"/", b"x" * 9000 + b": y\r\n", 431, "headers_too_large"),
        (b"/", b"x: " + b"y" * 9000 + b"\r\n", 431, "headers_too_large"),
        (b"/", b"x: " + b"y" * 10**6 + b"\r\n", 431, "headers_too_large"),
        (b"/", (b"x: " + b"y" * 4000 + b"\r\n") * 9, 431, "headers_too_large"),
        (b"/", b"no colon\r\n", 400, "bad_request"),
        (b"/\xff\x00", b"", 400, "bad_request"),
        (b"nothing", b"", 400, "bad_request"),
    ],
)
async def test_a_head_that_is_too_large_or_invalid_is_refused(
    refusing: Running, upgrade: bytes, path: bytes, fields: bytes, status: int, code: str
) -> None:
    head = b"GET " + path + b" HTTP/1.1\r\n" + HOST + upgrade + fields + b"\r\n"
    problem(await sent(refusing, head), status, code)
    assert (await refusing.client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "field", [b"Sec-WebSocket-Key: short\r\n", b"Sec-WebSocket-Version: 12\r\n"]
)
async def test_an_invalid_handshake_is_refused(refusing: Running, field: bytes) -> None:
    name = field.partition(b":")[0]
    wrong = b"".join(
        line for line in UPGRADE.splitlines(keepends=True) if not line.startswith(name)
    )
    head = b"GET /v1/runs/x/ws HTTP/1.1\r\n" + HOST
    problem(await sent(refusing, head + wrong + field + b"\r\n"), 400, "bad_handshake")
    problem(await sent(refusing, head + wrong + b"\r\n"), 400, "bad_handshake")


async def test_a_head_in_pieces_is_read_and_its_size_is_bounded(
    refusing: Running,
) -> None:
    good = b"GET /healthz HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
    pieces = [good[place : place + 1] for place in range(len(good))]
    assert (await sent(refusing, *pieces)).startswith(b"HTTP/1.1 200 ")
    endless = [b"GET / HTTP/1.1\r\nx: ", *[b"y" * 1000] * 100]
    problem(await sent(refusing, *endless), 431, "headers_too_large")


async def test_trailers_are_bounded(refusing: Running) -> None:
    head = b"POST /v1/agents HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
    many = b"0\r\n" + b"x: y\r\n" * 200 + b"\r\n"
    problem(await sent(refusing, head + many), 431, "headers_too_large")
    long = b"0\r\nx: " + b"y" * 10**6
    problem(await sent(refusing, head + long), 431, "headers_too_large")


async def test_pipelined_requests_are_bounded(refusing: Running) -> None:
    request = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    answer = await sent(refusing, request * 1000)
    assert answer.count(b"HTTP/1.1 ") <= connections.MAX_PIPELINED
    pipelined = request * 5 + request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert (await sent(refusing, pipelined)).count(b"HTTP/1.1 200 ") == 6


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([b"GET /heal"], "request_timeout"),
        ([b"GET /healthz HTTP/1.1\r\n" + HOST], "request_timeout"),
        (
            [b"POST /v1/agents HTTP/1.1\r\n" + HOST + b"content-length: 9\r\n\r\n", b"{"],
            "request_timeout",
        ),
        (
            [b"POST /v1/agents HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n2\r\n{"],
            "request_timeout",
        ),
    ],
)
async def test_an_unfinished_request_is_cut_off(
    hasty: Running, pieces: list[bytes], code: str
) -> None:
    problem(await sent(hasty, *pieces), 408, code)
    assert (await hasty.client.get("/v1/agents")).json()["items"] == []


async def test_a_silent_connection_is_closed(hasty: Running) -> None:
    assert await sent(hasty) == b""
    assert await sent(hasty, b"\r\n") == b""


@pytest.mark.parametrize(("then", "answer"), [(b"\r\n", b""), (b"GET /heal", b"HTTP/1.1 408 ")])
async def test_an_idle_connection_is_closed_after_an_answer(
    hasty: Running, then: bytes, answer: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n")
    await reader.readuntil(b'{"status":"ok"}')
    writer.write(then)
    said = await reader.read()
    assert said[:13] == answer
    writer.close()


async def test_a_stream_may_last_longer_than_the_request_timeout(
    hasty: Running,
) -> None:
    await hasty.client.post("/v1/agents", json={"name": "a", "system_message": "x"})
    run = (await hasty.client.post("/v1/runs", json={"agent": "a", "input": "x"})).json()["id"]
    head = {"accept": "text/event-stream"}
    async with hasty.client.stream("GET", f"/v1/runs/{run}/events", headers=head) as answer:
        assert answer.status_code == 200
        later = await asyncio.gather(*(sent(hasty, b"GET /") for _ in range(3)))
        assert all(b"408" in one for one in later)  # three times the timeout has passed
        await hasty.client.post(f"/v1/runs/{run}/cancel")
        assert "run.cancelled" in "".join([piece async for piece in answer.aiter_text()])


async def test_connections_over_the_limit_are_refused(
    settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.outgoing.MAX_CONNECTIONS", 2)
    few = settings.model_copy(update={"trusted_proxies": ["127.0.0.0/8"]})
    async with running(few, database_url) as server:
        open_ = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        for reader, writer in open_:
            writer.write(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n")
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        answer = await sent(server)
        problem(answer, 503, "too_many_connections")
        assert b"retry-after: 1" in answer
        for reader, writer in open_:
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await server.client.get("/healthz")).status_code == 200


CACHED = ("/v1/", "/docs", "/openapi.json")
"""Starts of paths whose answers say if they may be cached."""


def said(answer: httpx2.Response, path: str) -> dict[str, Any]:
    """Return the headers meant for browsers, after checking that each is there once."""
    names = [name.lower() for name, _ in answer.headers.multi_items()]
    for name in (*SECURITY, "cache-control"):
        assert names.count(name) == (name != "cache-control" or path.startswith(CACHED)), name
    assert "server" not in names
    assert "x-powered-by" not in names
    return {name: answer.headers[name] for name in SECURITY}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 200),
        ("GET", "/readyz", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/v1/agents", 200),
        ("GET", "/v1/agents/nobody", 404),
        ("GET", "/nowhere", 404),
        ("PUT", "/v1/runs", 405),
        ("POST", "/v1/runs", 415),
    ],
)
async def test_every_answer_has_the_security_headers(
    refusing: Running, method: str, path: str, status: int
) -> None:
    answer = await refusing.client.request(method, path)
    assert answer.status_code == status
    assert said(answer, path) == SECURITY
    cache = {"/v1/": "no-store", "/openapi.json": "no-cache"}
    wanted = next((said for start, said in cache.items() if path.startswith(start)), None)
    assert answer.headers.get("cache-control") == wanted


async def test_refusals_before_routing_have_the_security_headers(
    refusing: Running,
) -> None:
    foreign = await refusing.client.get("/v1/agents", headers={"host": "evil.example"})
    long = await refusing.client.post("/v1/agents", content=b"x" * 2_000_000)
    assert (foreign.status_code, long.status_code) == (403, 413)
    assert said(foreign, "/v1/agents") == said(long, "/v1/agents") == SECURITY


async def test_an_internal_error_has_the_security_headers_and_no_details(server_: Running) -> None:
    client = server_.client
    await server_.owner.execute("DROP TABLE schedules")
    answer = await client.get("/v1/schedules")
    assert answer.status_code == 500
    assert said(answer, "/v1/schedules") == SECURITY
    assert "schedules" not in answer.text


async def test_the_documentation_may_run_its_own_scripts_only(refusing: Running) -> None:
    answer = await refusing.client.get("/docs")
    policy = said(answer, "/docs")["content-security-policy"]
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    assert "'sha256-" in policy
    assert "frame-ancestors 'none'" in policy


PAGE = "https://app.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,idempotency-key",
}


async def test_other_origins_get_no_cors_headers(refusing: Running) -> None:
    answer = await refusing.client.options("/v1/agents", headers=PREFLIGHT)
    assert answer.status_code >= 400
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_configured_origins_get_cors_headers(settings: Settings, database_url: str) -> None:
    open_ = settings.model_copy(update={"cors_origins": [PAGE]})
    async with running(open_, database_url) as server:
        client = server.client
        asked = await client.options("/v1/agents", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        allowed = asked.headers["access-control-allow-headers"].lower()
        assert {"authorization", "idempotency-key", "if-match"} <= set(allowed.split(", "))
        assert SECURITY.items() <= dict(asked.headers).items()

        page = {"origin": PAGE}
        for path, status in (("/v1/agents", 200), ("/v1/agents/nobody", 404), ("/nowhere", 404)):
            answer = await client.get(path, headers=page)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "retry-after" in answer.headers["access-control-expose-headers"].lower()
            assert "access-control-allow-credentials" not in answer.headers
        socket = b"GET /v1/runs/x/ws HTTP/1.1\r\n" + HOST + UPGRADE + b"Origin: %b\r\n\r\n"
        assert b" 422 " in await sent(server, socket % PAGE.encode())
        assert b" 403 " in await sent(server, socket % b"https://evil.example")

        for other in ("https://evil.example", "null", "http://app.example.com"):
            refused = await client.options("/v1/agents", headers=PREFLIGHT | {"origin": other})
            assert refused.status_code == 400
            assert refused.headers["content-type"] == "application/problem+json"
            assert "BOTTEGA_CORS_ORIGINS" in refused.json()["detail"]
            assert "access-control-allow-origin" not in refused.headers
            answer = await client.get("/v1/agents", headers={"origin": other})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["*", "null", "app.example.com", "https://app.example.com/", "https://*.example.com"]
)
def test_an_invalid_origin_is_refused_as_a_setting(origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        Settings(_env_file=None, cors_origins=origin)
    assert Settings(_env_file=None, cors_origins=f"{PAGE}, http://localhost:3000").cors_origins == [
        PAGE,
        "http://localhost:3000",
    ]
