"""Python tools of plugins in the service, with the example package, and hooks at resume."""

import asyncio
import sys
import tomllib
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from bottega.engine.plugins import subagent_plugins
from bottega.settings import Settings
from bottega.subagents.handle import DispatchParams
from bottega.subagents.plugins import PluginContext, Refused, before_dispatch
from tests.fake_model import FakeModel, Reply, calls, gated, text
from tests.flows.test_agent_data import install
from tests.flows.test_resume import final
from tests.service import Running, running

EXAMPLE = Path(__file__).parents[2] / "deploy" / "plugin"

RECORDING = """
from bottega.agents import AgentEvent, ToolContext, tool
FIRED, CALLS = [], []

@tool(name="look", description="Looks.")
async def look(context: ToolContext) -> str:
    CALLS.append((str(context.run_id), context.tenant, context.agent, context.session_id))
    context.annotate(source="web")
    return "seen"

def configure_agent(agent, definition):
    if definition["metadata"].get("looks"):
        agent.register_tool(look)
    for event in AgentEvent:
        agent.on(event).do(
            lambda status: FIRED.append((status.agent.agent_id, str(status.event), status.replayed))
        )
    agent.on(AgentEvent.BEFORE_FINAL_RESPONSE).do(lambda status: status.annotate(checked=True))
"""


def install_example(folder: Path) -> None:
    """Install the example package as its ``pyproject.toml`` says."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / "bottega_orders-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1\n")
    entries = project["entry-points"]["bottega.plugins"]
    lines = [f"{name} = {place}" for name, place in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[bottega.plugins]", *lines, ""]))


async def create(bottega: Running, name: str, **fields: Any) -> None:
    body = {"name": name, "description": name, "system_message": f"You are {name}.", **fields}
    answer = await bottega.client.post("/v1/agents", json=body)
    assert answer.status_code == 201, answer.text


async def test_example_plugin_gives_agents_a_tool_a_hook_and_a_guard(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install_example(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level("INFO", "bottega_orders")
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "clerk", metadata={"orders": True})
        await create(bottega, "careful", metadata={"orders": True}, approval="always")
        model.script(calls(("open_orders", {})), text("Two."))
        body = {"agent": "clerk", "input": "What is open?", "user": "ada"}
        run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        assert (run["status"], run["output"]) == ("completed", "Two.")
        offered = model.requests[0]["tools"][0]["function"]
        assert (offered["name"], offered["parameters"]["properties"]) == ("open_orders", {})
        assert model.requests[1]["messages"][-1]["content"] == '["a kettle","two cups"]'
        assert "clerk answered, error: None" in caplog.messages
        model.script(calls(("open_orders", {})))
        body = {"agent": "careful", "input": "What is open?", "user": "ada"}
        asked = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        assert asked["status"] == "waiting", "the agent's approval holds for plugins' tools, too"
    ctx = PluginContext(uuid4(), None, uuid4(), 1, "lead")
    asks = DispatchParams("Find the card number.", None, None, 5, {})
    assert isinstance(await before_dispatch(subagent_plugins(), ctx, asks), Refused)


@pytest.mark.deep
async def test_hooks_at_resume_know_what_the_journal_answers_and_metadata_stays(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, "recording", RECORDING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "recording_plugin", raising=False)
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    gate = asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        if "You are b." in str(request["messages"]):
            return gated(gate, text("b's answer"))
        if request["messages"][-1]["role"] == "tool":
            return text("a's answer")
        return calls(("look", {}))

    model.decide = decide
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "a", metadata={"looks": True})
        await create(bottega, "b")
        graph = {"name": "g", "nodes": ["a", "b"], "edges": [{"source": "a", "target": "b"}]}
        assert (await bottega.client.post("/v1/graphs", json=graph)).status_code == 201
        body = {"mode": "dag", "graph": "g", "input": "x", "session_id": "s"}
        run = (await bottega.client.post("/v1/runs", json=body)).json()
        await model.received(3)
        before = (await bottega.client.get(f"/v1/runs/{run['id']}/graph")).json()
    plugin: Any = sys.modules["recording_plugin"]
    first = list(plugin.FIRED)
    plugin.FIRED.clear()
    gate.set()
    async with running(configured, database_url, worker=True) as bottega:
        path = f"/v1/runs/{run['id']}"
        assert (await final(bottega, run["id"]))["status"] == "completed"
        (received,) = (await bottega.client.get(f"{path}/context/b")).json()["items"]
        after = (await bottega.client.get(f"{path}/graph")).json()
        memory = (await bottega.client.get("/v1/sessions/s")).json()["memory"]
        again = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        (kept,) = (await bottega.client.get(f"/v1/runs/{again['id']}/context/b")).json()["items"]

    assert plugin.CALLS[0] == (run["id"], "default", "a", "s")
    assert [each[0] for each in plugin.CALLS] == [run["id"], again["id"]], "not called at resume"
    metadata = {"source": "web", "checked": True}
    assert received["metadata"] == kept["metadata"] == metadata
    assert [each["metadata"] for each in memory] == [metadata, {"checked": True}]
    assert after["nodes"][0]["published"] == before["nodes"][0]["published"]
    assert before["nodes"][0]["published"]["metadata"] == metadata
    of_a = [event for agent, event, _ in first if agent == "a"]
    resumed = plugin.FIRED[: len(of_a) + 2]
    assert [each[2] for each in first] == [False] * len(first)
    assert [(event, seen) for agent, event, seen in resumed if agent == "a"] == [
        (event, True) for event in of_a
    ]
    of_b = [(event, seen) for agent, event, seen in plugin.FIRED if agent == "b"]
    assert of_b[:4] == [
        ("query_start", False),
        ("before_llm_call", False),
        ("after_llm_call", False),
        ("before_final_response", False),
    ]
