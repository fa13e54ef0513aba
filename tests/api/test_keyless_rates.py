"""Requests without a valid key have a rate per address, while there are keys."""

import asyncio
from collections.abc import AsyncIterator
from ipaddress import ip_network
from typing import Any

import httpx2
import pytest
import websockets

from bottega.api.server.connections import KeylessRates
from bottega.settings import Settings
from bottega.tenants import ratelimit
from tests.service import Running, running
from tests.tenants import ApiKey, holder

SLOW = {"keyless_per_s": 0.01}
"""One request, and another in 100 seconds."""


def scope_of(client: str | None, forwarded: str = "") -> dict[str, Any]:
    headers = [(b"x-forwarded-for", each.encode()) for each in forwarded.split("|") if each]
    return {"client": None if client is None else (client, 1234), "headers": headers}


@pytest.fixture
async def guarded(settings: Settings, database_url: str) -> AsyncIterator[tuple[Running, ApiKey]]:
    """A server that takes one keyless request of an address, and knows somebody's key."""
    somebody = await holder(database_url)
    async with running(settings.model_copy(update=SLOW), database_url) as server:
        async with somebody.client(server) as client:
            assert (await client.get("/v1/info")).status_code == 200
        yield server, somebody


PATHS = ("/", "/docs", "/openapi.json", "/asyncapi.json", "/console/", "/console/icon.svg",
         "/docs-assets/swagger-ui.css", "/v1/info", "/v1/nowhere", "/mcp", "/nowhere")  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_a_second_request_without_a_key_is_refused_with_a_time_to_retry(
    guarded: tuple[Running, ApiKey], path: str
) -> None:
    server, somebody = guarded
    first = await server.client.get(path)
    assert first.status_code != 429
    refused = await server.client.get(path)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 100
    if path != "/mcp":
        assert refused.json()["code"] == "rate_limited"
    assert refused.headers["x-content-type-options"] == "nosniff"
    for _ in range(3):  # nor is it counted
        async with somebody.client(server) as client:
            assert (await client.get(path)).status_code != 429
            assert (await client.get("/v1/info")).status_code == 200


async def test_the_burst_is_four_times_the_rate(settings: Settings, database_url: str) -> None:
    await holder(database_url)
    slow = settings.model_copy(update={"keyless_per_s": 2.0})
    async with running(slow, database_url) as server:
        answers = await asyncio.gather(*(server.client.get("/v1/info") for _ in range(20)))
    statuses = [answer.status_code for answer in answers]
    assert 8 <= statuses.count(401) <= 10  # some time may pass meanwhile
    assert statuses.count(429) == 20 - statuses.count(401)


async def test_health_and_metrics_are_not_counted(guarded: tuple[Running, ApiKey]) -> None:
    server, _ = guarded
    for _ in range(3):
        assert (await server.client.get("/healthz")).status_code == 200
        assert (await server.client.get("/readyz")).status_code == 200
        assert (await server.client.get("/metrics")).status_code == 401
    assert (await server.client.get("/v1/info")).status_code == 401
    assert (await server.client.get("/v1/info")).status_code == 429
    assert (await server.client.get("/healthz")).status_code == 200


PREFLIGHT = {"origin": "https://app.example", "access-control-request-method": "POST"}


@pytest.mark.parametrize("path", ["/v1/runs", "/openai/v1/responses", "/docs"])
async def test_preflights_are_not_counted(guarded: tuple[Running, ApiKey], path: str) -> None:
    server, _ = guarded
    first = await server.client.options(path, headers=PREFLIGHT)
    for _ in range(3):
        again = await server.client.options(path, headers=PREFLIGHT)
        assert again.status_code == first.status_code != 429
    assert (await server.client.get("/v1/info")).status_code == 401
    assert (await server.client.options(path, headers=PREFLIGHT)).status_code != 429


@pytest.mark.parametrize(
    "headers",
    [
        *({name: value} for name, value in PREFLIGHT.items()),
        PREFLIGHT | {"authorization": "Bearer " + "x" * 40},
    ],
)
async def test_other_requests_for_options_are_counted(
    guarded: tuple[Running, ApiKey], headers: dict[str, str]
) -> None:
    server, _ = guarded
    assert (await server.client.options("/v1/runs", headers=headers)).status_code == 401
    assert (await server.client.options("/v1/runs", headers=headers)).status_code == 429


@pytest.mark.parametrize("header", ["Bearer " + "x" * 40, "Bearer short", "Basic eDp5"])
async def test_wrong_keys_count(guarded: tuple[Running, ApiKey], header: str) -> None:
    server, _ = guarded
    wrong = {"authorization": header}
    assert (await server.client.get("/v1/info", headers=wrong)).status_code == 401
    assert (await server.client.get("/v1/info", headers=wrong)).status_code == 429


async def test_above_the_rate_a_known_key_passes_and_no_other_is_looked_up(
    guarded: tuple[Running, ApiKey], database_url: str
) -> None:
    server, somebody = guarded
    newcomer = await holder(database_url, "newcomer")
    async with somebody.client(server) as known, newcomer.client(server) as unknown:
        assert (await server.client.get("/v1/info")).status_code == 401
        async with server.owner.acquire() as owner, owner.transaction():
            await owner.execute("LOCK TABLE api_keys IN ACCESS EXCLUSIVE MODE")
            refused = await unknown.get("/v1/info")
            assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
            wrong = {"authorization": "Bearer " + "x" * 40}
            assert (await server.client.get("/v1/info", headers=wrong)).status_code == 429
        assert (await known.get("/v1/info")).status_code == 200


async def test_wrong_tickets_and_sockets_count(guarded: tuple[Running, ApiKey]) -> None:
    server, _ = guarded
    run = "/v1/runs/0195b7f2-0000-7000-8000-000000000000"
    first = await server.client.get(f"{run}/events?ticket={'x' * 43}")
    assert first.status_code == 401
    assert (await server.client.get(f"{run}/events?ticket={'x' * 43}")).status_code == 429
    for path in (f"{run}/ws", "/docs", "/nowhere"):
        with pytest.raises(websockets.InvalidStatus) as denied:
            await websockets.connect(f"ws://127.0.0.1:{server.port}{path}")
        assert denied.value.response.status_code == 429
        assert denied.value.response.headers["retry-after"]


async def test_without_keys_nothing_is_counted(settings: Settings, database_url: str) -> None:
    async with running(settings.model_copy(update=SLOW), database_url) as server:
        for path in ("/v1/info", "/docs", "/openapi.json") * 2:
            assert (await server.client.get(path)).status_code == 200


async def test_a_program_of_this_machine_cannot_name_another_address(
    guarded: tuple[Running, ApiKey],
) -> None:
    server, _ = guarded

    async def ask(number: int) -> httpx2.Response:
        named = {"x-forwarded-for": f"192.0.2.{number}"}
        return await server.client.get("/docs", headers=named)

    assert [(await ask(number)).status_code for number in range(3)] == [200, 429, 429]


async def test_a_trusted_proxy_names_its_clients(settings: Settings, database_url: str) -> None:
    await holder(database_url)
    behind = settings.model_copy(update={**SLOW, "trusted_proxies": ["127.0.0.1"]})
    async with running(behind, database_url) as server:
        for number, status in ((1, 200), (2, 200), (1, 429), (2, 429), (3, 200)):
            named = {"x-forwarded-for": f"198.51.100.9, 192.0.2.{number}"}
            assert (await server.client.get("/docs", headers=named)).status_code == status


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (scope_of("192.0.2.1"), scope_of("192.0.2.1", "1.2.3.4"), True),
        (scope_of("192.0.2.1"), scope_of("192.0.2.2"), False),
        (scope_of("2001:db8::1"), scope_of("2001:db8::2:3"), True),
        (scope_of("2001:db8::1"), scope_of("2001:db8:0:1::1"), False),
        (scope_of("::ffff:192.0.2.1"), scope_of("192.0.2.1"), True),
        (scope_of("::ffff:192.0.2.1"), scope_of("::ffff:192.0.2.2"), False),
        (scope_of("fe80::1%eth0"), scope_of("fe80::2%eth1"), True),
        (scope_of("10.0.0.1", "192.0.2.1"), scope_of("192.0.2.1"), True),
        (scope_of("10.0.0.1", "192.0.2.1"), scope_of("10.0.0.1", "192.0.2.2"), False),
        # What stands before the last address that is not a proxy's is the client's own word.
        (scope_of("10.0.0.1", "7.7.7.7, 192.0.2.1"), scope_of("192.0.2.1"), True),
        (scope_of("10.0.0.1", "7.7.7.7|192.0.2.1, 10.0.0.2"), scope_of("192.0.2.1"), True),
        (scope_of("10.0.0.1", "192.0.2.1:4711"), scope_of("192.0.2.1"), True),
        (scope_of("10.0.0.1", "[2001:db8::1]:80"), scope_of("2001:db8::9"), True),
        (scope_of("10.0.0.1", "2001:db8::1"), scope_of("2001:db8::9"), True),
        (scope_of("10.0.0.1", "unknown"), scope_of("10.0.0.1"), True),
        (scope_of("10.0.0.1"), scope_of("10.0.0.1", "nonsense,"), True),
        (scope_of("10.0.0.1", "192.0.2.1" + ", 10.0.0.2" * 900), scope_of("10.0.0.2"), True),
        (scope_of(None), scope_of(None, "192.0.2.1"), True),
    ],
)
def test_addresses_that_count_as_one_client(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    rates = KeylessRates(0.01, [ip_network("10.0.0.0/8")], clock=lambda: 0.0)
    assert rates.take(one).allowed
    assert rates.take(other).allowed is not same


def test_few_addresses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratelimit, "_MOST_CLIENTS", 3)
    rates = KeylessRates(0.01, [], clock=lambda: 0.0)
    for number in (1, 2, 3):
        assert rates.take(scope_of(f"192.0.2.{number}")).allowed
    assert not rates.take(scope_of("192.0.2.1")).allowed  # asked last, so it stays
    assert rates.take(scope_of("192.0.2.4")).allowed
    assert not rates.take(scope_of("192.0.2.1")).allowed
    assert rates.take(scope_of("192.0.2.2")).allowed
    assert len(rates._limits._paid_at) == 3
