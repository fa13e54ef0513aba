"""Parts of a run's nodes: the nodes of a graph, the turns of a loop, elements."""

from typing import Any

import pytest

from tests.fake_model import FakeModel, Reply, http_error, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.flows.test_deciding_graphs import asks, calculates, define, edge, interrupt_of, run, says
from tests.flows.test_deciding_graphs import start as begin
from tests.flows.test_nested_graphs import children_of, inner, store
from tests.service import Running

NEVER = {"feature": "output", "op": "eq", "value": "done"}
LIST = {"from": "run", "pointer": "/metadata/list"}


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def parts(bottega: Running, run_id: str, node: str = "", **query: Any) -> dict[str, Any]:
    wanted = query | ({"node": node} if node else {})
    answer = await bottega.client.get(f"/v1/runs/{run_id}/graph", params=wanted)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def statuses(shown: dict[str, Any]) -> dict[str, str]:
    return {node["name"]: node["status"] for node in shown["nodes"]}


async def test_the_nodes_of_each_turn_are_read(bottega: Running, model: FakeModel) -> None:
    nodes = [calculates("sum", "1 + 1"), "draft", "never"]
    edges = [edge("draft", "sum"), edge("draft", "never", when=NEVER)]
    await store(bottega, "turn", nodes, edges, output="draft")
    loop = {"until": NEVER, "max": 2, "on_max": "continue"}
    await define(bottega, ["a", inner("improve", "turn", loop=loop)], [edge("a", "improve")])
    model.decide = says(draft=[text("one"), text("two")])
    found, log = await run(bottega)
    top = await parts(bottega, found["id"])
    assert [(node["name"], node["has_parts"]) for node in top["nodes"]] == [
        ("a", False),
        ("improve", True),
    ]
    turns = await parts(bottega, found["id"], "improve")
    assert statuses(turns) == {"improve/1": "completed", "improve/2": "completed"}
    assert {(node["type"], node["has_parts"]) for node in turns["nodes"]} == {("graph", True)}
    second = await parts(bottega, found["id"], "improve/2")
    assert statuses(second) == {
        "improve/2/draft": "completed",
        "improve/2/sum": "completed",
        "improve/2/never": "skipped",
    }
    draft, sum_, never = second["nodes"]
    assert (draft["published"]["content"], sum_["published"]["content"]) == ("two", "2")
    assert never["reason"] == "the condition on draft does not hold"
    assert draft["task_id"] == draft["published"]["task_id"]
    assert [(e["source"], e["target"], e["taken"]) for e in second["edges"]] == [
        ("improve/2/draft", "improve/2/sum", True),
        ("improve/2/draft", "improve/2/never", False),
    ]
    began = next(e["seq"] for e in log if e["data"].get("node") == "improve/2/draft")
    before = await parts(bottega, found["id"], "improve", seq=began - 1)
    assert statuses(before) == {"improve/1": "completed"}
    drawn = await bottega.client.get(
        f"/v1/graphs/g/drawing?run_id={found['id']}&node=improve/2&format=svg"
    )
    assert "improve/2/draft" in drawn.text
    assert "<title>skipped: the condition on draft does not hold</title>" in drawn.text


async def test_a_turn_waits_for_people_or_fails_as_its_nodes_do(
    bottega: Running, model: FakeModel
) -> None:
    await store(bottega, "turn", [asks("check", who="run"), "draft"], [edge("draft", "check")])
    loop = {"until": NEVER, "max": 2}
    await define(bottega, [inner("improve", "turn", loop=loop)], [])
    model.decide = says(draft=[text("one"), http_error(400)])
    run_id = await begin(bottega)
    found = await interrupt_of(bottega, run_id)
    assert statuses(await parts(bottega, run_id, "improve")) == {"improve/1": "waiting"}
    path = f"/v1/interrupts/{found['id']}/resolve"
    assert (await bottega.client.post(path, json={"answer": {"ok": True}})).status_code == 200
    await bottega.watch(run_id)
    shown = await parts(bottega, run_id, "improve")
    assert statuses(shown) == {"improve/1": "completed", "improve/2": "failed"}


@pytest.mark.parametrize("spread_above", [50, 1], ids=["tasks", "child runs"])
async def test_elements_are_read(bottega: Running, model: FakeModel, spread_above: int) -> None:
    each = {**LIST, "on_error": "collect", "spread_above": spread_above}
    await store(bottega, "turn", ["draft"], [])
    nodes = [
        {"agent": "read", "for_each": each},
        {**calculates("sum", {"from": "item"}), "for_each": each},
        inner("each", "turn", for_each=each),
    ]
    await define(bottega, nodes, [edge("read", "sum"), edge("sum", "each")])

    def decide(request: dict[str, Any]) -> Reply:
        wrong = named(request) == "read" and request["messages"][-1]["content"] == "1/0"
        return http_error(400) if wrong else text("fine")

    model.decide = decide
    found, _ = await run(bottega, metadata={"list": ["1+1", "1/0"]})
    run_id = found["id"]
    children = {child["id"] for child in await children_of(bottega, run_id)}
    for name in ("read", "sum"):
        shown = await parts(bottega, run_id, name)
        assert statuses(shown) == {f"{name}/0": "completed", f"{name}/1": "failed"}
        assert all(node["task_id"] and not node["has_parts"] for node in shown["nodes"])
        runs = {node["run_id"] for node in shown["nodes"]} - {None}
        assert len(runs) == (2 if spread_above == 1 else 0)
        assert runs <= children
        if spread_above == 50 and name == "read":
            task = shown["nodes"][0]["task_id"]
            path = f"/v1/runs/{run_id}/messages?task_id={task}"
            assert "fine" in (await bottega.client.get(path)).text
    shown = await parts(bottega, run_id, "each")
    assert statuses(shown) == {"each/0": "completed", "each/1": "completed"}
    last = shown["nodes"][1]
    if spread_above == 50:
        assert statuses(await parts(bottega, run_id, "each/1")) == {"each/1/draft": "completed"}
        return
    # A child run has its element alone, and not the other nodes of its parent's graph.
    for node in ("", "each"):
        assert statuses(await parts(bottega, last["run_id"], node)) == {"each/1": "completed"}
    below = await parts(bottega, last["run_id"], "each/1")
    assert statuses(below) == {"each/1/draft": "completed"}
    refused = await bottega.client.get(f"/v1/runs/{run_id}/graph?node=each/1")
    assert (refused.status_code, refused.json()["code"]) == (404, "no_node")
    assert last["run_id"] in refused.json()["detail"]


async def test_a_try_of_a_graph_is_a_part(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "turn", ["draft"], [])
    retry = {"max": 1, "backoff_s": 0.0, "on": ["model_bad_request"]}
    await define(bottega, [inner("improve", "turn", retry=retry)], [])
    model.decide = says(draft=[http_error(400), text("two")])
    found, _ = await run(bottega)
    shown = await parts(bottega, found["id"], "improve")
    assert statuses(shown) == {"improve/draft": "failed", "improve/try-2": "completed"}
    again = await parts(bottega, found["id"], "improve/try-2")
    assert statuses(again) == {"improve/try-2/draft": "completed"}
    assert again["nodes"][0]["task_id"] != shown["nodes"][0]["task_id"]


@pytest.mark.parametrize("node", ["nobody", "a/1", "improve/7", "improve/1/nobody", "/", "a//b"])
async def test_an_unknown_node_is_refused(bottega: Running, model: FakeModel, node: str) -> None:
    await store(bottega, "turn", ["draft"], [])
    loop = {"until": NEVER, "max": 1, "on_max": "continue"}
    await define(bottega, ["a", inner("improve", "turn", loop=loop)], [edge("a", "improve")])
    model.decide = says()
    found, _ = await run(bottega)
    answer = await bottega.client.get(f"/v1/runs/{found['id']}/graph", params={"node": node})
    assert (answer.status_code, answer.json()["code"]) == (404, "no_node"), answer.text
    assert answer.json()["detail"].startswith(f"there is no '{node.partition('/')[0]}")
    assert (await parts(bottega, found["id"], "a"))["nodes"] == []


async def test_a_plain_graph_has_no_parts(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "b")
    await define(bottega, ["a"], [edge("a", "b")])
    model.decide = says()
    found, _ = await run(bottega)
    shown = await parts(bottega, found["id"])
    assert {(node["has_parts"], node["run_id"]) for node in shown["nodes"]} == {(False, None)}
    tasks = (await bottega.client.get(f"/v1/runs/{found['id']}/tasks")).json()["items"]
    assert {node["task_id"] for node in shown["nodes"]} == {task["id"] for task in tasks}
