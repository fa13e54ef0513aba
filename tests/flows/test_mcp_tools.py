"""Tools of MCP servers in runs: pinned, called, down, slow, asking, over HTTP and stdio."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from pydantic import SecretStr
from pydantic_core import from_json

from bottega.settings import Settings, StdioServer
from tests.fake_model import FakeModel, calls, text
from tests.flows.conftest import asking
from tests.flows.test_interrupts import decide, pending
from tests.flows.test_processes import environment as environment_of
from tests.mcp.test_programs import ERAS, SCRIPT
from tests.mcp_server import ToolServer, tool_server
from tests.processes import command
from tests.service import Running, client_of, running, watch
from tests.tenants import holder
from tests.waiting import until

SECRETS_KEY = "A" * 43 + "="
OWN = StdioServer(
    command=sys.executable,
    args=("-m", "tests.mcp_server"),
    env={"API_TOKEN": SecretStr("of-the-child")},
)


@pytest.fixture(scope="module")
async def shared(
    module_settings: Settings, shared_url: str, shared_model: FakeModel
) -> AsyncIterator[Running]:
    path = os.pathsep.join(filter(None, sys.path))
    own = OWN.model_copy(update={"env": {**OWN.env, "PYTHONPATH": SecretStr(path)}})
    configured = asking(shared_model, module_settings).model_copy(
        update={
            "egress_allow": ["127.0.0.1", "localhost"],
            "secrets_key": SecretStr(SECRETS_KEY),
            "mcp_stdio": {"own": own}
            | {
                f"of-{era[:4]}": StdioServer(command=sys.executable, args=(str(SCRIPT), era))
                for era in ERAS
            },
        }
    )
    async with running(configured, shared_url, worker=True) as server:
        yield server


@pytest.fixture
async def tools() -> AsyncIterator[ToolServer]:
    async with tool_server() as server:
        yield server


async def define(client: httpx2.AsyncClient, server: dict[str, Any], **tool: Any) -> None:
    """Store a server ``s`` with its tools, and an agent ``a`` that has them."""
    made = await client.post("/v1/mcp-servers", json={"name": "s", **server})
    assert made.status_code == 201, made.text
    refreshed = await client.post("/v1/mcp-servers/s/refresh")
    assert refreshed.status_code == 200, refreshed.text
    agent = {"name": "a", "system_message": "x", "tools": [{"type": "mcp", "server": "s", **tool}]}
    made = await client.post("/v1/agents", json=agent)
    assert made.status_code == 201, made.text


async def start(client: httpx2.AsyncClient, **fields: Any) -> str:
    answer = await client.post("/v1/runs", json={"agent": "a", "input": "x", **fields})
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def run(server: Running, model: FakeModel, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """Let a run make these calls, one message each; return the events of their ends."""
    model.script(*(calls(each) for each in asked), text("done"))
    events = await server.watch(await start(server.client))
    assert events[-1]["type"] == "run.completed", events[-1]
    return [each for each in events if each["type"] in ("tool.completed", "tool.failed")]


async def test_tools_are_pinned_and_called(
    guest: Running, guest_model: FakeModel, tools: ToolServer
) -> None:
    stored = {"value": "a-secret-of-the-tenant", "hosts": ["127.0.0.1"]}
    assert (await guest.client.put("/v1/secrets/KEY", json=stored)).status_code == 201
    headers = {"x-key": {"secret": "KEY"}}
    await define(guest.client, {"url": tools.url, "headers": headers})
    shown = (await guest.client.get("/v1/mcp-servers/s")).json()
    names = ["add", "fail", "picture", "env", "slow"]
    assert [each["name"] for each in shown["tools"]] == names
    assert shown["tools"][0]["description"] == "Add two numbers."
    assert shown["tools"][0]["input_schema"]["required"] == ["a", "b"]
    assert (shown["version"], shown["warnings"]) == (2, [])
    again = await guest.client.post("/v1/mcp-servers/s/refresh")
    assert again.json()["version"] == 2, "nothing has changed"
    added, failed, pictured = await run(
        guest,
        guest_model,
        ("s__add", {"a": 20, "b": 22}),
        ("s__fail", {"word": "a-secret-of-the-tenant"}),
        ("s__picture", {}),
    )
    assert "42" in str(added["data"]["result"])
    assert failed["type"] == "tool.failed"
    assert "no " in failed["data"]["error"]["message"]
    assert "a-secret-of-the-tenant" not in str(failed)
    assert pictured["data"]["parts"][0]["media_type"] == "image/png"
    assert tools.called == ["add", "fail"]
    assert {each.get("x-key") for each in tools.headers} == {"a-secret-of-the-tenant"}
    offered = guest_model.requests[0]["tools"]
    assert {f"s__{name}" for name in names} <= {each["function"]["name"] for each in offered}
    run_id = (await guest.client.get("/v1/runs")).json()["items"][0]["id"]
    prompt = (await guest.client.get(f"/v1/runs/{run_id}/prompt")).json()
    assert {each["type"] for each in prompt["tools"]} == {"mcp"}
    assert prompt["tools"][0]["name"] == "s__add"
    assert prompt["tools"][0]["parameters"]["required"] == ["a", "b"]


@pytest.mark.parametrize("spread_above", [50, 1])
async def test_a_node_of_a_sub_graph_calls_a_tool_for_each_element(
    guest: Running, tools: ToolServer, spread_above: int
) -> None:
    await define(guest.client, {"url": tools.url})
    add = {
        "name": "add",
        "type": "tool",
        "tool": {"type": "mcp", "server": "s", "tools": ["add"]},
        "arguments": {"a": {"from": "item", "pointer": "/a"}, "b": 1},
        "for_each": {
            "from": "run",
            "pointer": "/metadata/list",
            "on_error": "collect",
            "spread_above": spread_above,
        },
    }
    outer = {"name": "sums", "type": "graph", "graph": "inner"}
    for name, node in (("inner", add), ("outer", outer)):
        body = {"name": name, "nodes": [node], "edges": []}
        stored = await guest.client.post("/v1/graphs", json=body)
        assert stored.status_code == 201, stored.text
    items: list[Any] = [{"a": 1}, {"a": "x"}, {}, {"a": 41}]
    metadata = {"list": items}
    run_id = await start(guest.client, mode="dag", graph="outer", metadata=metadata, agent=None)
    await guest.watch(run_id)
    found = (await guest.client.get(f"/v1/runs/{run_id}")).json()
    assert found["status"] == "completed", found
    assert sorted(tools.called) == ["add", "add"]
    first, wrong, absent, last = found["output_json"]
    assert ("2" in str(first), "42" in str(last)) == (True, True)
    assert {wrong["error"]["code"], absent["error"]["code"]} == {"tool_failed"}
    assert "/a" in absent["error"]["message"]


async def test_changed_tools_are_a_new_version(
    guest: Running, guest_model: FakeModel, tools: ToolServer
) -> None:
    await define(guest.client, {"url": tools.url}, tools=["add"])
    guest_model.script(calls(("s__add", {"a": 1, "b": 2})), text("done"))
    tools.mcp.remove_tool("add")
    (gone,) = await run(guest, guest_model, ("s__add", {"a": 1, "b": 2}))
    assert gone["type"] == "tool.failed", "the pinned tool has gone meanwhile"
    guest_model.forget()
    refreshed = (await guest.client.post("/v1/mcp-servers/s/refresh")).json()
    assert refreshed["version"] == 3
    assert "add" not in [each["name"] for each in refreshed["tools"]]
    answer = await guest.client.post("/v1/runs", json={"agent": "a", "input": "x"})
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown_tool")


async def test_a_server_that_is_down(
    guest: Running, guest_model: FakeModel, tools: ToolServer
) -> None:
    async with tool_server() as other:
        await define(guest.client, {"url": other.url, "timeout_s": 5})
    (failed,) = await run(guest, guest_model, ("s__add", {"a": 1, "b": 2}))
    assert failed["type"] == "tool.failed"
    refused = await guest.client.post("/v1/mcp-servers/s/refresh")
    assert (refused.status_code, refused.json()["code"]) == (502, "mcp_unreachable")
    kept = (await guest.client.get("/v1/mcp-servers/s")).json()
    assert kept["tools"][0]["name"] == "add"
    inside = {"name": "inside", "url": "http://localhost.localdomain:9/mcp", "timeout_s": 2}
    await guest.client.post("/v1/mcp-servers", json=inside)
    answer = await guest.client.post("/v1/mcp-servers/inside/refresh")
    assert answer.status_code == 502


async def test_two_tenants_have_servers_of_one_name(
    guest: Running, guest_model: FakeModel, tools: ToolServer, shared_url: str
) -> None:
    held = await holder(shared_url, f"tenant-{uuid4().hex}")
    async with tool_server() as others, held.client(guest) as client:
        other = replace(guest, client=client, headers=held.headers)
        await define(guest.client, {"url": tools.url})
        await define(client, {"url": others.url})
        await run(guest, guest_model, ("s__add", {"a": 1, "b": 1}))
        assert (tools.called, others.called) == (["add"], [])
        await run(other, guest_model, ("s__add", {"a": 1, "b": 1}))
        assert (tools.called, others.called) == (["add"], ["add"])


@pytest.mark.deep
async def test_a_program_is_a_server(guest: Running, guest_model: FakeModel) -> None:
    await define(guest.client, {"command": "own"})
    added, found = await run(guest, guest_model, ("s__add", {"a": 2, "b": 3}), ("s__env", {}))
    assert "5" in str(added["data"]["result"])
    environment = from_json(found["data"]["result"])
    assert "of-the-child" not in str(found), "the operator's secret is redacted"
    allowed = {"PATH", "HOME", "LANG", "API_TOKEN", "PYTHONPATH", "pid", "LC_CTYPE"}
    assert set(environment) <= allowed
    pid = int(environment["pid"])
    await until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_progress_is_shown_live(
    guest: Running, guest_model: FakeModel, tools: ToolServer
) -> None:
    await define(guest.client, {"url": tools.url})
    guest_model.script(calls(("s__slow", {"steps": 5})), text("done"))
    run_id = await start(guest.client)
    seen: list[dict[str, Any]] = []
    async with guest.client.stream(
        "GET", f"/v1/runs/{run_id}/events", headers={"accept": "text/event-stream"}
    ) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                seen.append({"type": line.removeprefix("event: ")})
            if line == "event: tool.progress":
                tools.gate.set()
            if line.startswith("data: ") and seen[-1]["type"] == "tool.progress":
                seen[-1]["data"] = line
    kinds = [each["type"] for each in seen]
    assert (
        kinds.index("tool.started") < kinds.index("tool.progress") < kinds.index("tool.completed")
    )
    assert '"name":"s__slow"' in next(each["data"] for each in seen if "data" in each)
    stored = (await guest.client.get(f"/v1/runs/{run_id}/events")).json()["items"]
    assert "tool.progress" not in {each["type"] for each in stored}


async def test_a_cancelled_run_ends_its_call(
    guest: Running, guest_model: FakeModel, tools: ToolServer
) -> None:
    await define(guest.client, {"url": tools.url})
    guest_model.script(calls(("s__slow", {"steps": 1})), text("done"))
    run_id = await start(guest.client)
    await until(lambda: tools.called)
    await guest.client.post(f"/v1/runs/{run_id}/cancel")
    assert (await guest.watch(run_id))[-1]["type"] == "run.cancelled"


async def test_people_approve_calls(
    guest: Running, guest_model: FakeModel, tools: ToolServer
) -> None:
    when = {"when": {"feature": "arguments.a", "op": "gt", "value": 10}}
    await define(guest.client, {"url": tools.url}, approval=when)
    guest_model.script(calls(("s__add", {"a": 50, "b": 1})), text("done"))
    run_id = await start(guest.client)
    (asked,) = await pending(guest.client, run_id)
    assert (asked["kind"], asked["tool"], tools.called) == ("approval", "s__add", [])
    status, _ = await decide(guest.client, asked, decision="approve", arguments={"a": 11, "b": 1})
    assert status == 200
    events = await guest.watch(run_id)
    (ended,) = [each for each in events if each["type"] == "tool.completed"]
    assert "12" in str(ended["data"])


@pytest.mark.deep
async def test_a_killed_worker_s_calls_are_not_repeated(
    database_url: str, model: FakeModel, tools: ToolServer
) -> None:
    with_model = environment_of(
        database_url, model, BOTTEGA_EGRESS_ALLOW="127.0.0.1", BOTTEGA_TAKEOVER_S="2"
    )
    model.script(
        calls(("s__add", {"a": 1, "b": 2})), calls(("s__slow", {"steps": 1})), text("done")
    )
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client, {"url": tools.url})
        async with command("worker", **with_model) as victim:
            run_id = await start(client)
            await until(lambda: len(tools.called) == 2)
            victim.kill()
            await victim.process.wait()
        async with command("worker", **with_model):
            events = await watch(api.port, run_id)
    ends = [each for each in events if each["type"] in ("tool.completed", "tool.failed")]
    assert [each["type"] for each in ends] == ["tool.completed", "tool.failed"]
    assert "interrupted by a restart" in ends[1]["data"]["error"]["message"]
    assert tools.called == ["add", "slow"]
    assert events[-1]["type"] == "run.completed"


@pytest.mark.parametrize("era", ERAS)
async def test_changed_tools_are_stale_until_the_next_refresh(
    guest: Running, guest_model: FakeModel, era: str
) -> None:
    await define(guest.client, {"command": f"of-{era[:4]}"}, tools=["change"])
    fresh = (await guest.client.get("/v1/mcp-servers/s")).json()
    assert fresh["stale"] is False

    async def is_stale() -> bool:
        await run(guest, guest_model, ("s__change", {}))
        shown = (await guest.client.get("/v1/mcp-servers/s")).json()
        assert shown["version"] == fresh["version"]
        told = [each for each in shown["warnings"] if each not in fresh["warnings"]]
        assert bool(told) == shown["stale"]
        return bool(shown["stale"])

    await until(is_stale)
    listed = (await guest.client.get("/v1/mcp-servers")).json()["items"]
    assert [each["stale"] for each in listed] == [True]
    refreshed = (await guest.client.post("/v1/mcp-servers/s/refresh")).json()
    assert refreshed["version"] == fresh["version"]
    assert any("'no_schema'" in each for each in refreshed["warnings"])
    assert (await guest.client.get("/v1/mcp-servers/s")).json() == fresh
    await until(is_stale)
    other = ERAS[1 - ERAS.index(era)]
    moved = await guest.client.put("/v1/mcp-servers/s", json={"command": f"of-{other[:4]}"})
    assert moved.json()["stale"] is False


@pytest.mark.parametrize("era", ERAS)
async def test_a_server_asks_people(guest: Running, guest_model: FakeModel, era: str) -> None:
    await define(guest.client, {"command": f"of-{era[:4]}"})
    guest_model.script(calls(("s__ask", {})), text("done"))
    run_id = await start(guest.client)
    (asked,) = await pending(guest.client, run_id)
    assert (asked["kind"], asked["question"]) == ("question", "Your name?")
    assert asked["server"] == "s"
    assert asked["schema"]["required"] == ["name"]
    status, problem = await decide(guest.client, asked, answer={"name": 3})
    assert status == 422, problem
    status, _ = await decide(guest.client, asked, answer={"name": "Ada"})
    assert status == 200
    events = await guest.watch(run_id)
    (ended,) = [each for each in events if each["type"] == "tool.completed"]
    assert ended["data"]["result"] == "Hello Ada."


@pytest.mark.deep
@pytest.mark.parametrize("era", [pytest.param(ERAS[0], marks=pytest.mark.deep), ERAS[1]])
async def test_a_server_s_questions_are_bounded(
    guest: Running, guest_model: FakeModel, era: str
) -> None:
    await define(guest.client, {"command": f"of-{era[:4]}"})
    many = [calls(("s__ask_often", {"questions": 12})) for _ in range(6)]
    guest_model.script(*many, text("done"))
    run_id = await start(guest.client)

    async def answer() -> None:
        while True:
            (asked,) = await pending(guest.client, run_id)
            await decide(guest.client, asked, answer={"name": "Ada"})

    answering = asyncio.create_task(answer())
    events = await guest.watch(run_id)
    answering.cancel()
    said = [each["data"]["result"] for each in events if each["type"] == "tool.completed"]
    assert said == ["10 accepted, 2 declined"] * 5 + ["0 accepted, 12 declined"]
    asked = [each["data"] for each in events if each["type"] == "interrupt.created"]
    assert len({each["interrupt_id"] for each in asked}) == 50
    assert {each["server"] for each in asked} == {"s"}


@pytest.mark.parametrize("era", ERAS)
async def test_a_question_that_nobody_can_be_asked_counts(
    guest: Running, guest_model: FakeModel, era: str
) -> None:
    await define(guest.client, {"command": f"of-{era[:4]}"})
    guest_model.script(calls(("s__ask_often", {"questions": 12, "unfit": 10})), text("done"))
    events = await guest.watch(await start(guest.client))
    (ended,) = [each for each in events if each["type"] == "tool.completed"]
    assert ended["data"]["result"] == "0 accepted, 12 declined"


async def test_a_dry_run_calls_no_server(guest: Running, tools: ToolServer) -> None:
    await define(guest.client, {"url": tools.url})
    graph = {"name": "g", "nodes": ["a"]}
    assert (await guest.client.post("/v1/graphs", json=graph)).status_code == 201
    asked = len(tools.headers)
    dry = await guest.client.post("/v1/graphs/g/dry-run", json={"input": "Use the tool s__add"})
    assert dry.status_code == 200, dry.text
    (agent,) = dry.json()["agents"]
    assert {each["name"]: each["called"] for each in agent["tools"]}["s__add"] is False
    assert len(tools.headers) == asked
