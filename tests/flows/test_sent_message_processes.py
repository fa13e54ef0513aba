"""Messages for runs over several real processes, one of them killed."""

import asyncio
from typing import Any

import pytest

from tests.fake_model import FakeModel, gated, text
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of, watch


@pytest.mark.deep
async def test_messages_outlive_a_killed_worker_and_are_delivered_once(
    database_url: str, model: FakeModel
) -> None:
    """Kill the worker after messages came in over two APIs, and before its agent got them."""
    with_model = environment(database_url, model)
    gate = asyncio.Event()

    def decide(request: dict[str, Any]) -> Any:
        answer = text(f"answer {len(request['messages'])}")
        return answer if gate.is_set() else gated(gate, answer)

    model.decide = decide
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as first,
        command("serve", "--no-worker", "--port", "0", **with_model) as second,
        client_of(first.port) as one,
        client_of(second.port) as other,
    ):
        agent = {"name": "clerk", "system_message": "You help.", "model": "any"}
        assert (await one.post("/v1/agents", json=agent)).status_code == 201
        body = {"agent": "clerk", "input": "x", "session_id": "s", "memory": "off"}
        async with command("worker", **with_model) as victim:
            run_id = (await one.post("/v1/runs", json=body)).json()["id"]
            await model.received(1)

            async def send(number: int) -> str:
                client = (one, other)[number % 2]
                path = f"/v1/runs/{run_id}/messages"
                answer = await client.post(path, json={"content": f"message {number}"})
                assert answer.status_code == 202, answer.text
                message_id: str = answer.json()["message_id"]
                return message_id

            sent = await asyncio.gather(*map(send, range(6)))
            victim.kill()
            await victim.process.wait()
        steer = {**body, "input": "steered", "if_busy": "steer"}
        steered = (await other.post("/v1/runs", json=steer)).json()
        assert steered["id"] == run_id
        sent.append(steered["message_id"])
        gate.set()
        async with command("worker", **with_model):
            log = await watch(second.port, run_id)
        told = (await one.get("/v1/sessions/s/messages")).json()["items"]
    assert log[-1]["type"] == "run.completed"
    for kind in ("message.received", "message.delivered"):
        named = [each["data"]["message_id"] for each in log if each["type"] == kind]
        assert sorted(named) == sorted(sent)
    asked = [each["content"] for each in told if each["role"] == "user"]
    assert sorted(asked) == sorted(["x", "steered", *(f"message {n}" for n in range(6))])
