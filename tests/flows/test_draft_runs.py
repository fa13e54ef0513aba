"""Draft runs: a definition is tried without being stored."""

from typing import Any
from uuid import uuid4

import httpx2
import pytest

from bottega.tools.builtin import NOT_CALLED
from tests.api.test_bad_input import problem
from tests.fake_model import FakeModel, calls, http_error, text
from tests.flows.test_outcomes import finished
from tests.rows import unchanged
from tests.service import Running
from tests.tenants import holder

SUM = {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}
PAY = {
    "type": "http",
    "name": "pay",
    "description": "Pays.",
    "method": "POST",
    "url": "https://bank.example/pay/{sum}",
    "parameters": SUM,
}
CLERK = {"system_message": "You are a clerk."}
PLUGIN = "/definition/success_check/0/name"
PAYER = {
    "system_message": "You pay.",
    "tools": [PAY, {"type": "builtin", "name": "calculator"}],
    "tool_policy": [{"tool_name": "pay"}, {"tool_name": "calculator"}],
    "approval": "always",
    "success_check": [{"type": "judge", "criteria": "Was it good?"}],
}


async def started(
    client: httpx2.AsyncClient, definition: dict[str, Any], name: str = "clerk", **asked: Any
) -> dict[str, Any]:
    body = {"definition": definition, "input": "Pay 2 + 3.", **asked}
    answer = await client.post(f"/v1/agents/{name}/draft-runs", json=body)
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/runs/{run['id']}"
    return run


async def tried(server: Running, definition: dict[str, Any], **asked: Any) -> dict[str, Any]:
    """Return the run of a draft once it is over."""
    run = await started(server.client, definition, **asked)
    assert run["draft"] is True
    await server.watch(run["id"])
    ended: dict[str, Any] = (await server.client.get(f"/v1/runs/{run['id']}")).json()
    assert ended["draft"] is True
    return ended


@pytest.mark.deep
async def test_the_demo_model_answers_and_nothing_outside_is_called(
    guest: Running, guest_model: FakeModel
) -> None:
    run = await tried(guest, PAYER, model="demo")
    assert run["status"] == "completed", run["error"]
    assert guest_model.requests == []
    messages = (await guest.client.get(f"/v1/runs/{run['id']}/messages")).json()["items"]
    results = [each["content"] for each in messages if each["role"] == "tool"]
    assert results == [NOT_CALLED, "5"]
    assert (run["memory"], run["learning"], run["success_check"]) == ("off", None, None)
    prompt = (await guest.client.get(f"/v1/runs/{run['id']}/prompt")).json()
    assert prompt["messages"][0]["content"] == "You pay."
    assert [each["name"] for each in prompt["tools"]] == ["pay", "calculator"]
    assert prompt["provider"] == "demo"


@pytest.mark.deep
async def test_its_sub_agents_ask_the_demo_model_too(
    guest: Running, guest_model: FakeModel
) -> None:
    stored = {"name": "helper", "description": "Helps.", **PAYER}
    assert (await guest.client.post("/v1/agents", json=stored)).status_code == 201
    run = await tried(guest, CLERK | {"subagents": {"names": ["helper"]}, "model": "none:such"})
    assert run["status"] == "completed", run["error"]
    tasks = (await guest.client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
    assert [task["agent"] for task in tasks] == ["helper"]
    assert guest_model.requests == []


async def test_the_real_model_is_asked_as_the_draft_says(
    guest: Running, guest_model: FakeModel
) -> None:
    guest_model.script(calls(("calculator", {"expression": "2+3"})), text("It is 5."))
    draft = {"system_message": "You count.", "tools": [{"type": "builtin", "name": "calculator"}]}
    run = await tried(guest, draft, model="real", input=[{"role": "user", "content": "2 + 3?"}])
    assert (run["status"], run["output"], run["memory"]) == ("completed", "It is 5.", "read")
    assert guest_model.requests[0]["messages"][0]["content"] == "You count."
    assert run["learning"] is None
    assert run["question"] == "2 + 3?"


async def test_nothing_is_stored_under_the_name(guest: Running, guest_model: FakeModel) -> None:
    client = guest.client
    stored = {"name": "clerk", "system_message": "You are stored."}
    assert (await client.post("/v1/agents", json=stored)).status_code == 201
    for name in ("clerk", "nobody"):
        run = await tried(guest, {"system_message": "You are a draft."}, name=name)
        assert run["agent"] == name
    assert (await client.get("/v1/agents/clerk")).json()["version"] == 1
    assert (await client.get("/v1/agents/nobody")).status_code == 404
    guest_model.script(text("Yes."))
    await finished(guest, agent="clerk")
    assert guest_model.requests[0]["messages"][0]["content"] == "You are stored."


async def test_it_is_in_no_list_but_that_of_drafts(guest: Running, guest_model: FakeModel) -> None:
    client = guest.client
    draft = await tried(guest, {"system_message": "You are a draft."})
    guest_model.script(text("Yes."))
    assert (await client.post("/v1/agents", json={"name": "clerk"} | CLERK)).status_code == 201
    usual = await finished(guest, agent="clerk", metadata={"color": "red"})

    async def listed(query: str) -> list[str]:
        answer = await client.get(f"/v1/runs?{query}")
        return [each["id"] for each in answer.json()["items"]]

    assert await listed("") == await listed("draft=false") == await listed("agent=clerk")
    assert await listed("") == [usual["id"]]
    assert await listed("draft=true") == [draft["id"]]
    assert await listed("draft=true&agent=clerk&q=pay") == [draft["id"]]
    assert await listed("draft=true&metadata=color:red") == []
    (item,) = (await client.get("/v1/usage?by=agent")).json()["items"]
    assert item["runs"] == 1
    assert item["input"] == usual["usage"]["input"]


async def test_its_repetitions_are_drafts_too(guest: Running, guest_model: FakeModel) -> None:
    draft = {"system_message": "You are a draft."}
    for where, body in (("retry", {"from": "start"}), ("fork", {"at_seq": 2})):
        guest_model.script(http_error(400))
        run = await tried(guest, draft, model="real")
        assert run["status"] == "failed"
        guest_model.script(text("Now I can."))
        again = await guest.client.post(f"/v1/runs/{run['id']}/{where}", json=body)
        assert again.json()["draft"] is True, again.text
        await guest.watch(again.json()["id"])
        asked = guest_model.requests[-1]["messages"][0]["content"]
        assert asked == "You are a draft."


async def test_it_refuses_what_storing_and_running_refuse(shared: Running, shared_url: str) -> None:
    administrator = await holder(shared_url, f"tenant-{uuid4().hex}")
    runner = await holder(shared_url, f"tenant-{uuid4().hex}", "run")
    path = "/v1/agents/clerk/draft-runs"
    async with (
        administrator.client(shared) as client,
        runner.client(shared) as other,
        unchanged(
            shared_url,
            without=("api_keys",),
            tenants=(administrator.tenant_id, runner.tenant_id),
        ),
    ):
        for changes, code, at in (
            ({"subagents": {"names": ["clerk"]}}, 409, None),
            ({"subagents": {"names": ["nobody"]}}, 422, None),
            ({"nmae": 1}, 422, "/definition/nmae"),
            ({"name": "clerk"}, 422, "/definition/name"),
            ({"params": {"temperature": 1, "top_k": 5}}, 422, "/definition/params/top_k"),
            ({"success_check": [{"type": "python", "name": "x"}]}, 422, PLUGIN),
            ({"tools": [{**PAY, "url": "ftp://x"}]}, 422, "/definition/tools/0/url"),
        ):
            body = {"definition": CLERK | changes, "input": "x"}
            found = problem(await client.post(path, json=body), code)
            if at is not None:
                assert found["errors"][0]["pointer"] == at
        body = {"definition": CLERK, "input": "x"}
        problem(await client.post(path, json=body | {"model": "other"}), 422)
        problem(await client.post(path, json={"definition": CLERK}), 422)
        problem(await other.post(path, json=body), 403)
        problem(await client.post("/v1/agents/a b/draft-runs", json=body), 422)


async def test_a_repeated_key_starts_one_run(guest: Running) -> None:
    body = {"definition": CLERK, "input": "x"}
    answers = [
        await guest.client.post(
            "/v1/agents/clerk/draft-runs", json=body, headers={"Idempotency-Key": "once"}
        )
        for _ in range(2)
    ]
    first, second = (answer.json()["id"] for answer in answers)
    assert first == second
