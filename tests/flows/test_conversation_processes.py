"""Conversations over several real processes, some of them killed."""

import asyncio
from typing import Any

import pytest

from tests.fake_model import FakeModel, gated, text
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of, watch

RUNS = 6


@pytest.mark.deep
async def test_runs_keep_their_order_over_two_apis_and_a_killed_worker(
    database_url: str, model: FakeModel
) -> None:
    with_model = environment(database_url, model)
    gate = asyncio.Event()

    def decide(request: dict[str, Any]) -> Any:
        asked = last_words(request)
        answer = text(f"answer to {asked}")
        return gated(gate, answer) if asked == "0" and not gate.is_set() else answer

    model.decide = decide
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as first,
        command("serve", "--no-worker", "--port", "0", **with_model) as second,
        client_of(first.port) as one,
        client_of(second.port) as other,
    ):
        agent = {"name": "clerk", "system_message": "You help.", "model": "any"}
        assert (await one.post("/v1/agents", json=agent)).status_code == 201

        async def ask(number: int) -> str:
            body = {"agent": "clerk", "input": str(number), "session_id": "s", "memory": "off"}
            answer = await (one, other)[number % 2].post("/v1/runs", json=body)
            assert answer.status_code == 202, answer.text
            run_id: str = answer.json()["id"]
            return run_id

        async with command("worker", **with_model) as victim:
            runs = [await ask(0)]
            await model.received(1)
            runs += await asyncio.gather(*map(ask, range(1, RUNS)))
            victim.kill()
            await victim.process.wait()
        gate.set()
        async with command("worker", **with_model), command("worker", **with_model):
            logs = await asyncio.gather(*(watch(second.port, run_id) for run_id in runs))
        told = (await one.get("/v1/sessions/s/messages")).json()["items"]
    assert {log[-1]["type"] for log in logs} == {"run.completed"}
    questions = [each["content"] for each in told if each["role"] == "user"]
    assert sorted(questions) == [str(number) for number in range(RUNS)]
    # Each but the killed one was asked once, with all turns before it and no other.
    assert len(model.requests) == RUNS + 1
    for request in model.requests[1:]:
        words = [each["content"] for each in request["messages"] if each["role"] != "system"]
        place = questions.index(words[-1])
        turns = [(asked, f"answer to {asked}") for asked in questions[:place]]
        assert words == [each for turn in turns for each in turn] + [words[-1]]


def last_words(request: dict[str, Any]) -> str:
    content: str = request["messages"][-1]["content"]
    return content
