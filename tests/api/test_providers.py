"""Providers (model servers) over HTTP."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from pydantic_core import to_json

from bottega.settings import Settings
from bottega.settings.providers import OperatorProvider
from tests.claims import report
from tests.service import Running, running
from tests.tenants import holder

PUBLIC = "https://203.0.114.7/v1"
"""An address that is public, so that no name is looked up; nothing connects to it."""


def provider(name: str = "vendor", **fields: Any) -> dict[str, Any]:
    return {"name": name, "dialect": "chat", "base_url": PUBLIC} | fields


@pytest.fixture
async def server(settings: Settings, database_url: str) -> AsyncIterator[Running]:
    """A server whose operator has a provider, and bound a secret to hosts."""
    own = OperatorProvider(name="house", dialect="anthropic", base_url="http://10.0.0.9")
    configured = settings.model_copy(
        update={
            "providers": [own],
            "secret_hosts": {"BOUND": ["203.0.114.7"], "ACME__BOUND": ["203.0.114.8"]},
            "egress_allow": ["10.1.0.0/16"],
        }
    )
    async with running(configured, database_url) as server:
        yield server


async def test_a_provider_is_created_read_replaced_and_deleted(server: Running) -> None:
    client = server.client
    body = provider(
        key={"secret": "BOUND"},
        headers={"x-team": "a", "x-other-key": {"secret": "BOUND"}},
        models=["m", "n/o"],
        max_concurrent=5,
        requests_per_minute=60,
        tokens_per_minute=1000,
        timeout_s=3,
        prices={"m": {"input": 1, "output": 2.5}},
        structured_output="tool",
        max_tokens_field="max_tokens",
    )
    created = await client.post("/v1/providers", json=body)
    assert created.status_code == 201, created.text
    assert created.headers["location"] == "/v1/providers/vendor"
    assert created.headers["etag"] == '"1"'
    shown = created.json()
    assert (shown["version"], shown["owner"]) == (1, "tenant")
    assert {key: shown[key] for key in body if key != "prices"} == {
        key: value for key, value in body.items() if key != "prices"
    }
    assert shown["prices"] == {"m": {"input": 1, "cached": None, "output": 2.5}}
    read = await client.get("/v1/providers/vendor")
    assert read.json().items() >= shown.items()
    assert read.headers["etag"] == '"1"'

    stale = await client.put("/v1/providers/vendor", json=body, headers={"If-Match": '"7"'})
    assert stale.status_code == 412
    replaced = await client.put("/v1/providers/vendor", json=body | {"dialect": "gemini"})
    assert (replaced.status_code, replaced.headers["etag"]) == (200, '"2"')
    other_name = await client.put("/v1/providers/vendor", json=provider("another"))
    assert other_name.status_code == 422
    versions = (await client.get("/v1/providers/vendor/versions")).json()["items"]
    assert [item["version"] for item in versions] == [1, 2]
    first = await client.get("/v1/providers/vendor/versions/1")
    assert first.json() == shown
    names = [item["name"] for item in (await client.get("/v1/providers")).json()["items"]]
    assert names == ["default", "house", "vendor"]
    assert (await client.delete("/v1/providers/vendor")).status_code == 204
    assert (await client.get("/v1/providers/vendor")).status_code == 404
    noted = (await client.get("/v1/audit")).json()["items"]
    actions = [(row["action"], row["target"], row["details"]) for row in noted]
    assert sorted(actions, key=str) == [
        ("provider.create", "vendor", {"version": 1}),
        ("provider.delete", "vendor", {}),
        ("provider.replace", "vendor", {"version": 2}),
    ]


async def test_a_provider_of_the_operators_is_shown_without_its_settings(server: Running) -> None:
    shown = (await server.client.get("/v1/providers/house")).json()
    assert (shown["owner"], shown["version"], shown["dialect"]) == ("operator", 0, "anthropic")
    assert shown["base_url"] is None
    assert (await server.client.delete("/v1/providers/house")).status_code == 404
    assert "etag" not in (await server.client.get("/v1/providers/house")).headers
    own = await server.client.put("/v1/providers/house", json=provider("house"))
    assert own.status_code == 201
    assert (await server.client.get("/v1/providers/house")).json()["owner"] == "tenant"


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_have_the_operator_s_providers_at_their_places(
    server: Running, order: str
) -> None:
    for name in ("alpha", "house", "gamma", "zeta"):
        await server.client.post("/v1/providers", json=provider(name))
    found: list[tuple[str, str]] = []
    query = {"limit": "2", "order": order}
    while True:
        page = (await server.client.get("/v1/providers", params=query)).json()
        assert 1 <= len(page["items"]) <= 2
        found += [(item["name"], item["owner"]) for item in page["items"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    names = ["alpha", "default", "gamma", "house", "zeta"]
    assert [name for name, _ in found] == (names if order == "asc" else names[::-1])
    assert [name for name, owner in found if owner == "operator"] == ["default"]


async def test_a_provider_shows_breakers_and_calls_of_its_own_tenant_only(
    server: Running, database_url: str
) -> None:
    other, mine = await holder(database_url, "acme"), await holder(database_url, "mine")
    soon = datetime.now(UTC) + timedelta(minutes=1)

    def calls(name: str, breakers: dict[str, str], *, of_operator: bool = False) -> dict[str, Any]:
        states = [
            {"model": model, "state": state, "retry_at": soon} for model, state in breakers.items()
        ]
        counts = {"under_way": 2, "waiting": 3, "oldest_at": soon}
        return {"provider": name, "is_operators": of_operator, "breakers": states, **counts}

    await report(server.owner, uuid4())
    loads = {
        mine.tenant_id: {
            "models": [
                calls("vendor", {"m": "open", "n": "half_open"}),
                calls("vendor", {"o": "open"}, of_operator=True),
            ]
        },
        other.tenant_id: {"models": [calls("house", {"secret": "open"}, of_operator=True)]},
    }
    await server.owner.execute("UPDATE workers SET tenants = $1", to_json(loads).decode())
    async with mine.client(server) as client:
        await client.post("/v1/providers", json=provider(models=["m", "p"]))
        shown = (await client.get("/v1/providers/vendor")).json()
        operators = (await client.get("/v1/providers/house")).json()
        health = (await client.get("/v1/provider-health")).json()["items"]
    assert [each["name"] for each in health] == ["default", "house", "vendor"]
    for one, listed in ((operators, health[1]), (shown, health[2])):
        assert listed == {name: one[name] for name in ("name", "breaker", "calls", "recent")}
    states_of = {model: each["state"] for model, each in shown["breaker"].items()}
    assert states_of == {"m": "open", "n": "half_open", "p": "closed"}
    assert shown["breaker"]["p"]["retry_at"] is None
    assert datetime.fromisoformat(shown["breaker"]["n"]["retry_at"]) == soon
    counts = {name: shown["calls"][name] for name in ("under_way", "waiting")}
    assert counts == {"under_way": 2, "waiting": 3}
    assert datetime.fromisoformat(shown["calls"]["oldest_at"]) == soon
    none = {"under_way": 0, "oldest_at": None, "waiting": 0}
    assert (operators["breaker"], operators["calls"]) == ({}, none)


async def test_no_transaction_is_open_while_an_address_is_looked_up(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = []

    async def slow(host: str, port: int) -> list[str]:
        query = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        open_.append(await server.owner.fetchval(query))
        return ["203.0.114.7"]

    monkeypatch.setattr(server.service.outgoing.egress.lookups, "_resolve", slow)
    named = provider(base_url="https://models.example.com/v1")
    assert (await server.client.post("/v1/providers", json=named)).status_code == 201
    again = {key: value for key, value in named.items() if key != "name"}
    assert (await server.client.put("/v1/providers/vendor", json=again)).status_code == 200
    assert open_ == [0, 0]


@pytest.mark.parametrize(
    ("fields", "code", "pointer"),
    [
        ({"key": "sk-1234567890"}, "secret_in_clear", "/key"),
        ({"key": {"value": "sk-1234567890"}}, "secret_in_clear", "/key"),
        ({"headers": {"Authorization": "Bearer x"}}, "secret_in_clear", "/headers"),
        ({"headers": {"x-goog-api-key": "x"}}, "secret_in_clear", "/headers"),
        ({"base_url": "https://user:pass@203.0.114.7/v1"}, "secret_in_clear", "/base_url"),
        ({"base_url": "http://127.0.0.1:8000/v1"}, "egress_forbidden", "/base_url"),
        ({"base_url": "http://localhost:8000/v1"}, "egress_forbidden", "/base_url"),
        ({"base_url": "http://169.254.169.254/v1"}, "egress_forbidden", "/base_url"),
        ({"base_url": "http://[::ffff:10.0.0.1]/v1"}, "egress_forbidden", "/base_url"),
        (
            {"base_url": "https://203.0.114.9/v1", "key": {"secret": "BOUND"}},
            "secret_not_for_host",
            "/key",
        ),
        ({"base_url": "ftp://203.0.114.7"}, "invalid", "/base_url"),
        ({"base_url": "https://203.0.114.7/v1?key=x"}, "invalid", "/base_url"),
        ({"dialect": "chat_completions"}, "invalid", "/dialect"),
        ({"max_concurrent": 0}, "invalid", "/max_concurrent"),
        ({"models": []}, "invalid", "/models"),
        ({"headers": {"host": "x"}}, "invalid", "/headers"),
        ({"prices": {"m": {"input": -1, "output": 1}}}, "invalid", "/prices/m/input"),
        ({"secret": "x"}, "invalid", "/secret"),
    ],
)
async def test_an_invalid_provider_is_refused(
    server: Running, fields: dict[str, Any], code: str, pointer: str
) -> None:
    answer = await server.client.post("/v1/providers", json=provider(**fields))
    assert answer.status_code == 422
    problem = answer.json()
    assert (problem["code"], problem["errors"][0]["pointer"]) == (code, pointer)
    assert "sk-1234567890" not in answer.text


async def test_private_addresses_that_the_operator_allows_are_accepted(server: Running) -> None:
    allowed = provider(base_url="http://10.1.2.3:8000/v1")
    assert (await server.client.post("/v1/providers", json=allowed)).status_code == 201


async def test_with_keys_a_secret_needs_hosts_of_its_own_tenant(
    server: Running, database_url: str
) -> None:
    async with (await holder(database_url, "acme")).client(server) as client:
        codes = {}
        for secret, host in (("FREE", 7), ("BOUND", 7), ("BOUND", 8)):
            body = provider(base_url=f"https://203.0.114.{host}/v1", key={"secret": secret})
            answer = await client.post("/v1/providers", json=body)
            codes[secret, host] = answer.json().get("code", answer.status_code)
    assert codes == {
        ("FREE", 7): "secret_host_unset",
        ("BOUND", 7): "secret_not_for_host",
        ("BOUND", 8): 201,
    }


async def test_providers_need_the_scopes_of_agents(server: Running, database_url: str) -> None:
    reader = await holder(database_url, "acme", scope="read")
    runner = await holder(database_url, "acme", scope="run")
    definer = await holder(database_url, "acme", scope="define")
    async with reader.client(server) as reading, definer.client(server) as defining:
        for held in (reader, runner):
            async with held.client(server) as refused:
                answer = await refused.post("/v1/providers", json=provider())
                assert answer.json()["code"] == "insufficient_scope"
        assert (await defining.post("/v1/providers", json=provider())).status_code == 201
        assert (await reading.get("/v1/providers/vendor")).status_code == 200
    async with (await holder(database_url, "other")).client(server) as other:
        assert (await other.get("/v1/providers/vendor")).status_code == 404


async def test_a_repeated_post_with_one_key_creates_one_provider(server: Running) -> None:
    headers = {"Idempotency-Key": "one"}
    answers: list[httpx2.Response] = [
        await server.client.post("/v1/providers", json=provider(), headers=headers)
        for _ in range(2)
    ]
    assert [each.status_code for each in answers] == [201, 201]
    assert answers[0].json() == answers[1].json()


async def test_a_cost_budget_needs_a_price_of_each_model(server: Running) -> None:
    prices = {"m": {"input": 1, "output": 1}}
    await server.client.post(
        "/v1/providers", json=provider("own", prices=prices, models=["m", "n"])
    )
    await server.client.post("/v1/providers", json=provider("free"))
    budget = {"amount": "0.50", "currency": "USD"}
    codes = []
    for number, model in enumerate(
        ("gpt-5-mini", "own/m", None, "own/n", ["own/m", "free/x"], "unheard-of-model", "house/m")
    ):
        agent = {"name": f"a{number}", "system_message": "x", "model": model}
        assert (await server.client.post("/v1/agents", json=agent)).status_code == 201
        run = {"agent": f"a{number}", "input": "x"}
        assert (await server.client.post("/v1/runs", json=run)).status_code == 202
        answer = await server.client.post("/v1/runs", json=run | {"cost_budget": budget})
        codes.append(answer.json().get("code", 202))
    assert codes == [202, 202, 202, *["unpriced_model"] * 4]
