"""Messages to the MCP server that no sound client sends, and how they are refused."""

from collections.abc import Mapping
from typing import Any

import httpx2
import pytest
from pydantic_core import to_json

from bottega.api.schemas.base import MOST_BODY_BYTES
from tests.service import Running

LATEST = "2026-07-28"
META: dict[str, Any] = {
    "io.modelcontextprotocol/protocolVersion": LATEST,
    "io.modelcontextprotocol/clientCapabilities": {},
}
HEADERS = {"mcp-protocol-version": LATEST, "mcp-method": "tools/list"}


def call(method: str = "tools/list", number: Any = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


async def post(
    client: httpx2.AsyncClient, body: Any, headers: Mapping[str, str] = {}
) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else to_json(body)
    sent = {"content-type": "application/json", **headers}
    answer = await client.post("/mcp", content=content, headers=sent)
    return answer.status_code, answer.json() if answer.content else None


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, -32700),
        (b"{", 400, -32700),
        (b"\xff", 400, -32700),
        (b"[" * 100_000, 400, -32700),
        (b'{"a":' * 100_000, 400, -32700),
        (b'{"jsonrpc":"2.0","id":NaN,"method":"ping"}', 400, -32700),
        (b'{"jsonrpc":"2.0","id":"\\ud800","method":"ping"}', 400, -32700),
        (b"7", 400, -32600),
        ([], 400, -32600),
        ([call("ping")] * 10_000, 400, -32600),
        ({"id": 1, "method": "ping"}, 400, -32600),
        (call("ping", None), 400, -32600),
        (call("ping", 1.5), 400, -32600),
        (call("ping", True), 400, -32600),
        (call("ping", 2**64), 400, -32600),
        (b'{"jsonrpc":"2.0","id":%s,"method":"ping"}' % (b"9" * 9000), 400, -32700),
        (call("ping", {}), 400, -32600),
        (call("ping", "x" * 201), 400, -32600),
        (call("ping", "\x00"), 400, -32600),
        ({**call(), "method": 7}, 400, -32600),
        ({**call(), "params": []}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1, "result": []}, 400, -32600),
        ({"jsonrpc": "2.0", "id": "nobody asked", "result": {}}, 400, -32602),
        (call("server/discover"), 200, -32601),
        (call("sampling/createMessage"), 200, -32601),
        (call("x" * 100_000), 200, -32601),
        (call("tools/list", cursor={}), 200, -32602),
        (call("tools/list", cursor="\x00"), 200, -32602),
        (call("tools/call"), 200, -32602),
        (call("tools/call", name="\x00"), 200, -32602),
        (call("tools/call", name=["clerk"]), 200, -32602),
        (call("tools/call", name="x" * 100_000), 200, -32602),
    ],
)
async def test_what_is_no_sound_message_is_refused(
    refusing: Running, body: Any, status: int, code: int
) -> None:
    answered = await post(refusing.client, body)
    assert (answered[0], answered[1]["error"]["code"]) == (status, code), answered
    assert len(answered[1]["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("changed", "meta", "method", "status", "code"),
    [
        ({"mcp-protocol-version": "1999-01-01"}, META, "tools/list", 400, -32020),
        ({"mcp-method": "tools/call"}, META, "tools/list", 400, -32020),
        ({"mcp-method": "=?base64?%%%?="}, META, "tools/list", 400, -32020),
        ({"mcp-protocol-version": "1999-01-01"}, {}, "tools/list", 400, -32022),
        (
            {"mcp-protocol-version": "2030-01-01"},
            {**META, "io.modelcontextprotocol/protocolVersion": "2030-01-01"},
            "tools/list",
            400,
            -32022,
        ),
        ({}, {}, "tools/list", 400, -32602),
        (
            {},
            {"io.modelcontextprotocol/protocolVersion": LATEST},
            "tools/list",
            400,
            -32602,
        ),
        ({"mcp-method": "ping"}, META, "ping", 404, -32601),
        ({"mcp-method": "initialize"}, META, "initialize", 404, -32601),
        ({"mcp-method": "tools/call", "mcp-name": "a"}, META, "tools/call", 400, -32020),
    ],
)
async def test_a_stateless_request_must_say_what_it_is(
    refusing: Running, changed: Any, meta: Any, method: str, status: int, code: int
) -> None:
    body = call(method, name="b", _meta=meta)
    answered = await post(refusing.client, body, {**HEADERS, **changed})
    assert (answered[0], answered[1]["error"]["code"]) == (status, code), answered
    if code == -32022:
        assert LATEST in answered[1]["error"]["data"]["supported"]


@pytest.mark.parametrize(
    "state", [7, "x", "0" * 40, "00000000-0000-0000-0000-000000000000.1", "x" * 100_000]
)
async def test_a_forged_state_goes_on_with_nothing(refusing: Running, state: Any) -> None:
    body = call("tools/call", name="a", requestState=state, inputResponses={}, _meta=META)
    headers = {**HEADERS, "mcp-method": "tools/call", "mcp-name": "a"}
    status, answer = await post(refusing.client, body, headers)
    assert (status, answer["error"]["code"]) == (400, -32602)


async def test_versions_are_agreed_on(refusing: Running) -> None:
    for wanted, agreed in (
        ("2025-06-18", "2025-06-18"),
        ("2030-01-01", "2025-11-25"),
        (None, "2025-11-25"),
    ):
        status, answer = await post(
            refusing.client, call("initialize", protocolVersion=wanted, capabilities={})
        )
        assert (status, answer["result"]["protocolVersion"]) == (200, agreed)


async def test_other_methods_media_types_and_sessions_are_refused(refusing: Running) -> None:
    client = refusing.client
    for method in ("GET", "DELETE"):
        for path in ("/mcp", "/mcp/"):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    plain = {"content-type": "text/plain"}
    assert (await client.post("/mcp", content=b"{}", headers=plain)).status_code == 415
    status, _ = await post(client, call(), {"mcp-session-id": "forged"})
    assert status == 404
    long = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":"%s"}}'
    status, answer = await post(client, long % (b"x" * MOST_BODY_BYTES))
    assert (status, answer["error"]["data"]) == (413, {"code": "body_too_large"})


async def test_pages_of_other_sites_are_refused(refusing: Running) -> None:
    status, answer = await post(refusing.client, call(), {"origin": "https://evil.example"})
    assert (status, answer["error"]["data"]) == (403, {"code": "foreign_request"})
    status, _ = await post(refusing.client, call(), {"host": "evil.example"})
    assert status == 403


async def test_notifications_are_taken_and_change_nothing(refusing: Running) -> None:
    session = {"mcp-session-id": f"asks-{'0' * 32}"}
    for method, params in (
        ("notifications/initialized", {}),
        ("notifications/cancelled", {"requestId": "never"}),
        ("notifications/cancelled", {"requestId": "\x00"}),
        ("notifications/cancelled", {"requestId": {}}),
        ("notifications/unknown", {}),
    ):
        body: Any = {"jsonrpc": "2.0", "method": method, "params": params}
        assert await post(refusing.client, body, session) == (202, None)
