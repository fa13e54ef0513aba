"""People decide over HTTP: approvals, questions, and tools that the client executes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx2
import pytest
import websockets
from pydantic_core import from_json, to_json

from bottega.memory.episodes.episode import episode_id_of
from bottega.settings import Settings
from tests.fake_model import FakeModel, calls, text
from tests.flows.test_patience import ended, start
from tests.flows.test_scopes import answer_to, connect
from tests.service import Running, is_stored, running
from tests.tenants import holder
from tests.waiting import until

WHEN = {"when": {"feature": "arguments.expression", "op": "contains", "value": "9"}}
CALCULATOR = {"type": "builtin", "name": "calculator", "approval": WHEN}
ASK = {"type": "builtin", "name": "ask_user"}
CLIENT = {"type": "client", "name": "locate", "description": "Says where the user is."}
COLOUR = {"type": "string", "enum": ["red", "blue"]}


@pytest.fixture
def configured(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(update={"openai_base_url": model.base_url})


@pytest.fixture
async def bottega(configured: Settings, database_url: str) -> AsyncIterator[Running]:
    async with running(configured, database_url, worker=True) as server:
        yield server


async def pending(client: httpx2.AsyncClient, run_id: str, count: int = 1) -> list[Any]:
    """Wait until so many calls of a run wait for people."""

    async def items() -> list[Any]:
        query = {"status": "pending", "run_id": run_id}
        found: list[Any] = (await client.get("/v1/interrupts", params=query)).json()["items"]
        return found

    return await until(items, lambda seen: len(seen) == count)


async def decide(client: httpx2.AsyncClient, interrupt: Any, **body: Any) -> tuple[int, Any]:
    answer = await client.post(f"/v1/interrupts/{interrupt['id']}/resolve", json=body)
    return answer.status_code, answer.json()


async def test_people_decide_on_calls_and_the_run_goes_on(
    bottega: Running, model: FakeModel
) -> None:
    asked = calls(
        ("calculator", {"expression": "1+1"}),
        ("calculator", {"expression": "9+9"}),
        ("ask_user", {"question": "Which colour?", "schema": COLOUR}),
        ("locate", {}),
    )
    model.script(asked, text("done"))
    run_id = await start(bottega, tools=[CALCULATOR, ASK, CLIENT])
    client = bottega.client
    items = await pending(client, run_id, 3)
    found = {each["kind"]: each for each in items}
    approval, question, locate = (found[kind] for kind in ("approval", "question", "client_tool"))
    assert approval["arguments"] == {"expression": "9+9"}
    assert "contains" in approval["reason"]
    assert (question["question"], question["schema"]) == ("Which colour?", COLOUR)
    for interrupt, body, pointer in (
        (approval, {"answer": "yes"}, "/answer"),
        (approval, {}, "/decision"),
        (approval, {"decision": "approve", "arguments": {"x": 1}}, "/arguments"),
        (approval, {"decision": "deny", "arguments": {}}, "/arguments"),
        (question, {"decision": "approve"}, "/decision"),
        (question, {"answer": "green"}, "/answer"),
        (locate, {"result": 1, "error": "x"}, None),
    ):
        status, problem = await decide(client, interrupt, **body)
        assert status == 422, problem
        assert pointer is None or problem["errors"][0]["pointer"] == pointer
    edited = {"decision": "approve", "arguments": {"expression": "20+1"}}
    status, resolved = await decide(client, approval, **edited)
    assert (status, resolved["status"], resolved["resolution"]) == (200, "resolved", edited)
    assert resolved["resolved_by"] == {"key_id": None, "name": "local"}
    status, problem = await decide(client, approval, decision="deny")
    assert (status, problem["code"]) == (409, "resolved")
    assert (await decide(client, question, answer="red"))[0] == 200
    assert (await decide(client, locate, result={"city": "Rome"}))[0] == 200
    run = await ended(bottega, run_id)
    assert (run["status"], run["output"]) == ("completed", "done")
    told = [each["content"] for each in model.requests[-1]["messages"] if each["role"] == "tool"]
    assert "2" in told[0]
    assert told[1].startswith("(arguments edited by a person)")
    assert "21" in told[1]
    assert "red" in told[2]
    assert "Rome" in told[3]
    noted = (await client.get("/v1/audit?action=interrupt.resolve")).json()["items"]
    assert [entry["target"] for entry in noted] == [approval["id"], question["id"], locate["id"]]


async def test_approvals_need_a_key_that_may_approve(
    bottega: Running, model: FakeModel, database_url: str
) -> None:
    model.script(calls(("calculator", {"expression": "9"})), text("done"))
    run_id = await start(bottega, tools=[CALCULATOR])
    (interrupt,) = await pending(bottega.client, run_id)
    runner = await holder(database_url, "default", "run")
    approver = await holder(database_url, "default", "approve")
    foreign = await holder(database_url, "umbrella")
    async with runner.client(bottega) as client:
        status, problem = await decide(client, interrupt, decision="approve")
        assert (status, problem["code"]) == (403, "insufficient_scope")
        assert "'approve'" in problem["detail"]
    async with foreign.client(bottega) as client:
        assert (await client.get("/v1/interrupts")).json()["items"] == []
        assert (await decide(client, interrupt, decision="approve"))[0] == 404
    async with approver.client(bottega) as client:
        status, resolved = await decide(client, interrupt, decision="deny", comment="too dear")
    assert status == 200
    assert resolved["resolved_by"] == {"key_id": str(approver.key_id), "name": "a test's"}
    await until(lambda: len(model.requests) == 2)
    assert "too dear" in model.requests[-1]["messages"][-1]["content"]
    path = f"/v1/episodes/{episode_id_of(UUID(run_id))}"
    async with runner.client(bottega) as client:
        found = await until(lambda: client.get(path), lambda answer: answer.status_code == 200)
    verdict = found.json()["verdict"]
    assert (verdict["outcome"], verdict["reason"], verdict["by"]) == (None, "too dear", "approval")


async def test_later_turns_know_of_edited_arguments(bottega: Running, model: FakeModel) -> None:
    agent = {"name": "clerk", "system_message": "x", "tools": [CALCULATOR]}
    client = bottega.client
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    both = calls(("calculator", {"expression": "9+9"}), ("calculator", {"expression": "9/1"}))
    model.script(both, text("one"), text("two"))
    body = {"agent": "clerk", "input": "x", "session_id": "s"}
    run = (await client.post("/v1/runs", json=body)).json()
    first, second = await pending(client, run["id"], 2)
    await decide(client, first, decision="approve", arguments={"expression": "20+1"})
    await decide(client, second, decision="approve")
    assert (await ended(bottega, run["id"]))["output"] == "one"
    found = await client.get(f"/v1/episodes/{episode_id_of(UUID(run['id']))}")
    verdict = found.json()["verdict"]
    assert (verdict["outcome"], verdict["by"]) == (None, "approval")
    assert verdict["reason"] == 'calculator: expression "9+9" became "20+1"'
    assert (await client.post("/v1/runs?wait=30", json=body)).json()["output"] == "two"
    turns = [
        [each["content"] for each in request["messages"] if each["role"] == "tool"]
        for request in model.requests[-2:]
    ]
    assert turns[0] == turns[1]
    assert ["edited by a person" in content for content in turns[1]] == [True, False]


async def test_an_approval_serves_its_call_once(bottega: Running, model: FakeModel) -> None:
    """Ask again in a retry, unless it has the result of the call."""
    client = bottega.client
    both = calls(("calculator", {"expression": "9"}), ("ask_user", {"question": "Sure?"}))
    model.script(calls(("calculator", {"expression": "9+9"})), both)
    run_id = await start(bottega, tools=[CALCULATOR, ASK])
    (done,) = await pending(client, run_id)
    await decide(client, done, decision="approve")
    found = {each["kind"]: each for each in await pending(client, run_id, 2)}
    await decide(client, found["approval"], decision="approve")
    await client.post(f"/v1/runs/{run_id}/cancel")
    assert (await ended(bottega, run_id))["status"] == "cancelled"

    async def repeated(whence: str, count: int) -> tuple[str, list[Any], list[Any]]:
        """Repeat the run; return its id, what waits, and the events about earlier decisions."""
        answer = await client.post(f"/v1/runs/{run_id}/retry", json={"from": whence})
        again = answer.json()["id"]
        items = await pending(client, again, count)
        types = "interrupt.created,interrupt.resolved"
        path = f"/v1/runs/{again}/events?types={types}&limit=100"
        events = (await client.get(path)).json()["items"]
        own = {each["id"] for each in items}
        about = [(each["type"], each["data"]["interrupt_id"]) for each in events]
        return again, items, [each for each in about if each[1] not in own]

    again, items, before = await repeated("last_step", 2)
    assert before == [("interrupt.created", done["id"]), ("interrupt.resolved", done["id"])]
    asked = {each["kind"]: each for each in items}
    assert asked["approval"]["arguments"] == {"expression": "9"}
    assert asked["approval"]["id"] != found["approval"]["id"]
    model.script(text("done"))
    await decide(client, asked["approval"], decision="deny")
    await decide(client, asked["question"], answer="yes")
    assert (await ended(bottega, again))["output"] == "done"
    assert "denied" in model.requests[-1]["messages"][-2]["content"]
    model.script(calls(("calculator", {"expression": "9+9"})))
    again, (item,), before = await repeated("start", 1)
    assert item["arguments"] == {"expression": "9+9"}
    assert before == []
    await client.post(f"/v1/runs/{again}/cancel")


async def test_a_cancelled_run_s_call_cannot_be_decided_on(
    bottega: Running, model: FakeModel
) -> None:
    model.script(calls(("ask_user", {"question": "Sure?"})))
    run_id = await start(bottega, tools=[ASK])
    (interrupt,) = await pending(bottega.client, run_id)
    await bottega.client.post(f"/v1/runs/{run_id}/cancel")
    assert (await ended(bottega, run_id))["status"] == "cancelled"
    status, problem = await decide(bottega.client, interrupt, answer="yes")
    assert (status, problem["code"]) == (409, "cancelled")


async def test_a_bad_rule_is_refused(bottega: Running) -> None:
    for tool, pointer in (
        (CALCULATOR | {"approval": "maybe"}, "/tools/0/approval"),
        (CALCULATOR | {"approval": {"when": {}}}, "/tools/0/approval"),
        (CALCULATOR | {"expires_s": 0}, "/tools/0/expires_s"),
        (CLIENT | {"parameters": {"type": "string"}}, "/tools/0/parameters"),
    ):
        body = {"name": "a", "system_message": "x", "tools": [tool]}
        answer = await bottega.client.post("/v1/agents", json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["pointer"] == pointer


async def test_a_wait_ends_when_the_run_waits_but_its_streams_go_on(
    bottega: Running, model: FakeModel
) -> None:
    model.script(calls(("ask_user", {"question": "Sure?"})), text("one"), text("two"))
    agent = {"name": "clerk", "system_message": "x", "tools": [ASK]}
    client = bottega.client
    assert (await client.post("/v1/agents", json=agent)).status_code == 201
    body = {"agent": "clerk", "input": "x", "session_id": "s"}
    run = (await client.post("/v1/runs?wait=60", json=body)).json()
    assert (run["status"], run["blocked_by"]) == ("waiting", None)
    path = f"/v1/runs/{run['id']}"
    (interrupt,) = await pending(client, run["id"])
    queued = (await client.post("/v1/runs", json=body)).json()
    blocked = {"run_id": run["id"], "interrupts": [interrupt["id"]]}
    shown = (await client.get(f"/v1/runs/{queued['id']}")).json()
    assert (queued["blocked_by"], shown["blocked_by"]) == (blocked, blocked)
    assert (await client.get(path)).json()["blocked_by"] is None
    accept = {"accept": "text/event-stream"}
    async with (
        websockets.connect(f"ws://127.0.0.1:{bottega.port}{path}/ws") as socket,
        client.stream("GET", f"{path}/events", headers=accept) as stream,
    ):
        lines = stream.aiter_lines()
        async for line in lines:
            if line == "event: run.waiting":
                break
        seen = [from_json(await socket.recv())]
        while seen[-1]["type"] != "run.waiting":
            seen.append(from_json(await socket.recv()))
        assert seen[-1]["data"]["interrupts"] == [interrupt["id"]]
        assert (await decide(client, interrupt, answer="yes"))[0] == 200
        seen += [from_json(message) async for message in socket]
        rest = [line async for line in lines]
    assert "event: run.completed" in rest
    places = [each["seq"] for each in seen if is_stored(each)]
    assert places == list(range(1, len(places) + 1))
    assert (await ended(bottega, queued["id"]))["output"] == "two"


async def test_a_websocket_takes_decisions_on_its_run(
    bottega: Running, model: FakeModel, database_url: str
) -> None:
    model.script(
        calls(("calculator", {"expression": "9"}), ("ask_user", {"question": "Which?"})),
        calls(("ask_user", {"question": "What?"})),
        text("done"),
    )
    run_id = await start(bottega, tools=[CALCULATOR, ASK])
    found = {each["kind"]: each["id"] for each in await pending(bottega.client, run_id, 2)}
    other = (await bottega.client.post("/v1/runs", json={"agent": "agent-1", "input": "y"})).json()
    await pending(bottega.client, other["id"])
    path, others = f"/v1/runs/{run_id}/ws", f"/v1/runs/{other['id']}/ws"

    def frame(kind: str, **said: Any) -> str:
        body = {"type": "resolve", "interrupt_id": found[kind], **said}
        return to_json(body).decode()

    runner = await holder(database_url, "default", "run")
    approver = await holder(database_url, "default", "approve")
    reader = await holder(database_url, "default", "read")

    async def code(at: str, headers: dict[str, str], sent: str) -> str:
        async with connect(bottega, at, **headers) as socket:
            answer = await answer_to(socket, sent)
        assert answer["type"] == "error"
        return str(answer["code"])

    approval = frame("approval", decision="approve")
    refused = "insufficient_scope"
    assert await code(path, reader.headers, frame("question", answer="x")) == refused
    assert await code(path, runner.headers, approval) == refused
    assert await code(others, approver.headers, approval) == "not_found"
    for bad in (
        frame("approval", answer="x"),
        frame("approval", decision="perhaps"),
        frame("approval", decision="approve", more=1),
        '{"type": "resolve", "interrupt_id": 1}',
        '{"type": "resolve", "decision": "approve"}',
    ):
        assert await code(path, approver.headers, bad) == "invalid", bad
    async with connect(bottega, path, **approver.headers) as socket:
        answer = await answer_to(socket, approval)
        assert answer == {"type": "resolve.accepted", "interrupt_id": found["approval"]}
        assert (await answer_to(socket, approval))["code"] == "resolved"
    async with connect(bottega, path, **runner.headers) as socket:
        answer = await answer_to(socket, frame("question", answer="red"))
        assert answer["type"] == "resolve.accepted"
    async with runner.client(bottega) as client:

        async def run() -> Any:
            return (await client.get(f"/v1/runs/{run_id}")).json()

        assert (await until(run, lambda run: run["status"] == "completed"))["output"] == "done"
        interrupt = (await client.get(f"/v1/interrupts/{found['approval']}")).json()
    assert interrupt["resolved_by"] == {"key_id": str(approver.key_id), "name": "a test's"}


async def test_an_agent_s_approval_covers_the_client_s_tools(
    bottega: Running, model: FakeModel
) -> None:
    model.script(
        calls(("locate", {"who": "ann"}), ("locate", {"who": "bob"}), ("free", {})), text("done")
    )
    who = {"type": "object", "properties": {"who": {"type": "string"}}}
    tools = [CLIENT | {"parameters": who}, CLIENT | {"name": "free", "approval": "never"}]
    run_id = await start(bottega, approval="always", tools=tools)
    client = bottega.client
    found = await pending(client, run_id, 3)
    assert sorted(each["kind"] for each in found) == ["approval", "approval", "client_tool"]
    by_name = {each["arguments"].get("who"): each for each in found}
    edited = {"decision": "approve", "arguments": {"who": "eve"}}
    assert (await decide(client, by_name["ann"], **edited))[0] == 200
    assert (await decide(client, by_name["bob"], decision="deny"))[0] == 200
    assert (await decide(client, by_name[None], result="free"))[0] == 200
    (locate,) = await pending(client, run_id)
    assert (locate["kind"], locate["arguments"]) == ("client_tool", {"who": "eve"})
    assert (await decide(client, locate, result="Rome"))[0] == 200
    assert (await ended(bottega, run_id))["output"] == "done"
    told = [each["content"] for each in model.requests[-1]["messages"] if each["role"] == "tool"]
    assert told[0].startswith("(arguments edited by a person)")
    assert "Rome" in told[0]
    assert "denied by a person" in told[1]
    assert "free" in told[2]


async def test_of_decisions_at_once_by_two_servers_one_counts(
    bottega: Running, configured: Settings, model: FakeModel, database_url: str
) -> None:
    model.script(calls(("ask_user", {"question": "Which?"})), text("done"))
    run_id = await start(bottega, tools=[ASK])
    (interrupt,) = await pending(bottega.client, run_id)
    async with running(configured, database_url) as second:
        clients = [bottega.client, second.client] * 3
        decided = await asyncio.gather(
            *[decide(client, interrupt, answer=f"a{n}") for n, client in enumerate(clients)]
        )
    refused = [body["code"] for status, body in decided if status == 409]
    assert refused == ["resolved"] * 5
    (counted,) = [body["resolution"] for status, body in decided if status == 200]
    assert (await ended(bottega, run_id))["status"] == "completed"
    assert counted["answer"] in model.requests[-1]["messages"][-1]["content"]
    assert len(model.requests) == 2
    noted = (await bottega.client.get("/v1/audit?action=interrupt.resolve")).json()["items"]
    assert len(noted) == 1


async def test_a_strange_session_id_is_refused_in_the_list(bottega: Running) -> None:
    answer = await bottega.client.get("/v1/interrupts?session_id=%00")
    assert answer.status_code == 422
