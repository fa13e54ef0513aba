"""The prompt of a model call, as the API shows it, beside what the model got."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_retry import ended
from tests.service import Running
from tests.team import asked_of, define, start


async def prompt(bottega: Running, run_id: str, **params: Any) -> dict[str, Any]:
    answer = await bottega.client.get(f"/v1/runs/{run_id}/prompt", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(found: dict[str, Any]) -> list[str]:
    return [each["content"] for each in found["messages"] if each["content"]]


async def test_a_prompt_has_what_the_model_got(guest: Running, guest_model: FakeModel) -> None:
    """Find all its texts in the request to the model, in their order."""
    await define(guest.client)
    guest_model.script(
        *(calls(("requirements", {"query": "List them."})), text("R1 and R2")),
        *(calls(("designer", {"query": "Design it."})), text("C1"), text("done")),
    )
    run_id = await start(guest.client)
    run, _ = await ended(guest, run_id)
    assert run["status"] == "completed"
    tasks = (await guest.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    ids = {task["agent"]: task["id"] for task in tasks} | {"coordinator": None}
    numbers: dict[str, int] = {}
    for request in guest_model.requests:
        agent = asked_of(request)
        numbers[agent] = numbers.get(agent, 0) + 1
        task = {} if ids[agent] is None else {"task_id": ids[agent]}
        found = await prompt(guest, run_id, call=numbers[agent], **task)
        assert (found["agent"], found["version"], found["call"]) == (agent, 1, numbers[agent])
        sent = "\n\n".join(each["content"] or "" for each in request["messages"])
        place = 0
        for each in texts(found):
            place = sent.index(each, place) + len(each)
        made = [
            call["function"]["name"]
            for each in request["messages"]
            for call in each.get("tool_calls") or ()
        ]
        assert made == [call["name"] for each in found["messages"] for call in each["tool_calls"]]
        named = {each["name"] for each in found["tools"]}
        assert named <= {each["function"]["name"] for each in request.get("tools", ())}
    last = await prompt(guest, run_id)
    assert last["call"] == 3
    origins = [each["origin"] for each in last["messages"]]
    assert origins == ["agent", "graph", "input", "model", "tool", "model", "tool"]
    designer = await prompt(guest, run_id, task_id=ids["designer"])
    assert [each["origin"] for each in designer["messages"]] == ["agent", "context", "input"]
    given = designer["messages"][1]
    assert (given["source"], given["version"]) == ("requirements", 1)
    assert "R1 and R2" in given["content"]


async def test_memory_and_a_dispatched_task_s_instructions_are_in_prompts(
    guest: Running, guest_model: FakeModel
) -> None:
    subagents = {"names": [], "mode": "async"}
    lead = {"name": "lead", "system_message": "You lead.", "subagents": subagents}
    assert (await guest.client.post("/v1/agents", json=lead)).status_code == 201
    body = {"agent": "lead", "input": "Inspect the wooden barn near Bologna.", "user": "ada"}
    guest_model.script(text("It is red."))
    await guest.client.post("/v1/runs?wait=30", json=body)
    asked = {"prompt": "Look.", "instructions": "You look at things."}
    both = asyncio.Event()  # the run must not end before its task begins
    seen = gated(both, text("seen"))
    guest_model.script(calls(("dispatch_subagent", asked)), seen, seen)
    run_id = (await guest.client.post("/v1/runs", json=body)).json()["id"]
    await guest_model.received(4)
    both.set()
    run, _ = await ended(guest, run_id)
    found = await prompt(guest, run["id"], call=1)
    (memory,) = [each for each in found["messages"] if each["origin"] == "memory"]
    assert memory["source"].startswith("episode:")
    requests = [str(request["messages"]) for request in guest_model.requests]
    assert any(repr(memory["content"])[1:-1] in each for each in requests)
    (task,) = (await guest.client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
    found = await prompt(guest, run["id"], task_id=task["id"])
    assert (found["version"], texts(found)[0]) == (None, "You look at things.")
    assert "Look." in texts(found)[1]


@pytest.mark.parametrize("params", [{"call": 9}, {"task_id": str(uuid4())}])
async def test_a_call_that_was_not_made_has_no_prompt(
    guest: Running, params: dict[str, Any]
) -> None:
    await define(guest.client)
    run, _ = await ended(guest, await start(guest.client))
    answer = await guest.client.get(f"/v1/runs/{run['id']}/prompt", params=params)
    code = "no_model_call" if "call" in params else "not_found"
    assert (answer.status_code, answer.json()["code"]) == (404, code)
