"""Graphs in graphs: sub-graphs, loops of turns, and nodes that run once for each element."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fake_model import FakeModel, Reply, calls, gated, gated_within, http_error, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.flows.test_deciding_graphs import (
    asks,
    calculates,
    define,
    edge,
    end_of,
    interrupt_of,
    nodes_of,
    run,
    says,
    start,
    taken,
)
from tests.service import Running
from tests.waiting import until


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


OK = {"feature": "output_json.ok", "op": "eq", "value": True}


async def store(
    bottega: Running, name: str, nodes: list[Any], edges: list[dict[str, Any]], **more: Any
) -> None:
    for node in nodes:
        if (agent := node if isinstance(node, str) else node.get("agent")) is not None:
            await create(bottega, agent)
    body = {"name": name, "nodes": nodes, "edges": edges, **more}
    stored = await bottega.client.post("/v1/graphs", json=body)
    assert stored.status_code == 201, stored.text


def inner(name: str, graph: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "graph", "graph": graph, **more}


def prompts(model: FakeModel, name: str) -> list[list[dict[str, Any]]]:
    return [each["messages"] for each in model.requests if named(each) == name]


async def test_a_graph_runs_in_a_node(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "team", ["find", "write"], [edge("find", "write")])
    await define(
        bottega,
        ["ask", inner("research", "team"), "last"],
        [edge("ask", "research"), edge("research", "last")],
    )
    model.decide = says()
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "last's answer")
    assert nodes_of(log) == {
        "ask": "completed",
        "research": "completed",
        "research/find": "completed",
        "research/write": "completed",
        "last": "completed",
    }
    assert taken(log)["research/find-research/write"]
    asked = {name: str(prompts(model, name)[0]) for name in ("find", "write", "last")}
    # Its first node reads what the node got, the last one only what is before it.
    assert "Shared context from ask" in asked["find"]
    assert "Shared context from ask" not in asked["write"]
    assert "Shared context from research" in asked["last"]
    assert "write's answer" in asked["last"]
    assert all("The question." in each for each in asked.values())
    shown = (await bottega.client.get(f"/v1/runs/{found['id']}/graph")).json()
    assert {node["name"]: node["status"] for node in shown["nodes"]} == dict.fromkeys(
        ("ask", "research", "last"), "completed"
    )
    assert shown["nodes"][1]["published"]["content"] == "write's answer"


async def test_a_loop_ends_when_its_condition_holds(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "turn", ["draft", {"agent": "review"}], [edge("draft", "review")])
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    review = (await bottega.client.get("/v1/agents/review")).json()
    changed = {key: review[key] for key in ("system_message", "model")}
    await bottega.client.put("/v1/agents/review", json={**changed, "output_schema": schema})
    loop = {"until": OK, "max": 5}
    await define(bottega, [inner("improve", "turn", loop=loop), "last"], [edge("improve", "last")])
    model.decide = says(review=[text('{"ok": false}'), text('{"ok": true}')])
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "last's answer")
    assert [each for each in nodes_of(log) if "draft" in each] == [
        "improve/1/draft",
        "improve/2/draft",
    ]
    first, second = prompts(model, "draft")
    assert "Shared context from improve" not in str(first)
    assert "Shared context from improve" in str(second)
    assert '{"ok": false}' in json.loads(json.dumps(second))[1]["content"]


async def test_a_loop_is_bounded(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "turn", ["draft"], [])
    never = {"feature": "output", "op": "eq", "value": "done"}
    for on_max in ("fail", "continue"):
        node = inner("improve", "turn", loop={"until": never, "max": 2, "on_max": on_max})
        body = {"nodes": [node], "edges": []}
        assert (await bottega.client.put("/v1/graphs/g", json=body)).status_code in (200, 201)
        model.requests.clear()
        model.decide = says()
        found, _ = await run(bottega)
        assert len(model.requests) == 2
        if on_max == "fail":
            assert (found["status"], found["error"]["code"]) == ("failed", "max_iterations")
        else:
            assert (found["status"], found["output"]) == ("completed", "draft's answer")


def list_of(*values: Any) -> Reply:
    return text(json.dumps({"items": list(values)}))


async def define_map(bottega: Running, node: dict[str, Any], **more: Any) -> None:
    items = {"type": "object", "properties": {"items": {"type": "array"}}, "required": ["items"]}
    await create(bottega, "split", output_schema=items)
    if (name := node.get("agent")) is not None:
        await create(bottega, name)
    each = {"from": "split", "pointer": "/items", **more}
    body = {"name": "g", "nodes": ["split", {**node, "for_each": each}, "join"]}
    await create(bottega, "join")
    edges = [edge("split", node.get("name") or node["agent"])]
    edges += [edge(node.get("name") or node["agent"], "join")]
    stored = await bottega.client.post("/v1/graphs", json={**body, "edges": edges})
    assert stored.status_code == 201, stored.text


async def test_an_agent_answers_each_element(bottega: Running, model: FakeModel) -> None:
    await define_map(bottega, {"agent": "read"}, concurrency=2)
    asked: list[str] = []

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "split":
            return list_of("one", {"two": 2}, "three")
        if named(request) == "read":
            asked.append(request["messages"][-1]["content"])
            return text(f"read {asked[-1]}")
        return text("joined")

    model.decide = decide
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "joined")
    assert sorted(asked) == ["one", "three", '{"two":2}']
    for prompt in prompts(model, "read"):
        assert "split" not in str(prompt)
    said = json.dumps(["read one", 'read {"two":2}', "read three"], separators=(",", ":"))
    assert said in prompts(model, "join")[0][1]["content"]
    assert nodes_of(log) == dict.fromkeys(("split", "read", "join"), "completed")
    # The list stands once in the log.
    assert (
        sum(
            said in json.dumps(each["data"].get("content")).encode().decode("unicode_escape")
            for each in log
        )
        <= 1
    )


@pytest.mark.parametrize("on_error", ["fail", "skip", "collect"])
async def test_elements_may_fail(bottega: Running, model: FakeModel, on_error: str) -> None:
    await define_map(bottega, {"agent": "read"}, on_error=on_error, concurrency=1)

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "split":
            return list_of("a", "bad", "c")
        if request["messages"][-1]["content"] == "bad":
            return http_error(400)
        return text(named(request) + " said")

    model.decide = decide
    found, _ = await run(bottega)
    if on_error == "fail":
        assert found["status"] == "failed"
        assert "element 1" in found["error"]["message"]
        assert len(prompts(model, "read")) == 2
        return
    assert found["status"] == "completed"
    got = prompts(model, "join")[0][1]["content"]
    assert got.count("read said") == 2
    assert ("model_bad_request" in got) == (on_error == "collect")


@pytest.mark.parametrize(
    ("items", "code"),
    [('{"items": [1, 2, 3]}', "too_many_items"), ('{"items": "x"}', "not_a_list")],
)
async def test_only_so_many_elements_of_a_list(
    bottega: Running, model: FakeModel, items: str, code: str
) -> None:
    await create(bottega, "split", output_schema={"type": "object"})
    await create(bottega, "read")
    each = {"from": "split", "pointer": "/items", "max": 2}
    body = {"name": "g", "nodes": ["split", {"agent": "read", "for_each": each}]}
    stored = await bottega.client.post(
        "/v1/graphs", json={**body, "edges": [edge("split", "read")]}
    )
    assert stored.status_code == 201, stored.text
    model.decide = says(split=text(items))
    found, log = await run(bottega)
    assert (found["status"], found["error"]["code"]) == ("failed", code)
    assert nodes_of(log)["read"] == "failed"


async def test_tools_and_graphs_have_elements(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "team", ["find", "write"], [edge("find", "write")])
    square = calculates("square", {"from": "item", "pointer": "/n"})
    square["for_each"] = {"from": "run", "pointer": "/metadata/list"}
    each = {"from": "square"}
    nodes = [square, inner("each", "team", for_each=each)]
    await define(bottega, nodes, [edge("square", "each")], output="each")
    model.decide = says()
    found, log = await run(bottega, metadata={"list": [{"n": "2 * 2"}, {"n": "3 * 3"}]})
    assert found["status"] == "completed", found
    assert found["output"] == '["write\'s answer","write\'s answer"]'
    assert found["output_json"] == ["write's answer", "write's answer"]
    assert {each for each in nodes_of(log) if "find" in each} == {"each/0/find", "each/1/find"}
    assert sorted(each[-1]["content"] for each in prompts(model, "find")) == ["4", "9"]


async def test_a_person_answers_in_a_graph_in_a_graph(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "deep", [asks("check"), "yes"], [edge("check", "yes", when=OK)])
    await store(bottega, "middle", [inner("low", "deep")], [])
    await define(bottega, [inner("top", "middle")], [])
    model.decide = says()
    run_id = await start(bottega)
    found = await interrupt_of(bottega, run_id)
    assert found["node"] == "top/low/check"
    shown = (await bottega.client.get(f"/v1/runs/{run_id}/graph")).json()
    assert [node["status"] for node in shown["nodes"]] == ["waiting"]
    # A new version does not change the run.
    changed = {"nodes": [calculates("other", "1 + 1")], "edges": []}
    assert (await bottega.client.put("/v1/graphs/deep", json=changed)).status_code == 200
    path = f"/v1/interrupts/{found['id']}/resolve"
    assert (await bottega.client.post(path, json={"answer": {"ok": True}})).status_code == 200
    ended, log = await end_of(bottega, run_id)
    assert ended["output"] == "yes's answer"
    assert nodes_of(log)["top/low/check"] == "completed"


async def children_of(bottega: Running, run_id: str) -> list[dict[str, Any]]:
    found = await bottega.client.get(f"/v1/runs?parent_run_id={run_id}&limit=100")
    items: list[dict[str, Any]] = found.json()["items"]
    return items


@pytest.mark.parametrize("kind", ["agent", "tool", "graph"])
async def test_many_elements_are_child_runs(bottega: Running, model: FakeModel, kind: str) -> None:
    await store(bottega, "team", ["find", "write"], [edge("find", "write")])
    node = {
        "agent": {"agent": "read"},
        "tool": calculates("read", {"from": "item", "pointer": "/n"}),
        "graph": inner("read", "team"),
    }[kind]
    await define_map(bottega, node, spread_above=2, concurrency=2)
    items = [{"n": f"{number} * 2"} for number in range(5)]

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "split":
            return list_of(*items)
        if named(request) in ("read", "find"):
            assert "Shared context from split" not in str(request["messages"])
            return text(f"about {request['messages'][-1]['content']}")
        if named(request) == "write":
            return text("wrote " + request["messages"][1]["content"].split("about ")[1][:12])
        return text("joined")

    model.decide = decide
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "joined"), found
    assert nodes_of(log) == dict.fromkeys(("split", "read", "join"), "completed")
    got = prompts(model, "join")[0][1]["content"]
    said = {
        "agent": [f'about {{"n":"{number} * 2"}}' for number in range(5)],
        "tool": [number * 2 for number in range(5)],
        "graph": [f'wrote {{"n":"{number} * 2"' for number in range(5)],
    }[kind]
    assert json.dumps(said, separators=(",", ":")) in got
    children = await children_of(bottega, found["id"])
    assert [each["status"] for each in children] == ["completed"] * 5
    used = sum(each["usage"]["input"] for each in children)
    assert found["usage"]["input"] > used > (-1 if kind == "tool" else 0)


async def test_a_failed_child_run_ends_the_others(bottega: Running, model: FakeModel) -> None:
    await define_map(bottega, {"agent": "read"}, spread_above=1, concurrency=3)

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "split":
            return list_of("good", "bad", *["slow"] * 8)
        if request["messages"][-1]["content"] == "bad":
            return http_error(400)
        return text("fine") if named(request) == "join" else text("read")

    model.decide = decide
    found, log = await run(bottega)
    assert found["status"] == "failed"
    assert found["error"]["code"] == "model_bad_request"
    assert "element 1" in found["error"]["message"]
    assert nodes_of(log)["join"] == "skipped"


async def test_elements_share_the_budget_of_their_run(bottega: Running, model: FakeModel) -> None:
    await define_map(bottega, {"agent": "read"}, spread_above=1, on_error="collect")
    model.decide = says(split=list_of(*"abcdef"))
    found, _ = await run(bottega, token_budget=1_000_000)
    assert found["status"] == "completed", found
    children = await children_of(bottega, found["id"])
    assert len(children) == 6
    assert all(0 < each["token_budget"] < 1_000_000 for each in children)


async def test_readers_of_a_long_list_get_its_head_and_tail(
    bottega: Running, model: FakeModel
) -> None:
    await define_map(bottega, {"agent": "read"})
    said = "about a page " * 400

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "split":
            return list_of(*range(20))
        if named(request) == "read":
            return text(f"{said}{request['messages'][-1]['content']}")
        if request["messages"][-1]["role"] == "tool":
            return text("joined")
        asked = json.loads(re.findall(r"{.*}", request["messages"][1]["content"])[0])
        assert len(asked["head"]) == len(asked["tail"]) == 4096
        assert asked["bytes"] > 32_768
        return calls(("read_file", {"path": asked["file"], "offset": 40_000, "limit": 100}))

    model.decide = decide
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "joined"), found
    (got,) = [each["data"]["result"] for each in log if each["type"] == "tool.completed"]
    assert got["content"] in said * 2
    whole = json.dumps([f"{said}{number}" for number in range(20)], separators=(",", ":"))
    assert [each["data"].get("content") for each in log].count(whole) == 1
    shown = (await bottega.client.get(f"/v1/runs/{found['id']}/graph")).json()
    assert shown["nodes"][1]["published"]["content"] == whole


async def test_a_dry_run_asks_the_agents_of_a_sub_graph(bottega: Running) -> None:
    await store(bottega, "team", ["find", "write"], [edge("find", "write")])
    loop = {"until": {"feature": "output", "op": "eq", "value": "x"}, "max": 3}
    nodes = ["ask", inner("research", "team", loop=loop), "last"]
    await define(bottega, nodes, [edge("ask", "research"), edge("research", "last")])
    answer = await bottega.client.post("/v1/graphs/g/dry-run", json={"input": "Build it."})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [task["agent"] for task in found["tasks"]] == ["ask", "find", "write", "last"]
    assert [node["status"] for node in found["nodes"]] == ["completed"] * 3
    assert [each["code"] for each in found["warnings"]] == ["dry_run_once"]
    assert [each["source"] for each in found["tasks"][3]["received"]] == ["research"]


@pytest.mark.parametrize("spread_above", [50, 1])
async def test_a_fork_does_the_elements_after_its_node_again(
    bottega: Running, model: FakeModel, spread_above: int
) -> None:
    await define_map(bottega, {"agent": "read"}, spread_above=spread_above)
    model.decide = says(split=list_of("a", "b"))
    found, _ = await run(bottega)
    model.requests.clear()
    path = f"/v1/runs/{found['id']}/fork"
    forked = await bottega.client.post(path, json={"node": "join"})
    assert forked.status_code == 202, forked.text
    ended, _ = await end_of(bottega, forked.json()["id"])
    assert ended["output"] == "join's answer"
    assert [named(request) for request in model.requests] == ["join"]
    assert "read's answer" in prompts(model, "join")[0][1]["content"]
    model.requests.clear()
    replaced = {"node": "split", "publication": '{"items": ["c", "d", "e"]}'}
    forked = await bottega.client.post(path, json=replaced)
    assert forked.status_code == 202, forked.text
    ended, _ = await end_of(bottega, forked.json()["id"])
    assert ended["status"] == "completed"
    assert sorted(each[-1]["content"] for each in prompts(model, "read")) == ["c", "d", "e"]


async def test_tasks_of_a_sub_graph_are_below_its_node(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "team", ["find"], [])
    each = {"from": "run", "pointer": "/metadata/list"}
    await define(bottega, [inner("each", "team", for_each=each)], [])
    model.decide = says()
    found, log = await run(bottega, metadata={"list": ["a", "b"]})
    (node,) = [
        event["task_id"]
        for event in log
        if event["type"] == "node.started" and event["data"]["node"] == "each"
    ]
    started = [event for event in log if event["type"] == "agent.started"]
    assert [event["parent_task_id"] for event in started] == [node, node]
    tasks = (await bottega.client.get(f"/v1/runs/{found['id']}/tasks")).json()["items"]
    assert [each["agent"] for each in tasks] == ["find", "find"]


async def test_drawings_say_what_a_node_runs(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "team", ["find"], [])
    loop = {"until": {"feature": "output", "op": "exists"}, "max": 3}
    each = {"from": "run", "pointer": "/metadata/list"}
    await define(bottega, [inner("twice", "team", loop=loop, for_each=each)], [])
    words = "graph team, for each of run/metadata/list, until output exists, 3 turns at most"
    drawn = await bottega.client.get("/v1/graphs/g/drawing?format=mermaid")
    assert f'n0["twice: {words}"]' in drawn.text
    model.decide = says()
    found, _ = await run(bottega, metadata={"list": ["a"]})
    drawn = await bottega.client.get(f"/v1/graphs/g/drawing?run_id={found['id']}")
    assert f"<title>{words}; published, version 1</title>" in drawn.text


async def test_child_runs_end_with_their_parent_and_are_so_many_at_a_time(
    bottega: Running, model: FakeModel
) -> None:
    await define_map(bottega, {"agent": "read"}, spread_above=1, concurrency=2)
    opened = asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "split":
            return list_of(*"abcde")
        return gated(opened, text("late"))

    model.decide = decide
    run_id = await start(bottega)
    await until(lambda: children_of(bottega, run_id), lambda found: len(found) == 2)
    await until(lambda: len(prompts(model, "read")), lambda asked: asked == 2)
    assert len(await children_of(bottega, run_id)) == 2
    assert (await bottega.client.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
    found, _ = await end_of(bottega, run_id)
    assert found["status"] == "cancelled"
    ended = await until(
        lambda: children_of(bottega, run_id),
        lambda items: all(each["status"] == "cancelled" for each in items),
    )
    assert len(ended) == 2


async def test_a_run_waits_for_its_elements_without_a_worker(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.engine.waiting.AWAITED_HERE_S", 0.0)
    await define_map(bottega, {"agent": "read"}, spread_above=1, concurrency=2)
    opened = asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "split":
            return list_of(*"abcde")
        said = text(f"{named(request)} {request['messages'][-1]['content']}")
        return gated(opened, said) if named(request) == "read" else said

    model.decide = decide
    run_id = await start(bottega)

    async def state() -> dict[str, Any]:
        found: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
        return found

    await until(state, lambda found: found["status"] == "waiting")
    opened.set()
    found, _ = await end_of(bottega, run_id)
    assert found["status"] == "completed", found
    assert found["attempts"][-1]["cause"] == "children"
    asked = sorted(each[-1]["content"] for each in prompts(model, "read"))
    assert asked == list("abcde")
    assert '["read a","read b","read c","read d","read e"]' in str(prompts(model, "join"))


async def streamed(
    bottega: Running, run_id: str, query: str = "children=true"
) -> AsyncIterator[tuple[str | None, dict[str, Any]]]:
    """Yield the ids and the data of a stream's events, to its end."""
    path, seq = f"/v1/runs/{run_id}/stream?{query}", None
    async with bottega.client.stream("GET", path) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                seq = line[4:]
            elif line.startswith("data: "):
                yield seq, json.loads(line[6:])
                seq = None


async def test_a_stream_carries_the_child_runs_too(bottega: Running, model: FakeModel) -> None:
    await define_map(bottega, {"agent": "read"}, spread_above=1, concurrency=2)
    opened = asyncio.Event()

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) == "split":
            return list_of(*"abc")
        said = text(f"{named(request)} {request['messages'][-1]['content']}")
        return gated_within(opened, said, events=2) if named(request) == "read" else said

    model.decide = decide
    run_id = await start(bottega)
    found = []
    async for seq, event in streamed(bottega, run_id):
        if event["type"] == "llm.delta" and event["agent"] == "read":
            opened.set()  # only then does a child run end
        found.append(event)
        assert event["type"] == "end" or (seq == str(event["seq"])) == (event["run_id"] == run_id)
    assert [each["type"] for each in found[-2:]] == ["run.completed", "end"]
    children = {each["id"] for each in await children_of(bottega, run_id)}
    of_children = [each for each in found[:-1] if each["run_id"] != run_id]
    assert {each["run_id"] for each in of_children} == children
    for child in children:
        log = [each for each in of_children if each["run_id"] == child and each["seq"]]
        assert [each["seq"] for each in log] == list(range(1, len(log) + 1))
        assert log[-1]["type"] == "run.completed"
    own = [event async for _, event in streamed(bottega, run_id, "after=0")]
    assert own[:-1] == [each for each in found[:-1] if each["run_id"] == run_id and each["seq"]]


@pytest.mark.parametrize("spread_above", [50, 1])
async def test_elements_and_turns_of_all_levels_are_counted(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch, spread_above: int
) -> None:
    monkeypatch.setattr("bottega.engine.graph_run.MOST_PARTS", 9)
    never = {"feature": "output", "op": "eq", "value": "done"}
    loop = {"until": never, "max": 4, "on_max": "continue"}
    each = {"from": "run", "pointer": "/metadata/list", "spread_above": spread_above}
    await store(bottega, "turn", ["draft"], [])
    await store(bottega, "item", [inner("improve", "turn", loop=loop)], [])
    await define(bottega, [inner("each", "item", for_each=each)], [])
    model.decide = says()
    found, _ = await run(bottega, metadata={"list": ["a"]})
    assert found["status"] == "completed", found  # 1 element, 1 graph and 4 turns
    found, _ = await run(bottega, metadata={"list": ["a", "b"]})
    if spread_above == 1:
        assert found["status"] == "completed", found  # 2 elements; 5 in each child run
        return
    assert found["status"] == "failed"
    assert found["error"]["code"] == "too_many_items"
    assert "9 elements and turns" in found["error"]["message"]


async def test_child_runs_store_only_so_much_of_what_their_node_received(
    bottega: Running, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_each = {"from": "run", "pointer": "/metadata/list", "spread_above": 1}
    await define(bottega, ["lead", {"agent": "read", "for_each": for_each}], [edge("lead", "read")])
    model.decide = says(lead=[text("z" * 9_000)] * 2)
    found, _ = await run(bottega, metadata={"list": ["a", "b"]})
    assert found["status"] == "completed", found
    query = "SELECT bytes FROM runs WHERE id::text = $1"
    for each in await children_of(bottega, found["id"]):
        assert await bottega.owner.fetchval(query, each["id"]) > 9_000
    assert await bottega.owner.fetchval(query, found["id"]) > 27_000
    monkeypatch.setattr("bottega.engine.graph_run.MOST_RECEIVED", 17_999)
    found, _ = await run(bottega, metadata={"list": ["a", "b"]})
    assert found["status"] == "failed"
    assert found["error"]["code"] == "too_many_items"
    assert "spread_above" in found["error"]["message"]
    assert not await children_of(bottega, found["id"])


@pytest.mark.parametrize("spread_above", [50, 0])
async def test_elements_have_the_same_results_in_child_runs(
    bottega: Running, model: FakeModel, spread_above: int
) -> None:
    def each_of(name: str, **more: Any) -> dict[str, Any]:
        return {"from": "run", "pointer": f"/metadata/{name}", **more}

    nodes = [
        {"agent": "write", "for_each": each_of("pages")},
        {"agent": "read", "for_each": each_of("places", spread_above=spread_above)},
    ]
    await store(bottega, "g", nodes, [edge("write", "read")])
    said = "about a page " * 3_000

    def decide(request: dict[str, Any]) -> Reply:
        assert "response_format" not in request, "the schema is of the run's answer, the list"
        if named(request) == "write":
            return text(said)
        if request["messages"][-1]["role"] == "tool":
            return text("it is " + json.loads(request["messages"][-1]["content"])["content"])
        asked = json.loads(re.findall(r"{.*}", request["messages"][1]["content"])[0])
        place = int(re.findall(r"\d+", request["messages"][-1]["content"])[-1])
        return calls(("read_file", {"path": asked["file"], "offset": place, "limit": 12}))

    model.decide = decide
    lists = {"pages": ["a"], "places": [13 * 1_000 + 2, 13 * 2_000 + 2]}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    found, _ = await run(bottega, metadata=lists, output_schema=schema)
    assert found["status"] == "completed", found
    assert found["output_json"] == ["it is about a page"] * 2
