"""Agents configured as data over HTTP, and as Python by a plugin."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json

from bottega.settings import Settings
from bottega.settings.providers import OperatorProvider
from tests.fake_model import FakeModel, calls, text
from tests.fake_responses import FakeResponses
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import Running, client_of, running
from tests.team import systems


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


PLUGIN = """
from bottega.agents import AgentEvent, HumanMessage

def configure_agent(agent, definition):
    agent.on(AgentEvent.QUERY_START).inject(
        lambda status: HumanMessage(content=f"from the plugin of {definition['metadata']['team']}")
    )
"""


async def create(bottega: Running, name: str, **fields: Any) -> None:
    body: dict[str, Any] = {
        "name": name,
        "description": name,
        "system_message": f"You are {name}.",
        **fields,
    }
    answer = await bottega.client.post("/v1/agents", json=body)
    assert answer.status_code == 201, answer.text
    stored = answer.json()
    for key in fields.keys() - {"subagents", "tools"}:
        assert stored[key] == fields[key]
    for shown, tool in zip(stored["tools"], body.get("tools", ()), strict=True):
        assert shown == shown | tool  # and defaults


async def ask(bottega: Running, agent: str) -> dict[str, object]:
    answer = await bottega.client.post("/v1/runs?wait=30", json={"agent": agent, "input": "x"})
    run: dict[str, object] = answer.json()
    return run


@pytest.mark.deep
async def test_a_tool_policy_rejects_an_early_answer(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "helper")
    rule = {
        "tool_name": "helper",
        "min_calls": 1,
        "require_success": True,
        "error_message": "Ask the helper first.",
    }
    await create(bottega, "boss", subagents={"names": ["helper"]}, tool_policy=[rule])
    model.script(
        text("too early"), calls(("helper", {"query": "help"})), text("helped"), text("now")
    )
    run = await ask(bottega, "boss")
    assert (run["status"], run["output"]) == ("completed", "now")
    assert "Ask the helper first." in str(model.requests[1]["messages"][-1])


async def test_exit_on_success_ends_with_the_tool_s_result(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "helper")
    await create(bottega, "boss", subagents={"names": ["helper"]}, exit_on_success=["helper"])
    model.script(calls(("helper", {"query": "help"})), text("the helper's word"))
    run = await ask(bottega, "boss")
    assert (run["output"], run["stop_reason"]) == ("the helper's word", "exit_on_success")
    assert len(model.requests) == 2


async def test_without_agent_comment_tool_results_are_the_answer(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "helper")
    await create(bottega, "boss", subagents={"names": ["helper"]}, agent_comment=False)
    model.script(calls(("helper", {"query": "help"})), text("the helper's word"))
    run = await ask(bottega, "boss")
    assert "the helper's word" in str(run["output"])
    assert len(model.requests) == 2


async def test_iterations_run_out_with_a_reason(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "helper")
    await create(bottega, "boss", subagents={"names": ["helper"]}, max_iterations=1)
    model.script(calls(("helper", {"query": "help"})), text("helped"))
    run = await ask(bottega, "boss")
    assert run["status"] == "failed"
    assert run["stop_reason"] == "max_iterations"


async def test_an_agent_may_speak_the_responses_api(settings: Settings, database_url: str) -> None:
    async with FakeResponses() as model:
        own = OperatorProvider(name="default", dialect="responses", base_url=model.base_url)
        configured = settings.model_copy(update={"providers": [own]})
        async with running(configured, database_url, worker=True) as bottega:
            await create(bottega, "modern", model="some-model")
            run = await ask(bottega, "modern")
    assert run["status"] == "completed"
    (request,) = model.requests
    assert (request["store"], request["model"]) == (False, "some-model")


async def test_a_built_in_tool_answers(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "clerk", tools=[{"type": "builtin", "name": "calculator"}])
    model.script(calls(("calculator", {"expression": "6 * 7"})), text("42"))
    run = await ask(bottega, "clerk")
    assert run["output"] == "42"
    names = [tool["function"]["name"] for tool in model.requests[0]["tools"]]
    assert names == ["calculator", "set_plan", "search_memory"]
    result = model.requests[1]["messages"][-1]
    assert (result["role"], result["content"]) == ("tool", "42")
    events = await bottega.frames(f"/v1/runs/{run['id']}/ws")
    (done,) = [event["data"] for event in events if event["type"] == "tool.completed"]
    assert done["result"] == 42


HTTP_TOOL = {
    "type": "http",
    "name": "stock",
    "description": "How many are in stock.",
    "method": "GET",
    "url": "http://127.0.0.1:{port}/v1/models?item={{item}}",
    "headers": {"authorization": {"secret": "STOCK_KEY"}},
    "parameters": {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
    },
}


async def test_an_http_tool_is_refused_a_private_address_and_hides_its_secret(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOTTEGA_SECRET_STOCK_KEY", "Bearer very-secret")
    port = model.base_url.split(":")[2].split("/")[0]
    tool = HTTP_TOOL | {"url": str(HTTP_TOOL["url"]).format(port=port)}
    for allow, succeeds in (([], False), (["127.0.0.1"], True)):
        update = {"openai_base_url": model.base_url, "egress_allow": allow}
        configured = settings.model_copy(update=update)
        async with running(configured, database_url, worker=True) as bottega:
            if not succeeds:
                body = {"name": "keeper", "system_message": "x", "tools": [tool]}
                assert (await bottega.client.post("/v1/agents", json=body)).status_code == 201
            model.script(calls(("stock", {"item": "nails"})), text("done"))
            run = await ask(bottega, "keeper")
            assert run["output"] == "done"
            events = await bottega.frames(f"/v1/runs/{run['id']}/ws")
            kinds = [event["type"] for event in events]
            assert ("tool.completed" in kinds, "tool.failed" in kinds) == (succeeds, not succeeds)
            shown = (await bottega.client.get("/v1/agents/keeper")).text
            assert "STOCK_KEY" in shown
            assert "very-secret" not in str(events) + str(model.requests) + shown


async def test_recall_returns_earlier_results(bottega: Running, model: FakeModel) -> None:
    for name in ("far", "other", "middle"):
        await create(bottega, name)
    await create(bottega, "last", recall={"mode": "semantic", "k": 1})
    edges = [("far", "middle"), ("other", "middle"), ("middle", "last")]
    await bottega.client.post(
        "/v1/graphs",
        json={"name": "g", "edges": [{"source": a, "target": b} for a, b in edges]},
    )
    replies = {
        "far": "Payment by invoice within thirty days.",
        "other": "The garden has roses and tulips.",
        "middle": "A summary.",
        "last": "The end.",
    }
    model.decide = lambda request: text(
        replies[request["messages"][0]["content"].removeprefix("You are ").removesuffix(".")]
    )
    answer = await bottega.client.post(
        "/v1/runs?wait=30",
        json={"mode": "dag", "graph": "g", "input": "How are invoices and payment handled?"},
    )
    run_id = answer.json()["id"]
    assert answer.json()["status"] == "completed"
    given = systems(model.requests[-1])
    assert "A summary." in given[1]
    assert "invoice within thirty" in given[2]
    items = (await bottega.client.get(f"/v1/runs/{run_id}/context/last")).json()["items"]
    assert [(item["source"], item["edge"]) for item in items] == [
        ("middle", ["middle", "last"]),
        ("far", None),
    ]
    assert items[1]["score"] > 0
    assert items[1]["content"] == replies["far"]

    changed = {"system_message": "You are last.", "recall": {"mode": "ancestors"}}
    stored = await bottega.client.put("/v1/agents/last", json=changed)
    assert stored.json()["recall"]["mode"] == "ancestors"
    body = {"mode": "dag", "graph": "g", "input": "Nothing like it."}
    run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    items = (await bottega.client.get(f"/v1/runs/{run['id']}/context/last")).json()["items"]
    assert [(item["source"], item["score"]) for item in items] == [
        ("middle", None),
        ("far", None),
        ("other", None),
    ]
    assert [item["content"] for item in items[1:]] == [replies["far"], replies["other"]]


BROKEN = """
from bottega.agents import AgentEvent

def configure_agent(agent, definition):
    if agent.agent_name == "unlucky":
        raise LookupError("no such team")
    agent.on(AgentEvent.BEFORE_FINAL_RESPONSE).do(fails)

def fails(status):
    if status.agent.agent_name == "hooked":
        raise LookupError("no such answer")

def before_dispatch(ctx, params):
    raise LookupError("no such task")
"""


@pytest.mark.deep
async def test_a_plugin_that_breaks_is_named_with_the_run(
    database_url: str, model: FakeModel, tmp_path: Path
) -> None:
    install(tmp_path, "crm", BROKEN)
    path = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    async with (
        command("serve", "--port", "0", **environment(database_url, model), **path) as server,
        client_of(server.port) as client,
    ):
        dispatches = {"subagents": {"mode": "async", "names": []}}
        for name, fields in (("unlucky", {}), ("hooked", {}), ("boss", dispatches)):
            body = {"name": name, "description": name, "system_message": "x", **fields}
            assert (await client.post("/v1/agents", json=body)).status_code == 201
        runs = {}
        for name in ("unlucky", "hooked", "boss"):
            if name == "boss":
                model.script(calls(("dispatch_subagent", {"prompt": "go"})), text("sent"))
            answer = await client.post("/v1/runs?wait=30", json={"agent": name, "input": "x"})
            runs[name] = answer.json()
        await server.says("no such task")
    unlucky, hooked = runs["unlucky"]["error"], runs["hooked"]["error"]
    assert unlucky["code"] == "plugin_failed"
    assert "the plugin 'crm' failed to configure the agent 'unlucky'" in unlucky["message"]
    assert "no such team" not in unlucky["message"]  # it is in the operator's log
    assert "a hook of the plugin 'crm' on before_final_response raised" in hooked["message"]
    lines = [from_json(line) for line in server.log if line.startswith("{")]
    for name, said in (
        ("unlucky", "no such team"),
        ("hooked", "no such answer"),
        ("boss", "no such task"),
    ):
        (line,) = [line for line in lines if said in line.get("exception", "")]
        assert "crm" in (line.get("name"), *line["event"].split("'"))
        assert line["run_id"] == runs[name]["id"]
    failed = {
        line["run_id"]: (line["error"]["code"], line["error"]["message"])
        for line in lines
        if line["event"] == "run.ended" and line["status"] == "failed"
    }
    assert failed == {
        runs[name]["id"]: (runs[name]["error"]["code"], runs[name]["error"]["message"])
        for name in ("unlucky", "hooked")
    }


def install(folder: Path, name: str, code: str) -> None:
    """Install a module as a plugin, in a folder that will be on the path."""
    (folder / f"{name}_plugin.py").write_text(code)
    info = folder / f"{name}_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[bottega.plugins]\n{name} = {name}_plugin\n")


async def test_a_plugin_s_hooks_reach_agents_of_the_service(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, "shop", PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "solo", metadata={"team": "crew"})
        model.script(text("done"))
        assert (await ask(bottega, "solo"))["output"] == "done"
    assert model.requests[0]["messages"][-1]["content"] == "x\n\nfrom the plugin of crew"
    sys.modules.pop("shop_plugin", None)
