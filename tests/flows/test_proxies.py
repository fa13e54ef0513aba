"""Without keys the server refuses what came through a proxy, or from a page of another site."""

import asyncio
from typing import Any

import httpx2
import pytest
import websockets

from bottega.settings import Settings
from tests.service import Running, running
from tests.tenants import holder

PASSED_ON: tuple[dict[str, str], ...] = (
    {"x-forwarded-for": "203.0.113.7"},
    {"x-forwarded-host": "bottega.example.com"},
    {"x-forwarded-proto": "https"},
    {"x-forwarded-port": "443"},
    {"X-Forwarded-For": ""},
    {"forwarded": "for=203.0.113.7"},
    {"via": "1.1 proxy"},
    {"cf-connecting-ip": "203.0.113.7"},
    {"x-real-ip": "127.0.0.1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
    {"host": "bottega.example.com", "x-forwarded-proto": "https"},
)
PATHS = (
    *("/v1/runs", "/v1/info", "/openai/v1/models", "/mcp", "/mcp/", "/", "/docs", "/openapi.json"),
    *("/asyncapi.json", "/console", "/console/", "/console/js/app.js", "/metrics", "/nowhere"),
    "/docs-assets/swagger-ui.css",
)
NAVIGATES = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
SOCKET = "/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434/ws"


@pytest.fixture(scope="module")
async def open_server(module_settings: Settings, module_database_url: str) -> Any:
    async with running(module_settings, module_database_url) as server:
        yield server


def is_refused(answer: httpx2.Response) -> bool:
    """Return true if an answer tells how to make a key."""
    if answer.status_code != 403 or "keys_required" not in answer.text:
        return False
    assert "bottega keys create" in answer.text
    return True


@pytest.mark.parametrize("headers", PASSED_ON)
async def test_what_a_proxy_passed_on_is_refused(
    open_server: Running, headers: dict[str, str]
) -> None:
    for path in PATHS:
        assert is_refused(await open_server.client.get(path, headers=headers)), path
    for path in ("/v1/runs", "/openai/v1/chat/completions", "/mcp"):
        assert is_refused(await open_server.client.post(path, json={}, headers=headers)), path
    for path in ("/healthz", "/readyz"):
        local = {name: value for name, value in headers.items() if name != "host"}
        assert (await open_server.client.get(path, headers=local)).status_code == 200
    if "host" not in headers:
        url = f"ws://127.0.0.1:{open_server.port}{SOCKET}"
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url, additional_headers=headers)
        assert refused.value.response.status_code == 403
        assert b"keys_required" in (refused.value.response.body or b"")


async def test_a_link_of_another_site_may_open_the_console_s_pages(open_server: Running) -> None:
    for path in ("/", "/console", "/console/"):
        answer = await open_server.client.get(path, headers=NAVIGATES | {"accept": "text/html"})
        assert answer.status_code in (200, 307), (path, answer.text)
        also = NAVIGATES | {"x-forwarded-proto": "https"}
        assert is_refused(await open_server.client.get(path, headers=also)), path
    for path in ("/v1/runs", "/docs", "/openapi.json", "/console/js/app.js"):
        assert is_refused(await open_server.client.get(path, headers=NAVIGATES)), path
    assert is_refused(await open_server.client.post("/console/", headers=NAVIGATES))


async def test_requests_of_this_machine_are_answered(open_server: Running) -> None:
    for site in ("same-origin", "same-site", "none"):
        headers = {"sec-fetch-site": site, "sec-fetch-mode": "cors"}
        assert (await open_server.client.get("/v1/runs", headers=headers)).status_code == 200


async def test_with_a_key_a_proxy_is_welcome(settings: Settings, database_url: str) -> None:
    async with running(settings, database_url) as server:
        assert is_refused(await server.client.get("/v1/runs", headers=PASSED_ON[0]))
        key = await holder(database_url)
        async with key.client(server) as client, asyncio.timeout(30):
            while (found := await client.get("/v1/runs", headers=PASSED_ON[0])).status_code == 403:
                assert is_refused(found), "this process has not heard of the key yet"
        assert found.status_code == 200
        assert (await server.client.get("/v1/runs", headers=PASSED_ON[0])).status_code == 401


async def test_a_new_process_asks_whether_there_are_keys(
    settings: Settings, database_url: str
) -> None:
    key = await holder(database_url)
    async with running(settings, database_url) as server, key.client(server) as client:
        found = await client.get("/v1/runs", headers={"x-forwarded-host": "bottega.example.com"})
        assert found.status_code == 200
