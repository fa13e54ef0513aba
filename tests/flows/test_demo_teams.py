"""The teams of ``bottega demo``, with the demo model."""

import asyncio
from typing import Any

import pytest

from bottega.cli.scenarios import RESEARCH, SOFTWARE, Scenario
from bottega.llm.demo_model.rules import decide, read
from tests.fake_model import FakeModel, Reply, gated
from tests.service import Running
from tests.waiting import until

_KINDS = (
    "tool.started,subagent.dispatched,subagent.completed,subagent.message_sent,message.delivered"
)


async def test_the_lead_fans_out_writes_to_a_task_and_awaits_the_first_success(
    guest: Running, guest_model: FakeModel
) -> None:
    told = asyncio.Event()

    def held_until_told(request: dict[str, Any]) -> Reply:
        conversation = read(request)
        if conversation.is_task:
            return gated(told, decide(request))
        if "send_to_subagent" in dict(conversation.outcomes):
            told.set()
        return decide(request)

    guest_model.decide = held_until_told
    for agent in RESEARCH.agents:
        assert (await guest.client.post("/v1/agents", json=agent)).status_code == 201
    run = (await guest.client.post("/v1/runs?wait=30", json=RESEARCH.run)).json()
    path = f"/v1/runs/{run['id']}/events?limit=100&types={_KINDS}"
    frames = (await guest.client.get(path)).json()["items"]

    def datas(kind: str) -> list[dict[str, Any]]:
        return [frame["data"] for frame in frames if frame["type"] == kind]

    used = [(data["name"], data["arguments"].get("mode")) for data in datas("tool.started")]
    assert used[:3] == [
        ("dispatch_subagents", None),
        ("send_to_subagent", None),
        ("await_subagent", "any_success"),
    ]
    assert used[-1] == ("await_subagent", "all")
    assert len(datas("subagent.dispatched")) == len(datas("subagent.completed")) == 8
    (sent,), (heard,) = datas("subagent.message_sent"), datas("message.delivered")
    assert sent["message"] == heard["content"]
    assert run["output"].count("\n## ") == 8
    assert f"Noted: {sent['message']}" in run["output"]
    assert run["output"].endswith("8 tasks: 8 completed.")


@pytest.mark.parametrize("scenario", [RESEARCH, SOFTWARE], ids=["research", "software"])
async def test_the_success_check_of_the_lead_judges_its_answer(
    guest: Running, guest_model: FakeModel, scenario: Scenario
) -> None:
    guest_model.decide = decide
    for agent in scenario.agents:
        assert (await guest.client.post("/v1/agents", json=agent)).status_code == 201
    if scenario.graph is not None:
        await guest.client.post("/v1/graphs", json=scenario.graph)
    run = (await guest.client.post("/v1/runs?wait=30", json=scenario.run)).json()

    async def judged() -> Any:
        outcome = (await guest.client.get(f"/v1/runs/{run['id']}")).json()["outcome"]
        return outcome if outcome["source"] else None

    good = {"value": "SUCCESS", "source": "check", "reason": None}
    assert await until(judged) == good
