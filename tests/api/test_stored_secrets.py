"""Secrets over HTTP: stored, listed, replaced and deleted, and never shown."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from pydantic import SecretStr, ValidationError

from bottega.errors import InvalidInputError
from bottega.secrets import rows
from bottega.settings import Settings
from bottega.tools.secrets import TenantSecrets
from tests.flows.test_secrets import everything
from tests.service import Running, running
from tests.tenants import holder

KEY = b64encode(bytes(32)).decode()
VALUE = "Bearer tok-1234567890"
SECRET = {"value": VALUE, "hosts": ["api.example.com", "203.0.114.7"]}
TOOL = {"type": "http", "name": "look", "description": "Looks."}


@pytest.fixture(scope="module")
async def sealing(module_settings: Settings, module_database_url: str) -> AsyncIterator[Running]:
    """A server that stores secrets, and whose operator has bound one to hosts."""
    update = {
        "secrets_key": SecretStr(KEY),
        "secret_hosts": {"OPERATORS": ["203.0.114.7"]},
        "egress_allow": ["127.0.0.1"],
    }
    configured = module_settings.model_copy(update=update)
    async with running(configured, module_database_url) as server:
        yield server


@pytest.fixture
async def client(sealing: Running, module_database_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    """An administrator of a tenant that only this test has."""
    held = await holder(module_database_url, f"tenant-{uuid4().hex}")
    async with held.client(sealing) as client:
        yield client


async def put(client: httpx2.AsyncClient, name: str = "KEY", **fields: Any) -> httpx2.Response:
    return await client.put(f"/v1/secrets/{name}", json=SECRET | fields)


async def test_a_secret_is_stored_replaced_and_deleted_and_never_shown(
    client: httpx2.AsyncClient, module_database_url: str
) -> None:
    made = await put(client)
    assert (made.status_code, made.headers["etag"]) == (201, '"1"')
    assert made.headers["location"] == "/v1/secrets/KEY"
    assert set(made.json()) == {"name", "version", "hosts", "created_at", "updated_at"}
    replaced = await put(client, hosts=["api.example.com.", "0:0::1"])
    assert (replaced.status_code, replaced.headers["etag"]) == (200, '"2"')
    assert replaced.json()["hosts"] == ["api.example.com", "::1"]
    read = await client.get("/v1/secrets/KEY")
    assert (read.json(), read.headers["etag"]) == (replaced.json(), '"2"')
    await put(client, "A")
    listed = await client.get("/v1/secrets?limit=1")
    assert [item["name"] for item in listed.json()["items"]] == ["A"]
    after = await client.get("/v1/secrets", params={"cursor": listed.json()["next_cursor"]})
    assert [item["name"] for item in after.json()["items"]] == ["KEY"]
    gone = await client.delete("/v1/secrets/KEY")
    assert gone.status_code == 204
    assert (await client.get("/v1/secrets/KEY")).status_code == 404
    assert (await client.delete("/v1/secrets/KEY")).status_code == 404
    noted = (await client.get("/v1/audit")).json()["items"][1:]  # the first made the key
    actions = [(row["action"], row["target"], row["details"]) for row in noted]
    assert actions == [
        ("secret.put", "KEY", {"version": 1, "hosts": SECRET["hosts"]}),
        ("secret.put", "KEY", {"version": 2, "hosts": ["api.example.com", "::1"]}),
        ("secret.put", "A", {"version": 1, "hosts": SECRET["hosts"]}),
        ("secret.delete", "KEY", {"version": 2}),
    ]
    assert {row["actor"][:4] for row in noted} == {"key:"}
    # A new secret of a deleted name goes on counting: nothing old is taken for it.
    assert (await put(client)).json()["version"] == 3
    answers = [made, replaced, read, listed, after, await client.get("/v1/audit")]
    held = "".join(answer.text for answer in answers) + await everything(module_database_url)
    assert "tok-1234567890" not in held
    assert b64encode(b"tok-1234567890").decode()[:-4] not in held


async def test_a_change_of_another_version_is_refused(client: httpx2.AsyncClient) -> None:
    await put(client)

    async def status(method: str, tag: str, name: str = "KEY") -> int:
        body = SECRET if method == "PUT" else None
        headers = {"If-Match": tag}
        return (
            await client.request(method, f"/v1/secrets/{name}", headers=headers, json=body)
        ).status_code

    assert await status("PUT", '"2"') == 412
    assert await status("PUT", '"0"') == 412
    assert await status("DELETE", '"0"') == 412
    assert await status("DELETE", '"2"') == 412
    assert await status("PUT", '"1"', "OTHER") == 412
    assert await status("PUT", '"1"') == 200
    assert await status("PUT", "*") == 200
    assert await status("DELETE", '"3"') == 204
    assert await status("PUT", '"3"') == 412


async def test_changes_at_the_same_time_get_different_versions(client: httpx2.AsyncClient) -> None:
    answers = await asyncio.gather(*(put(client) for _ in range(8)))
    assert sorted(answer.json()["version"] for answer in answers) == list(range(1, 9))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"value": "1234567"}, "/value"),
        ({"value": "Bearer 1234567"}, "/value"),
        ({"value": "x" * 4097}, "/value"),
        ({"value": "12345678\r\nX-Evil: 1"}, "/value"),
        ({"value": "sekr\u00e9t-1234567890"}, "/value"),
        ({"value": " 1234567890"}, "/value"),
        ({"value": "five words are too many-1234567890"}, "/value"),
        ({"value": 1234567890}, "/value"),
        ({"value": ["1234567890"]}, "/value"),
        ({"hosts": []}, "/hosts"),
        ({"hosts": ["https://api.example.com"]}, "/hosts/0"),
        ({"hosts": ["api.example.com:443"]}, "/hosts/0"),
        ({"hosts": ["*.example.com"]}, "/hosts/0"),
        ({"hosts": ["API.example.com"]}, "/hosts/0"),
        ({"hosts": ["0x7f.1"]}, "/hosts/0"),
        ({"hosts": ["a.example"] * 21}, "/hosts"),
        ({"note-1234567890": 1}, "/note-1234567890"),
    ],
)
async def test_an_invalid_secret_is_refused_without_being_shown(
    client: httpx2.AsyncClient, fields: dict[str, Any], pointer: str
) -> None:
    answer = await put(client, **fields)
    problem = answer.json()
    assert (answer.status_code, problem["errors"][0]["pointer"]) == (422, pointer)
    shown = answer.text.replace(pointer, "")
    assert "1234567" not in shown
    assert "tok-" not in shown
    broken = await client.put(
        "/v1/secrets/KEY",
        content=b'{"value": "tok-1234567890", "hosts": [',
        headers={"content-type": "application/json"},
    )
    assert (broken.status_code, "tok-" in broken.text) == (400, False)


@pytest.mark.parametrize("name", ["lower", "A__B", "_A", "A" * 65, "A-B", "1A"])
async def test_an_invalid_name_is_refused(client: httpx2.AsyncClient, name: str) -> None:
    assert (await put(client, name)).status_code == 422


async def test_a_tenant_has_a_limited_number_of_secrets(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_SECRETS", 2)
    monkeypatch.setattr(rows, "MOST_NAMES", 3)
    assert [(await put(client, name)).status_code for name in "AABC"] == [201, 200, 201, 409]
    await client.delete("/v1/secrets/A")
    assert (await put(client, "C")).status_code == 201
    await client.delete("/v1/secrets/B")
    full = await put(client, "D")
    assert (full.status_code, full.json()["code"]) == (409, "too_many")
    assert (await put(client, "A")).status_code == 201


async def test_keys_that_may_not_define_only_list(
    sealing: Running, module_database_url: str
) -> None:
    tenant = f"tenant-{uuid4().hex}"
    author = await holder(module_database_url, tenant, "define")
    reader = await holder(module_database_url, tenant, "read", "run", "approve")
    async with author.client(sealing) as defining, reader.client(sealing) as reading:
        assert (await put(reading)).status_code == 403
        assert (await put(defining)).status_code == 201
        assert (await reading.delete("/v1/secrets/KEY")).status_code == 403
        assert (await reading.get("/v1/secrets/KEY")).status_code == 200
        assert (await defining.delete("/v1/secrets/KEY")).status_code == 204


async def test_without_a_key_the_routes_say_what_to_set(
    settings: Settings, database_url: str
) -> None:
    async with running(settings, database_url) as server:
        answers = [
            await put(server.client),
            await server.client.get("/v1/secrets"),
            await server.client.get("/v1/secrets/KEY"),
            await server.client.delete("/v1/secrets/KEY"),
        ]
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (409, "no_secrets_key")
        assert "BOTTEGA_SECRETS_KEY" in answer.json()["detail"]


@pytest.mark.parametrize("key", ["x", "A" * 43, f"{KEY},{KEY}", b64encode(bytes(16)).decode()])
def test_a_wrong_key_is_refused_at_the_start_without_being_shown(key: str) -> None:
    with pytest.raises(ValidationError, match="openssl rand -base64 32") as refused:
        Settings(_env_file=None, secrets_key=SecretStr(key))
    assert len(key) < 8 or key not in str(refused.value)


async def test_a_tool_and_a_provider_name_hosts_of_their_secrets_only(
    client: httpx2.AsyncClient,
) -> None:
    await put(client, "OWN", hosts=["203.0.114.8", "127.0.0.1", "localhost"])
    codes = {}
    for name, url in (
        ("OWN", "https://203.0.114.8/x"),
        ("OWN", "https://203.0.114.9/x"),
        ("OWN", "http://203.0.114.8/x"),
        ("OWN", "http://127.0.0.1:9/x"),
        ("OWN", "http://localhost:9/x"),
        ("MISSING", "https://203.0.114.8/x"),
        ("OPERATORS", "https://203.0.114.7/x"),  # it is of the tenant `default`
    ):
        headers = {"x-key": {"secret": name}}
        agent: dict[str, Any] = {"name": f"a-{uuid4().hex[:8]}", "system_message": "x"}
        agent |= {"tools": [TOOL | {"url": url, "headers": headers}]}
        provider = {"name": f"p-{uuid4().hex[:8]}", "dialect": "chat", "base_url": url}
        answers = [
            (await client.post("/v1/agents", json=agent), "/tools/0/headers/x-key"),
            (
                await client.post("/v1/providers", json=provider | {"headers": headers}),
                "/headers/x-key",
            ),
            (await client.post("/v1/providers", json=provider | {"key": headers["x-key"]}), "/key"),
        ]
        if answers[0][0].status_code == 201:
            assert [answer.status_code for answer, _ in answers] == [201, 201, 409]
            codes[name, url] = "accepted"
            continue
        for answer, pointer in answers:
            assert answer.json()["errors"][0]["pointer"] == pointer
        (codes[name, url],) = {answer.json()["code"] for answer, _ in answers}
    assert list(codes.values()) == [
        "accepted",
        "secret_not_for_host",
        "secret_needs_https",
        "accepted",
        "accepted",
        "secret_host_unset",
        "secret_host_unset",
    ]


async def test_a_secret_of_the_operator_is_for_its_hosts(
    sealing: Running, module_database_url: str
) -> None:
    agent = {"name": "clerk", "system_message": "x"}
    async with (await holder(module_database_url, "default")).client(sealing) as client:
        for host, status in (("203.0.114.7", 201), ("203.0.114.8", 422)):
            headers = {"x-key": {"secret": "OPERATORS"}}
            tool = TOOL | {"url": f"http://{host}/x", "headers": headers}
            body = agent | {"name": f"clerk-{status}", "tools": [tool]}
            assert (await client.post("/v1/agents", json=body)).status_code == status


async def test_a_stored_secret_goes_before_the_operator_s(
    sealing: Running, module_database_url: str
) -> None:
    async with (await holder(module_database_url, "default")).client(sealing) as client:
        await put(client, "OPERATORS", hosts=["203.0.114.8"])
        provider = {"name": "vendor", "dialect": "chat", "key": {"secret": "OPERATORS"}}
        own, other = (provider | {"base_url": f"https://203.0.114.{n}/v1"} for n in (8, 7))
        assert (await client.post("/v1/providers", json=other)).status_code == 422
        assert (await client.post("/v1/providers", json=own)).status_code == 201
        await client.delete("/v1/secrets/OPERATORS")
        assert (await client.put("/v1/providers/vendor", json=other)).status_code == 200


WORDS = ("run.completed", "completed", "Completed", "timestamp", "tool_call_id", "Bearer completed")
TIMES = ("2026-11-27", "20261127", "2026-11-27T10:00:00Z", "27 Nov 2026")


@pytest.mark.parametrize("value", [*WORDS, *TIMES])
async def test_a_word_of_the_service_is_refused_as_a_secret(
    client: httpx2.AsyncClient, value: str
) -> None:
    refused = await put(client, value=value)
    assert (refused.status_code, refused.json()["code"]) == (422, "secret_is_vocabulary")
    assert value not in refused.text
    with pytest.raises(InvalidInputError, match="BOTTEGA_SECRET_ACME__A is a date") as at_start:
        TenantSecrets({"BOTTEGA_SECRET_ACME__A": value})
    assert at_start.value.code == "secret_is_vocabulary"


@pytest.mark.parametrize("value", ["completed-7f3a9c1e", "abcdefgh", "12345678", "Bearer abcdefgh"])
async def test_a_secret_may_contain_such_a_word(client: httpx2.AsyncClient, value: str) -> None:
    assert (await put(client, value=value)).status_code == 201
