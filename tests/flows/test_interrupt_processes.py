"""Decisions of people over several real processes, one of them killed."""

import asyncio
from typing import Any

import pytest

from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_interrupts import ASK, decide, pending
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of, watch


@pytest.mark.deep
async def test_a_decision_is_taken_though_the_worker_that_asked_was_killed(
    database_url: str, model: FakeModel
) -> None:
    """Kill the worker while one agent's question is open and another agent is at work."""
    with_model = environment(database_url, model)
    gate = asyncio.Event()

    def reply(request: dict[str, Any]) -> Any:
        first, last = request["messages"][0]["content"], request["messages"][-1]
        if "ASKS" in first:
            return text(last["content"]) if last["role"] == "tool" else calls(QUESTION)
        return text("slow") if gate.is_set() else gated(gate, text("slow"))

    model.decide = reply
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as first,
        command("serve", "--no-worker", "--port", "0", **with_model) as second,
        client_of(first.port) as one,
        client_of(second.port) as other,
    ):
        for name in ("asks", "slow"):
            agent = {"name": name, "system_message": name.upper(), "tools": [ASK], "model": "any"}
            assert (await one.post("/v1/agents", json=agent)).status_code == 201
        graph = {"name": "g", "nodes": ["asks", "slow"], "edges": []}
        assert (await one.post("/v1/graphs", json=graph)).status_code == 201
        body = {"mode": "dag", "graph": "g", "input": "x", "memory": "off"}
        async with command("worker", **with_model) as victim:
            run_id = (await one.post("/v1/runs", json=body)).json()["id"]
            (interrupt,) = await pending(one, run_id)
            victim.kill()
            await victim.process.wait()
        decided = await asyncio.gather(
            *[decide(client, interrupt, answer="red") for client in (one, other)]
        )
        gate.set()
        async with command("worker", **with_model):
            log = await watch(second.port, run_id)
        run = (await other.get(f"/v1/runs/{run_id}")).json()
    assert sorted(status for status, _ in decided) == [200, 409]
    assert (log[-1]["type"], run["output"]["slow"]) == ("run.completed", "slow")
    assert "red" in run["output"]["asks"]
    kinds = [event["type"] for event in log]
    for kind in ("interrupt.created", "interrupt.resolved"):
        assert kinds.count(kind) == 1


QUESTION = ("ask_user", {"question": "Which colour?"})
