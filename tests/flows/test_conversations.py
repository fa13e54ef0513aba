"""Conversations: runs of a session that continue each other."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from bottega.runs.working_memory import question_of
from tests.fake_model import FakeModel, calls, gated, http_error, text
from tests.service import Running
from tests.team import define_graph
from tests.waiting import until


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def define(bottega: Running, name: str = "clerk", **more: Any) -> None:
    body = {"name": name, "system_message": "You help.", "model": "any", **more}
    answer = await bottega.client.post("/v1/agents", json=body)
    assert answer.status_code == 201, answer.text


async def ask(bottega: Running, asked: Any, session: str = "s", **more: Any) -> dict[str, Any]:
    body = {"agent": "clerk", "input": asked, "session_id": session, **more}
    wait = body.pop("wait", 30)
    answer = await bottega.client.post(f"/v1/runs?wait={wait}", json=body)
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


def said(request: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return role and content of a request's messages, without system messages."""
    messages = [m for m in request["messages"] if m["role"] != "system"]
    return [(m["role"], m.get("content")) for m in messages]


async def messages(bottega: Running, session: str = "s", query: str = "") -> list[dict[str, Any]]:
    answer = await bottega.client.get(f"/v1/sessions/{session}/messages{query}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


async def test_a_run_continues_the_last_completed_one(bottega: Running, model: FakeModel) -> None:
    await define(bottega, tools=[{"type": "builtin", "name": "calculator"}])
    model.script(
        calls(("calculator", {"expression": "6*7"})),
        text("42"),
        http_error(400),
        text("I said 42."),
    )
    await ask(bottega, "What is 6*7?")
    failed = await ask(bottega, "And by the way?")
    assert failed["status"] == "failed"
    run = await ask(bottega, "What did you say?")
    assert run["output"] == "I said 42."
    assert said(model.requests[-1]) == [
        ("user", "What is 6*7?"),
        ("assistant", None),
        ("tool", "42"),
        ("assistant", "42"),
        ("user", "What did you say?"),
    ]
    listed = await messages(bottega)
    assert [(m["role"], m["content"], m["discarded"]) for m in listed] == [
        ("user", "What is 6*7?", False),
        ("assistant", "", False),
        ("tool", "42", False),
        ("assistant", "42", False),
        ("user", "And by the way?", True),
        ("user", "What did you say?", False),
        ("assistant", "I said 42.", False),
    ]
    assert {m["agent"] for m in listed} == {"clerk"}
    pages: list[Any] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await bottega.client.get(f"/v1/sessions/s/messages?limit=2{cursor}")).json()
        pages += page["items"]
        cursor = None if page["next_cursor"] is None else f"&cursor={page['next_cursor']}"
    assert pages == listed
    assert (await messages(bottega, query="?order=desc&agent=clerk")) == listed[::-1]
    assert (await messages(bottega, query="?agent=other")) == []


async def test_new_begins_another_conversation_and_none_knows_nothing(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(*map(text, "abcd"))
    first = await ask(bottega, "one")
    alone = await ask(bottega, "two", conversation="none")
    assert alone["conversation_id"] is None
    assert said(model.requests[-1]) == [("user", "two")]
    new = await ask(bottega, "three", conversation="new")
    assert said(model.requests[-1]) == [("user", "three")]
    assert new["conversation_id"] != first["conversation_id"]
    await ask(bottega, "four")
    assert said(model.requests[-1]) == [("user", "three"), ("assistant", "c"), ("user", "four")]
    assert [m["content"] for m in await messages(bottega)] == [
        "one",
        "a",
        "three",
        "c",
        "four",
        "d",
    ]


async def test_a_conversation_without_session_is_refused(bottega: Running) -> None:
    for which in ("continue", "new"):
        body = {"agent": "clerk", "input": "x", "conversation": which}
        answer = await bottega.client.post("/v1/runs", json=body)
        assert answer.status_code == 422


async def test_runs_of_a_conversation_take_their_turn(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("a")), text("b"), text("c"))
    first = await ask(bottega, "one", wait=0)
    await until(lambda: len(model.requests) == 1)
    others = [await ask(bottega, asked, wait=0) for asked in ("two", "three")]
    assert {run["blocked_by"]["run_id"] for run in others} == {first["id"]}
    shown = (await bottega.client.get(f"/v1/runs/{others[1]['id']}")).json()
    assert shown["blocked_by"] == {"run_id": first["id"], "interrupts": []}
    body = {"agent": "clerk", "input": "x", "session_id": "s", "if_busy": "reject"}
    refused = await bottega.client.post("/v1/runs", json=body)
    assert refused.status_code == 409
    assert refused.json()["code"] == "conversation_busy"
    assert refused.json()["run_id"] == first["id"]
    gate.set()

    async def last() -> Any:
        return (await bottega.client.get(f"/v1/runs/{others[1]['id']}")).json()

    run = await until(last, lambda run: run["status"] == "completed")
    assert run["blocked_by"] is None
    assert said(model.requests[-1]) == [
        ("user", "one"),
        ("assistant", "a"),
        ("user", "two"),
        ("assistant", "b"),
        ("user", "three"),
    ]


async def test_interrupt_cancels_all_before(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("never")), text("now"))
    first = await ask(bottega, "one", wait=0)
    await until(lambda: len(model.requests) == 1)
    second = await ask(bottega, "two", wait=0)
    third = await ask(bottega, "three", if_busy="interrupt")
    assert third["output"] == "now"
    for run in (first, second):
        ended = (await bottega.client.get(f"/v1/runs/{run['id']}")).json()
        assert ended["status"] == "cancelled"
    assert said(model.requests[-1]) == [("user", "three")]


async def test_interrupt_ends_runs_that_never_began_as_any_cancellation_does(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("never")), text("now"))
    await ask(bottega, "one", wait=0)
    await until(lambda: len(model.requests) == 1)
    blocked = [await ask(bottega, "x", wait=0) for _ in range(2)]
    alone = await ask(bottega, "x", wait=0)
    await bottega.client.post(f"/v1/runs/{alone['id']}/cancel")
    assert (await ask(bottega, "three", if_busy="interrupt"))["output"] == "now"
    kinds = [[e["type"] for e in await bottega.watch(run["id"])] for run in (alone, *blocked)]
    assert kinds == [["run.queued", "run.cancelled"]] * 3
    ended = [
        (await bottega.client.get(f"/v1/runs/{run['id']}")).json() for run in (alone, *blocked)
    ]
    for name in ("status", "stop_reason", "error", "usage", "attempts", "output"):
        assert len({str(run[name]) for run in ended}) == 1, name
    assert await bottega.owner.fetchval("SELECT count(*) FROM run_queue") == 0


async def test_a_refused_run_interrupts_nothing(bottega: Running, model: FakeModel) -> None:
    await define(bottega)
    gate = asyncio.Event()
    model.script(gated(gate, text("a")))
    first = await ask(bottega, "one", wait=0, user="ada")
    body = {"agent": "clerk", "input": "x", "session_id": "s", "user": "eve"}
    refused = await bottega.client.post("/v1/runs", json={**body, "if_busy": "interrupt"})
    assert (refused.status_code, refused.json()["code"]) == (409, "session_user")
    gate.set()
    path = f"/v1/runs/{first['id']}"

    async def status() -> Any:
        return (await bottega.client.get(path)).json()["status"]

    assert await until(status, lambda now: now not in ("queued", "running")) == "completed"


async def test_long_conversations_stay_within_the_budget(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.decide = lambda request: text("answer " * 1500)
    sizes = []
    for number in range(12):
        await ask(bottega, f"question {number} " + "x" * 2000)
        sizes.append(len(str(model.requests[-1]["messages"])))
    assert max(sizes) < 60_000
    told = str(model.requests[-1]["messages"])
    assert "Earlier turns of this conversation: 1 to" in told
    assert "question 0 xxx" in told
    asked = [{"reference": reference} for reference in ("t1", "t12", "t0", "t999")]
    model.script(calls(*(("recall_memory", each) for each in asked)), text("I see."))
    await ask(bottega, "What did I ask first?")
    found = [m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]
    assert found[0].startswith("user: question 0 xxx")
    assert "assistant: answer answer" in found[0]
    assert len(found[0]) < 21_000
    for other in found[1:]:  # the twelfth is in the prompt
        assert "nothing is called 't" in other
        assert "t1 to t" in other
    assert len(str(model.requests[-1]["messages"])) < 80_000


async def test_each_node_of_a_dag_has_its_own_conversation(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    for asked in ("one", "two"):
        body = {"mode": "dag", "graph": "g", "input": asked, "session_id": "s"}
        assert (await bottega.client.post("/v1/runs?wait=30", json=body)).json()["status"] == (
            "completed"
        )
    listed = await messages(bottega, query="?agent=a")
    assert [m["role"] for m in listed] == ["user", "assistant"] * 2
    assert {m["agent"] for m in listed} == {"a"}
    for request in model.requests[-2:]:
        assert [role for role, _ in said(request)] == ["user", "assistant", "user"]


async def test_messages_of_an_agent_need_no_logs_of_others(
    bottega: Running, model: FakeModel
) -> None:
    for name, nodes in (("g", ("a", "b")), ("h", ("c", "d"))):
        await define_graph(bottega.client, name, nodes)
    for graph in "ghhg":
        body = {"mode": "dag", "graph": graph, "input": graph, "session_id": "s"}
        run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        assert run["status"] == "completed"
        if graph == "h":  # a reader of the log fails
            query = "UPDATE run_steps SET events = $2 WHERE run_id = $1"
            broken = '{"type":"llm.completed","agent":"c","data":'
            await bottega.owner.execute(query, run["id"], broken)
    listed = await messages(bottega, query="?agent=a")
    assert [m["content"] for m in listed if m["role"] == "user"] == ["g", "g"]
    assert len(listed) == 4
    assert (await messages(bottega, query="?agent=nobody")) == []
    answer = await bottega.client.get("/v1/sessions/s/messages?agent=c")
    assert answer.status_code == 500


async def test_a_retry_goes_on_from_the_base_of_its_source(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(text("a"), http_error(400), text("c"), text("again"))
    await ask(bottega, "one")
    failed = await ask(bottega, "two", memory="off")
    await ask(bottega, "three")
    answer = await bottega.client.post(f"/v1/runs/{failed['id']}/retry", json={})
    assert answer.status_code == 202, answer.text

    async def retried() -> Any:
        return (await bottega.client.get(f"/v1/runs/{answer.json()['id']}")).json()

    await until(retried, lambda run: run["status"] == "completed")
    assert said(model.requests[-1]) == [("user", "one"), ("assistant", "a"), ("user", "two")]


async def test_sessions_are_resources(bottega: Running) -> None:
    client = bottega.client
    name = uuid4().hex
    made = await client.post(
        "/v1/sessions", json={"id": name, "user": "ada", "metadata": {"plan": "pro", "n": 3}}
    )
    assert made.status_code == 201, made.text
    assert made.headers["location"] == f"/v1/sessions/{name}"
    again = await client.post("/v1/sessions", json={"id": name})
    assert (again.status_code, again.json()["code"]) == (409, "exists")
    chosen = (await client.post("/v1/sessions", json={})).json()
    assert chosen["id"]

    async def listed(query: str) -> list[str]:
        found = (await client.get(f"/v1/sessions?{query}")).json()["items"]
        return [each["id"] for each in found]

    assert await listed("user=ada") == [name]
    assert await listed("metadata=plan:pro&metadata=n:3&user=ada") == [name]
    assert await listed("metadata=plan:free") == []
    changed = await client.patch(f"/v1/sessions/{name}", json={"metadata": {"plan": "free"}})
    assert changed.json()["metadata"] == {"plan": "free"}
    assert (await client.get(f"/v1/sessions/{name}")).json()["metadata"] == {"plan": "free"}
    assert await listed("metadata=plan:free") == [name]
    assert (await client.patch("/v1/sessions/no", json={"metadata": {}})).status_code == 404
    other = {"agent": "clerk", "input": "x", "session_id": name, "user": "bob"}
    await define(bottega)
    assert (await client.post("/v1/runs", json=other)).json()["code"] == "session_user"


async def test_input_of_several_turns_comes_after_those_of_the_session(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    model.script(*map(text, "abc"))
    await ask(bottega, "one")
    turns = [("user", "two"), ("assistant", "2"), ("user", "three")]
    given = [{"role": role, "content": content} for role, content in turns]
    await ask(bottega, given)
    before = [("user", "one"), ("assistant", "a")]
    assert said(model.requests[-1]) == [*before, *turns]
    assert question_of(given) == "three"
    await ask(bottega, "four")
    told = [*before, *turns, ("assistant", "b"), ("user", "four")]
    assert said(model.requests[-1]) == told
    listed = await messages(bottega)
    assert [(m["role"], m["content"]) for m in listed] == [*told, ("assistant", "c")]
    body = {"agent": "clerk", "input": given[:1] + given[:2]}
    refused = await bottega.client.post("/v1/runs", json=body)
    assert refused.status_code == 422
    assert "the last message must" in refused.json()["detail"]
