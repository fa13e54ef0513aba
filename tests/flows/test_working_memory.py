"""A run's working memory, as read from its log."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from bottega.cli.scenarios import SOFTWARE
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_agent_data import create
from tests.service import Running, running
from tests.team import define, start, systems


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def known(bottega: Running, run_id: str) -> dict[str, Any]:
    answer = await bottega.client.get(f"/v1/runs/{run_id}/working-memory")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    for section in found["sections"]:
        assert section["tokens"] <= section["budget"]
    assert found["tokens"] == sum(section["tokens"] for section in found["sections"])
    assert found["tokens"] <= found["limit"] == 20_000
    found["text"] = {section["name"]: section["content"] for section in found["sections"]}
    return found


async def test_a_run_s_working_memory_while_it_runs_and_after(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    gate = asyncio.Event()
    model.script(
        calls(("requirements", {"query": "What is needed?"}), ("nothing", {})),
        text("1. Todos."),
        gated(gate, text("Done.")),
    )
    run_id = await start(bottega.client)
    await model.received(3)
    running = await known(bottega, run_id)
    gate.set()
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    over = await known(bottega, run_id)
    for found in (running, over):
        assert found["text"]["system"].startswith("You are")
        assert "Build a todo app." in found["text"]["task"]
        assert "m1 requirements: 1. Todos." in found["text"]["intermediate"]
        assert "completed: m1 requirements" in found["text"]["state"]
        assert "failed: m2: nothing: Error: there is no tool" in found["text"]["state"]
        assert found["results"] == 2
        second, first = found["references"]
        assert (first["reference"], first["excerpt"], first["failed"]) == ("m1", "1. Todos.", False)
        assert (second["reference"], second["name"], second["failed"]) == ("m2", "nothing", True)
        assert frames[first["seq"] - 1]["data"]["name"] == "requirements"
        assert found["prompt"] is None
        assert found["variables"]["global"]["agent"] == SOFTWARE.coordinator
        assert found["variables"]["task"] == {"input": "Build a todo app."}
        assert found["text"]["task"].count("Build a todo app.") == 1
        assert list(found["variables"]["intermediate"].values()) == ["1. Todos."]
        assert found["variables"]["execution"] == {
            "current_agent": SOFTWARE.coordinator,
            "current_task": None,
        }
        assert found["variables"]["metadata"]["cost"] == 0
    assert "now: running" in running["text"]["state"]
    assert "now: completed" in over["text"]["state"]
    assert running["variables"]["metadata"]["model_calls"] == 2
    assert over["variables"]["metadata"]["model_calls"] == 3
    assert over["variables"]["metadata"]["tokens"] > running["variables"]["metadata"]["tokens"] > 0
    assert over["variables"]["metadata"]["started_at"]


async def test_the_agents_of_a_dag_are_its_intermediate_results(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(text("1. Todos."), text("A list."), text("Modules."))
    run_id = await start(bottega.client, agent=None, mode="dag", graph=SOFTWARE.graph_name)
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    found = await known(bottega, run_id)
    assert "m1 requirements: 1. Todos." in found["text"]["intermediate"]
    tasks = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    outputs = {each["id"]: each["output"] for each in tasks}
    assert found["variables"]["intermediate"] == outputs
    assert set(outputs.values()) == {"1. Todos.", "A list.", "Modules."}
    assert found["variables"]["execution"] == {"current_agent": None, "current_task": None}
    assert [each["name"] for each in found["references"]][-1] == "requirements"
    assert found["results"] == 3


async def test_the_working_memory_names_the_agent_at_work(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    await create(bottega, "leaf")
    await create(bottega, "root", subagents={"names": ["leaf"]})
    model.script(calls(("leaf", {"query": "x"})), gated(gate, text("a leaf")), text("done"))
    run_id = await start(bottega.client, agent="root", graph=None)
    await model.received(2)
    variables = (await known(bottega, run_id))["variables"]
    (task,) = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    execution = {"current_agent": "leaf", "current_task": task["id"]}
    assert (variables["execution"], variables["intermediate"]) == (execution, {})
    gate.set()
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    variables = (await known(bottega, run_id))["variables"]
    assert variables["execution"] == {"current_agent": "root", "current_task": None}
    assert variables["intermediate"] == {task["id"]: "a leaf"}


async def test_working_memory_of_waiting_and_unknown_runs(
    settings: Settings, database_url: str
) -> None:
    async with running(settings, database_url) as bottega:
        await create(bottega, "root")
        run_id = await start(bottega.client, agent="root", graph=None)
        found = await known(bottega, run_id)
        assert "now: queued" in found["text"]["state"]
        assert (found["results"], found["references"], found["prompt"]) == (0, [], None)
        assert found["variables"]["metadata"]["started_at"] is None
        answer = await bottega.client.get(f"/v1/runs/{uuid4()}/working-memory")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.deep
async def test_only_the_newest_results_of_a_long_run_are_listed(
    bottega: Running, model: FakeModel
) -> None:
    await create(
        bottega,
        "counter",
        tools=[{"type": "builtin", "name": "calculator"}],
        max_iterations=90,
    )
    model.script(
        *[calls(("calculator", {"expression": f"{i}+0"})) for i in range(70)], text("Done.")
    )
    run_id = await start(bottega.client, agent="counter", graph=None)
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    found = await known(bottega, run_id)
    assert found["results"] == 70
    listed = found["references"]
    assert [each["reference"] for each in (listed[0], listed[-1])] == ["m70", "m21"]
    assert listed[0]["excerpt"] == "69"
    assert "m70 calculator: 69" in found["text"]["intermediate"]
    assert "(20 more can be recalled: m1 to m20)" in found["text"]["intermediate"]


@pytest.mark.deep
async def test_a_resumed_long_run_gets_the_same_and_can_recall_its_beginning(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    settings = settings.model_copy(update={"openai_base_url": model.base_url, "drain_grace_s": 0.0})
    rows = [f"row {number} " + "x" * 2_000 for number in range(45)]
    for row in rows:
        model.script(calls(("leaf", {"query": row[:6]})), text(row))
    model.script(gated(asyncio.Event(), text("never")))
    async with running(settings, database_url, worker=True) as bottega:
        await create(bottega, "leaf")
        await create(bottega, "root", subagents={"names": ["leaf"]}, max_iterations=60)
        run_id = await start(bottega.client, agent="root", graph=None)
        await model.received(91)
    model.script(calls(("recall_memory", {"reference": "m1"})), text("Done."))
    async with running(settings, database_url, worker=True) as bottega:
        frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
        found = await known(bottega, run_id)
    before, resumed, last = model.requests[90:]
    assert resumed["messages"] == before["messages"]
    assert resumed["tools"] == before["tools"]
    names = [tool["function"]["name"] for tool in resumed["tools"]]
    assert names == ["leaf", "set_plan", "search_memory", "recall_memory"]
    assert last["messages"][-1]["content"] == rows[0]
    contents = [message["content"] for message in last["messages"]]
    assert rows[1] not in contents
    assert rows[44] in contents
    for request in model.requests:
        assert sum(len(message["content"] or "") for message in request["messages"]) < 80_000
    prompts = [f["data"].get("memory") for f in frames if f["type"] == "llm.started"]
    assert prompts[0] is None
    assert found["prompt"] == prompts[-1]
    assert 0 < prompts[-1]["shrunk"] < 45
    assert found["results"] == 45  # a recalled result is not a new one
    assert frames[-1]["type"] == "run.completed"
    assert not [f for f in frames if f["type"] == "warning"]


@pytest.mark.deep
async def test_without_memory_a_run_gets_its_whole_history(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "leaf")
    await create(bottega, "root", subagents={"names": ["leaf"]}, max_iterations=60, memory="off")
    for number in range(45):
        model.script(calls(("leaf", {"query": "x"})), text(f"row {number} " + "x" * 2_000))
    model.script(text("Done."))
    run_id = await start(bottega.client, agent="root", graph=None)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    assert len(model.requests[-1]["messages"]) == 2 + 2 * 45
    assert not any("memory" in f["data"] for f in frames if f["type"] == "llm.started")
    assert (await known(bottega, run_id))["prompt"] is None


async def test_working_memory_has_a_section_for_earlier_runs(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "root")
    model.script(text("Todos."), text("Again."))
    runs = []
    for _ in range(2):
        runs.append(await start(bottega.client, agent="root", graph=None))
        await bottega.frames(f"/v1/runs/{runs[-1]}/ws")
    found = await known(bottega, runs[1])
    given = found["text"]["retrieved"]
    assert given.startswith("episode: [UNKNOWN")
    assert "Todos." in given
    assert given in systems(model.requests[-1])[1]


async def test_results_of_directly_called_tools_are_listed(
    bottega: Running, model: FakeModel
) -> None:
    mine = {"type": "http", "name": "recall_memory", "description": "-", "url": "http://a.test/"}
    agent = {"name": "root", "system_message": "You recall.", "tools": [mine], "memory": "off"}
    assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    model.script(calls(("recall_memory", {"wrong": 1})), text("Done."))
    run_id = await start(bottega.client, agent="root", graph=None)
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    assert [each["name"] for each in (await known(bottega, run_id))["references"]] == [
        "recall_memory"
    ]
