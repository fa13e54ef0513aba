"""Conversations of a run as messages."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, calls, gated, http_error, text
from tests.flows.test_agent_data import create
from tests.service import Running, running
from tests.team import define, define_graph, start


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def said(client: httpx2.AsyncClient, run_id: str, **query: Any) -> list[dict[str, Any]]:
    """Return all messages of a conversation, over all its pages."""
    found: list[dict[str, Any]] = []
    path = f"/v1/runs/{run_id}/messages"
    answer = await client.get(path, params={"limit": 2, **query})
    while True:
        assert answer.status_code == 200, answer.text
        found += answer.json()["items"]
        if "next" not in answer.links:
            return found
        answer = await client.get(answer.links["next"]["url"])


def shown(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


async def test_the_root_s_and_a_task_s_conversation(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    model.script(
        calls(("requirements", {"query": "What is needed?", "context": "A todo app."})),
        text("1. Todos."),
        calls(("designer", {"query": "Design it."}), ("nothing", {})),
        text("A list."),
        text("Done."),
    )
    run_id = await start(bottega.client)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    messages = await said(bottega.client, run_id)
    first, second = messages[1], messages[3]
    assert shown(messages)[:5] == [
        ("user", "Build a todo app."),
        ("assistant", ""),
        ("tool", "1. Todos."),
        ("assistant", ""),
        ("tool", messages[4]["content"]),
    ]
    assert shown(messages)[-1] == ("assistant", "Done.")
    (call,) = first["tool_calls"]
    assert call["name"] == "requirements"
    assert call["arguments"] == {"query": "What is needed?", "context": "A todo app."}
    assert (messages[2]["tool_call_id"], messages[2]["name"]) == (call["id"], "requirements")
    assert first["usage"]["output"] > 0
    answers = {message["name"]: message for message in messages[4:6]}
    assert set(answers) == {call["name"] for call in second["tool_calls"]}
    assert answers["designer"]["status"] == "success"
    assert answers["nothing"]["status"] == "error"
    assert answers["nothing"]["content"].startswith("Error: ")
    assert [message["seq"] for message in messages] == sorted(m["seq"] for m in messages)
    assert {frame["seq"] for frame in frames} >= {message["seq"] for message in messages}
    backwards = await said(bottega.client, run_id, order="desc")
    assert backwards == messages[::-1]

    tasks = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    by_agent = {task["agent"]: task["id"] for task in tasks}
    assert shown(await said(bottega.client, run_id, task_id=by_agent["requirements"])) == [
        ("user", "What is needed?\n\nContext:\nA todo app."),
        ("assistant", "1. Todos."),
    ]
    designer = await said(bottega.client, run_id, task_id=by_agent["designer"])
    assert shown(designer) == [
        ("user", "Design it."),
        ("system", "1. Todos."),
        ("assistant", "A list."),
    ]
    assert (designer[1]["source"], designer[1]["version"]) == ("requirements", 1)


async def test_a_sub_agent_of_a_sub_agent_and_failures(bottega: Running, model: FakeModel) -> None:
    client = bottega.client
    for name, below in (("c", []), ("b", ["c"]), ("a", ["b"])):
        body = {"name": name, "description": name, "system_message": f"You are {name}."}
        extra = {"subagents": {"names": below}} if below else {}
        assert (await client.post("/v1/agents", json=body | extra)).status_code == 201
    model.script(
        calls(("b", {"query": "to b"})),
        calls(("c", {"query": "one"}), ("c", {"query": "two"})),
        http_error(400),
        http_error(400),
        text("sorry"),
        text("end"),
    )
    run = (await client.post("/v1/runs?wait=30", json={"agent": "a", "input": "to a"})).json()
    tasks = (await client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
    below = [task["id"] for task in tasks if task["agent"] == "c"]
    asked = [shown(await said(client, run["id"], task_id=task)) for task in below]
    assert sorted(asked) == [[("user", "one")], [("user", "two")]]
    (middle,) = [task["id"] for task in tasks if task["agent"] == "b"]
    roles = [message["role"] for message in await said(client, run["id"], task_id=middle)]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]


def boss(request: dict[str, Any]) -> Reply:
    """Return a model that dispatches two tasks, awaits both and finishes; they find something."""
    messages = request["messages"]
    if messages[0]["content"] != "You are boss.":
        return text("found")
    told = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
    if not told:
        looked = {"prompt": "Look.", "agent": "leaf"}
        return calls(("dispatch_subagent", looked), ("dispatch_subagent", {"prompt": "Listen."}))
    ids = [result["task_id"] for result in told if "task_id" in result]
    return text("done") if len(told) > 2 else calls(("await_subagent", {"task_ids": ids}))


async def test_an_asynchronous_task_s_question_is_its_dispatched_prompt(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check it because the dispatched prompt may differ from the model's text."""
    (tmp_path / "brief_plugin.py").write_text(
        "def before_dispatch(ctx, params):\n    return {'prompt': params.prompt + ' Be brief.'}\n"
    )
    info = tmp_path / "brief-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brief\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[bottega.plugins]\nbrief = brief_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    model.decide = boss
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as bottega:
        await create(bottega, "leaf")
        await create(bottega, "boss", subagents={"mode": "async", "names": ["leaf"]})
        run_id = await start(bottega.client, agent="boss", graph=None)
        await bottega.frames(f"/v1/runs/{run_id}/ws")
        tasks = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
        heard = {
            task["agent"]: shown(await said(bottega.client, run_id, task_id=task["id"]))
            for task in tasks
        }
    asked = {request["messages"][-1]["content"] for request in model.requests}
    for agent, prompt in (("leaf", "Look. Be brief."), ("subagent", "Listen. Be brief.")):
        (task_id,) = [task["id"] for task in tasks if task["agent"] == agent]
        (role, question), answer = heard[agent]
        assert (role, answer) == ("user", ("assistant", "found"))
        assert question.startswith(prompt)
        assert f"/subagent/{task_id}/" in question
        assert question in asked


async def test_a_retry_shows_the_messages_that_it_carried_over(
    bottega: Running, model: FakeModel
) -> None:
    client = bottega.client
    await define(client)
    model.script(calls(("requirements", {"query": "What?"})), text("1. Todos."), http_error(400))
    failed = await start(client)
    assert (await bottega.frames(f"/v1/runs/{failed}/ws"))[-1]["type"] == "run.failed"
    model.script(text("Done."))
    key = {"idempotency-key": "again"}
    again = [
        await client.post(f"/v1/runs/{failed}/retry", json={"from": "last_step"}, headers=key)
        for _ in range(2)
    ]
    assert again[0].json() == again[1].json()
    run_id = again[0].json()["id"]
    await bottega.frames(f"/v1/runs/{run_id}/ws")
    assert shown(await said(client, run_id)) == [
        ("user", "Build a todo app."),
        ("assistant", ""),
        ("tool", "1. Todos."),
        ("assistant", "Done."),
    ]
    (task,) = (await client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    assert shown(await said(client, run_id, task_id=task["id"])) == [
        ("user", "What?"),
        ("assistant", "1. Todos."),
    ]


async def test_every_node_of_a_dag_gets_the_run_s_question(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "pair", ("first", "second"))
    model.script(text("one"), text("two"))
    question = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go."},
    ]
    body = {"mode": "dag", "graph": "pair", "input": question}
    run = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    asked = [(message["role"], message["content"]) for message in question]
    assert shown(await said(bottega.client, run["id"])) == asked
    tasks = (await bottega.client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
    assert [task["agent"] for task in tasks] == ["first", "second"]
    heard = {
        task["agent"]: shown(await said(bottega.client, run["id"], task_id=task["id"]))
        for task in tasks
    }
    assert heard == {
        "first": [*asked, ("assistant", "one")],
        "second": [*asked, ("system", "one"), ("assistant", "two")],
    }
    page = await bottega.client.get(f"/v1/runs/{run['id']}/messages?limit=1&order=desc")
    assert shown(page.json()["items"]) == asked[-1:]


async def test_a_waiting_run_shows_its_question_only(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    model.script(gated(asyncio.Event(), text("never")))
    run_id = await start(bottega.client)
    assert shown(await said(bottega.client, run_id)) == [("user", "Build a todo app.")]
    unknown = "01a1fdb7-6ff4-7105-ba5d-4c99da8e1434"
    for path in (f"{unknown}/messages", f"{run_id}/messages?task_id={unknown}"):
        assert (await bottega.client.get(f"/v1/runs/{path}")).status_code == 404
    assert (await bottega.client.get(f"/v1/runs/{run_id}/messages?task_id=x")).status_code == 422
