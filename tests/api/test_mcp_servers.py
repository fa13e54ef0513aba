"""MCP servers over HTTP: definitions, and the agents and runs that name them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from bottega.settings import Settings, StdioServer, redactor
from bottega.tools.mcp import model_name
from tests.service import Running, running
from tests.tenants import holder

URL = "https://203.0.114.7/mcp"
"""An address that is public; nothing connects to it."""
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
async def house(
    module_settings: Settings, module_database_url: str
) -> AsyncIterator[tuple[Running, str]]:
    """A server whose operator has a command, and bound a secret to hosts."""
    update: dict[str, Any] = {
        "mcp_stdio": {"time": StdioServer(command="true")},
        "secret_hosts": {"BOUND": ["203.0.114.7"]},
    }
    configured = module_settings.model_copy(update=update)
    async with running(configured, module_database_url) as found:
        yield found, module_database_url


@pytest.fixture
async def own(house: tuple[Running, str]) -> AsyncIterator[Running]:
    """The same server, for a tenant that only this test has."""
    shared, url = house
    held = await holder(url, f"tenant-{uuid4().hex}")
    async with held.client(shared) as client:
        yield replace(shared, client=client, headers=held.headers)


async def with_tools(server: Running, name: str, *tools: str) -> None:
    """Create a server that was asked for its tools."""
    made = await server.client.post("/v1/mcp-servers", json={"name": name, "url": URL})
    assert made.status_code == 201, made.text
    found = to_json({"tools": [TOOL | {"name": tool} for tool in tools]}).decode()
    await server.owner.execute(
        "UPDATE mcp_server_versions SET definition = definition || $2::jsonb WHERE name = $1",
        name,
        found,
    )


async def test_a_server_is_created_read_replaced_and_deleted(own: Running) -> None:
    client = own.client
    body = {"name": "search", "url": URL + "?v=1", "headers": {"x-team": "a"}}
    created = await client.post("/v1/mcp-servers", json=body)
    assert created.status_code == 201, created.text
    assert created.headers["location"] == "/v1/mcp-servers/search"
    shown = created.json()
    assert shown | body == shown
    assert (shown["timeout_s"], shown["max_bytes"], shown["command"]) == (30, 1_000_000, None)
    assert (shown["tools"], shown["tools_at"], shown["warnings"]) == (None, None, [])
    again = await client.post("/v1/mcp-servers", json=body)
    assert (again.status_code, again.json()["code"]) == (409, "exists")
    put = await client.put("/v1/mcp-servers/search", json={"command": "time", "timeout_s": 5})
    assert (put.json()["version"], put.json()["command"], put.json()["url"]) == (2, "time", None)
    listed = (await client.get("/v1/mcp-servers")).json()["items"]
    assert [each["name"] for each in listed] == ["search"]
    assert "headers" not in listed[0]
    versions = (await client.get("/v1/mcp-servers/search/versions")).json()["items"]
    assert sorted(each["version"] for each in versions) == [1, 2]
    assert (await client.delete("/v1/mcp-servers/search")).status_code == 204
    assert (await client.get("/v1/mcp-servers/search")).status_code == 404
    noted = (await client.get("/v1/audit")).json()["items"]
    actions = [each["action"] for each in noted]
    assert {f"mcp_server.{each}" for each in ("create", "replace", "delete")} <= set(actions)


@pytest.mark.parametrize(
    ("fields", "code", "pointer"),
    [
        ({}, "invalid", ""),
        ({"url": URL, "command": "time"}, "invalid", ""),
        ({"command": "time", "headers": {"a": "b"}}, "invalid", ""),
        ({"command": "shell"}, "unknown_command", "/command"),
        ({"url": "http://127.0.0.1/mcp"}, "egress_forbidden", "/url"),
        ({"url": "http://[::ffff:10.0.0.1]/mcp"}, "egress_forbidden", "/url"),
        ({"url": "ftp://203.0.114.7"}, "invalid", "/url"),
        ({"url": "https://u:p@203.0.114.7/"}, "secret_in_clear", "/url"),
        ({"url": f"{URL}?api_key=123"}, "secret_in_clear", "/url"),
        ({"url": URL, "headers": {"Authorization": "Bearer x"}}, "secret_in_clear", "/headers"),
        (
            {"url": "https://203.0.114.8/", "headers": {"x": {"secret": "BOUND"}}},
            "secret_host_unset",
            "/headers/x",
        ),
        ({"url": URL, "timeout_s": 0}, "invalid", "/timeout_s"),
        ({"url": URL, "max_bytes": 10**9}, "invalid", "/max_bytes"),
        ({"url": URL, "name": "Upper"}, "invalid", "/name"),
    ],
)
async def test_a_wrong_server_is_refused(
    own: Running, fields: dict[str, Any], code: str, pointer: str
) -> None:
    answer = await own.client.post("/v1/mcp-servers", json={"name": "m"} | fields)
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, code), problem
    assert pointer in [each["pointer"] for each in problem["errors"]], problem


async def test_tools_stay_until_the_address_changes(own: Running) -> None:
    client = own.client
    await with_tools(own, "m", "add")
    slower = await client.put("/v1/mcp-servers/m", json={"url": URL, "timeout_s": 60})
    assert [each["name"] for each in slower.json()["tools"]] == ["add"]
    moved = await client.put("/v1/mcp-servers/m", json={"url": URL + "2"})
    assert moved.json()["tools"] is None


async def test_an_agent_s_tools_are_checked_when_a_run_begins(own: Running) -> None:
    client = own.client

    async def refused(*tools: dict[str, Any], **fields: Any) -> tuple[str, str]:
        body = {"system_message": "x", "tools": list(tools)} | fields
        await client.delete("/v1/agents/a")
        stored = await client.post("/v1/agents", json=body | {"name": "a"})
        assert stored.status_code == 201, stored.text
        answer = await client.post("/v1/runs", json={"agent": "a", "input": "x"})
        if answer.status_code == 202:
            return "", ""
        problem = answer.json()
        assert answer.status_code == 422, problem
        assert [each["pointer"] for each in problem["errors"]] == ["/agent"]
        return problem["code"], problem["detail"]

    code, detail = await refused({"type": "builtin", "name": "calculator"}, mcp("m"))
    assert code == "unknown_mcp_server"
    assert "'m'" in detail
    assert "/tools/1" in detail
    await client.post("/v1/mcp-servers", json={"name": "m", "url": URL})
    code, detail = await refused(mcp("m"))
    assert code == "mcp_server_not_refreshed"
    assert "/v1/mcp-servers/m/refresh" in detail
    await client.delete("/v1/mcp-servers/m")
    assert (await refused(mcp("m")))[0] == "unknown_mcp_server"
    await with_tools(own, "s", "add", "t__u", *(f"t{number}" for number in range(200)))
    assert await refused(mcp("s")) == ("", "")
    assert await refused(mcp("s", tools=["add"]), mcp("s", tools=["t1"])) == ("", "")
    code, detail = await refused(mcp("s", tools=["add", "sub"]))
    assert (code, "sub" in detail, "add" in detail) == ("unknown_tool", True, False)
    await with_tools(own, "s__t", "u")
    code, detail = await refused(mcp("s"), mcp("s__t"))
    assert (code, "s__t__u" in detail) == ("duplicate_tool", True)
    await with_tools(own, "many", *(f"t{number}" for number in range(57)))
    assert (await refused(mcp("s"), mcp("many")))[0] == "too_many_tools"
    assert await refused(mcp("s"), exit_on_success=["s__add"]) == ("", "")


def mcp(server: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server": server} | fields


async def test_a_run_pins_the_version(own: Running) -> None:
    client = own.client
    await with_tools(own, "m", "add")
    agent = {"name": "a", "system_message": "x", "tools": [mcp("m")]}
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    shown = (await client.get("/v1/agents/a")).json()["tools"]
    assert shown[0] | mcp("m") == shown[0]

    async def pinned() -> dict[str, int]:
        run = (await client.post("/v1/runs", json={"agent": "a", "input": "x"})).json()
        found = "SELECT pinned -> 'mcp_servers' FROM runs WHERE id = $1"
        return dict(from_json(await own.owner.fetchval(found, run["id"])))

    assert await pinned() == {"m": 1}
    assert (await client.put("/v1/mcp-servers/m", json={"url": URL, "timeout_s": 1})).is_success
    assert await pinned() == {"m": 2}


async def test_another_tenant_s_server_is_unknown(own: Running, house: tuple[Running, str]) -> None:
    await with_tools(own, "m", "add")
    held = await holder(house[1], f"tenant-{uuid4().hex}")
    async with held.client(own) as other:
        for method in ("GET", "DELETE"):
            assert (await other.request(method, "/v1/mcp-servers/m")).status_code == 404
        agent = {"name": "a", "system_message": "x", "tools": [mcp("m")]}
        assert (await other.post("/v1/agents", json=agent)).status_code == 201
        run = await other.post("/v1/runs", json={"agent": "a", "input": "x"})
        assert run.json()["code"] == "unknown_mcp_server"


async def test_servers_need_the_scope_of_agents(own: Running, house: tuple[Running, str]) -> None:
    held = await holder(house[1], f"tenant-{uuid4().hex}", "run")
    async with held.client(own) as running_only:
        answer = await running_only.post("/v1/mcp-servers", json={"name": "m", "url": URL})
        assert answer.status_code == 403
        assert (await running_only.get("/v1/mcp-servers")).status_code == 200


def test_names_of_tools_are_valid_for_models() -> None:
    assert model_name("time", "now") == "time__now"
    assert model_name("a", "b.c/d é") == "a__b_c_d__"
    long = [model_name("s" * 30, "t" * 60 + end) for end in "ab"]
    assert {len(name) for name in long} == {64}
    assert len(set(long)) == 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{", "JSON"),
        ('{"Time": {"command": "x"}}', "small letter"),
        ('{"time": {"command": ""}}', "command"),
        ('{"time": {"command": "x", "shell": true}}', "shell"),
        ('{"time": {"command": "x", "env": {"A=B": "c"}}}', "environment variable"),
    ],
)
def test_wrong_commands_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    monkeypatch.setenv("BOTTEGA_MCP_STDIO", value)
    with pytest.raises((ValidationError, ValueError)) as error:
        Settings(_env_file=None)
    assert "mcp_stdio" in str(error.value)
    if isinstance(error.value, ValidationError):
        assert said in str(error.value)


def test_variables_of_commands_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    command = {"command": "x", "env": {"API_KEY": "in-the-environment", "TZ": "Europe/Rome"}}
    monkeypatch.setenv("BOTTEGA_MCP_STDIO", to_json({"m": command}).decode())
    settings = Settings(_env_file=None)
    assert "in-the-environment" not in str(settings)
    said = "in-the-environment of Europe/Rome"
    assert redactor(settings).text(said).endswith(" of Europe/Rome")
    assert "in-the" not in redactor(settings).text(said)
