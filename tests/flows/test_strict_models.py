"""Whole runs on models whose servers refuse what strict vendors refuse."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bottega.cli.scenarios import SOFTWARE
from bottega.llm.demo_model.rules import decide as demo_decide
from bottega.settings import Settings
from tests import swarm
from tests.fake_model import Reply, gated
from tests.flows.test_processes import environment
from tests.llm.vendors.stateful import DeepSeek, Gemini, OpenRouter, StatefulModel
from tests.llm.vendors.strict import StrictModel
from tests.processes import command
from tests.service import Running, client_of, running, watch
from tests.team import CALLS, asked_of, define, start, systems

TOOLS = [{"type": "builtin", "name": name} for name in ("calculator", "current_time")]


@pytest.fixture
async def model() -> AsyncIterator[StrictModel]:
    async with StrictModel() as model:
        yield model


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: StrictModel
) -> AsyncIterator[Running]:
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as server:
        yield server


async def ended(bottega: Running, **body: Any) -> dict[str, Any]:
    run: dict[str, Any] = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    return run


ASKED = "How many parcels are 1723 * 4421 for the warehouse in Turin, and use current_time"


async def test_a_plain_agent_runs_twice_with_default_settings(
    bottega: Running, model: StrictModel
) -> None:
    """Check two runs: the second one gets memory of the first."""
    agent = {"name": "one", "system_message": "You are one.", "tools": TOOLS}
    assert (await bottega.client.post("/v1/agents", json=agent)).status_code == 201
    for _ in range(2):
        run = await ended(bottega, agent="one", input=ASKED, user="ada")
        assert run["status"] == "completed", (run, model.refusals)
    first, second = model.requests[0], model.requests[2]
    assert len(model.requests) == 4
    assert systems(first) == ["You are one."]
    own, known = systems(second)
    assert own == "You are one."
    assert "1723 * 4421" in known
    prefix = second["messages"]
    assert model.requests[3]["messages"][: len(prefix)] == prefix


async def test_a_team_runs_with_graph_tools_and_memory(
    bottega: Running, model: StrictModel
) -> None:
    for agent in SOFTWARE.agents:
        body = agent | {"tools": TOOLS}
        assert (await bottega.client.post("/v1/agents", json=body)).status_code == 201
    assert (await bottega.client.post("/v1/graphs", json=SOFTWARE.graph)).status_code == 201
    for _ in range(2):
        run = await ended(bottega, **SOFTWARE.run, session_id="s")
        assert run["status"] == "completed", (run, model.refusals)
    assert len(model.requests) == 2 * CALLS
    first = systems(next(r for r in model.requests if asked_of(r) == "implementer"))
    assert [text.split(":")[0] for text in first[1:]] == [
        "Shared context from requirements",
        "Shared context from designer",
    ]


async def test_asynchronous_sub_agents_run(bottega: Running, model: StrictModel) -> None:
    model.decide = swarm.plays(
        {"root": [swarm.dispatches("a", "b"), swarm.awaits(), swarm.reports]}
    )
    await swarm.coordinator(bottega.client)
    run_id = await swarm.start(bottega.client)
    frames = await watch(bottega.port, run_id)
    assert frames[-1]["type"] == "run.completed", model.refusals
    assert not model.refusals


@pytest.mark.deep
async def test_after_a_crash_the_same_prompt_is_sent_again(
    database_url: str, model: StrictModel
) -> None:
    gate = asyncio.Event()
    cut = CALLS + 6  # in the second run, with memory of the first

    def decide(request: dict[str, Any]) -> Reply:
        answer = demo_decide(request)
        return gated(gate, answer) if len(model.requests) == cut else answer

    model.decide = decide
    with_model = environment(database_url, model)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        async with command("worker", **with_model) as victim:
            await watch(api.port, await start(client))
            run_id = await start(client)
            await model.received(cut)
            victim.kill()
            await victim.process.wait()
        gate.set()
        async with command("worker", **with_model):
            frames = await watch(api.port, run_id)
    assert frames[-1]["type"] == "run.completed", model.refusals
    assert not model.refusals
    assert model.requests[cut] == model.requests[cut - 1]
    assert len(model.requests) == 2 * CALLS + 1


@pytest.mark.parametrize("vendor", [DeepSeek, Gemini, OpenRouter])
async def test_a_team_on_a_server_that_wants_its_state_back_survives_a_restart(
    settings: Settings, database_url: str, vendor: type[StatefulModel]
) -> None:
    gate = asyncio.Event()

    def decide(request: dict[str, Any]) -> Any:
        answer = demo_decide(request)
        waits = asked_of(request) == "coordinator" and request["messages"][-1]["role"] == "tool"
        return gated(gate, answer) if waits and not gate.is_set() else answer

    async with vendor(decide) as model:
        update = {"openai_base_url": model.base_url, "drain_grace_s": 0.0}
        configured = settings.model_copy(update=update)
        async with running(configured, database_url, worker=True) as bottega:
            await define(bottega.client)
            run_id = await start(bottega.client)
            await model.received(3)
        gate.set()
        async with running(configured, database_url, worker=True) as bottega:
            frames = await watch(bottega.port, run_id)
            page = (await bottega.client.get(f"/v1/runs/{run_id}/events?limit=100")).json()["items"]
        assert frames[-1]["type"] == "run.completed", model.refusals
        assert not model.refusals
        assert model.requests[3] == model.requests[2]
        # It is internal: no client is shown it.
        for shown in (str(frames), str(page)):
            for field in ("thought_signature", "reasoning_content", "reasoning_details", "state'"):
                assert field not in shown
