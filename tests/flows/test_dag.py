"""DAG mode: the graph's agents without a coordinator."""

import asyncio
from typing import Any

import pytest

from tests.fake_model import FakeModel, Reply, calls, gated, http_error, text
from tests.flows.test_agent_data import create
from tests.service import Running
from tests.team import define_graph, systems


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


DIAMOND = (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))


def named(request: dict[str, Any]) -> str:
    """Return the agent of a request, by the name in its system message."""
    return systems(request)[0].removeprefix("You are ").removesuffix(".")


def says(**replies: Reply) -> Any:
    """Return a model with answers by agent name; the default is ``<name>'s answer``."""
    return lambda request: replies.get(named(request), text(f"{named(request)}'s answer"))


async def run_dag(bottega: Running, graph: str = "g") -> dict[str, Any]:
    answer = await bottega.client.post(
        "/v1/runs?wait=30", json={"mode": "dag", "graph": graph, "input": "The question."}
    )
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


async def test_every_agent_is_asked_once_its_predecessors_have_answered(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", *DIAMOND)
    model.decide = says()
    run = await run_dag(bottega)
    assert (run["status"], run["output"]) == ("completed", "d's answer")
    asked = {named(request): request for request in model.requests}
    assert len(model.requests) == 4
    assert named(model.requests[0]) == "a"
    assert named(model.requests[3]) == "d"
    for request in model.requests:
        assert [message["role"] for message in request["messages"]] == ["system", "user"]
        assert request["messages"][-1]["content"].split("\n\n")[-1] == "The question."
    context = [message.split("\n")[0] for message in systems(asked["d"])[1:]]
    assert context == ["Shared context from b:", "Shared context from c:"]
    assert run["usage"]["model_calls"] == 4
    tasks = (await bottega.client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
    assert {task["agent"] for task in tasks} == {"a", "b", "c", "d"}
    assert {(task["status"], task["parent_id"], task["depth"]) for task in tasks} == {
        ("completed", None, 0)
    }


async def test_independent_agents_work_concurrently(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", *DIAMOND)
    gate = asyncio.Event()
    model.decide = says(b=gated(gate, text("b")), c=gated(gate, text("c")))
    running = asyncio.ensure_future(run_dag(bottega))
    await model.received(3)  # b and c have both asked, and neither has an answer
    assert {named(request) for request in model.requests[1:]} == {"b", "c"}
    gate.set()
    assert (await running)["status"] == "completed"


async def test_several_sinks_answer_by_name(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"), ("a", "c"))
    model.decide = says()
    run = await run_dag(bottega)
    assert run["output"] == {"b": "b's answer", "c": "c's answer"}


async def test_a_failed_agent_fails_its_descendants_only(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"), ("b", "c"), ("c", "d"), ("a", "e"))
    model.decide = says(b=http_error(400, message="no"))
    run = await run_dag(bottega)
    assert run["status"] == "failed"
    assert run["output"] == {"a": "a's answer", "e": "e's answer"}
    assert run["error"]["code"] == "agent_failed"
    assert "failed: b (" in run["error"]["message"]
    assert run["error"]["message"].endswith("skipped because of that: c, d")
    assert sorted(named(request) for request in model.requests) == ["a", "b", "e"]
    tasks = (await bottega.client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
    states = {task["agent"]: task["status"] for task in tasks}
    assert states == {
        "a": "completed",
        "b": "failed",
        "c": "failed",
        "d": "failed",
        "e": "completed",
    }


async def test_a_dag_over_its_time_stops_all_its_agents(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "c"), ("b", "c"))
    model.decide = says(a=gated(asyncio.Event(), text("")), b=gated(asyncio.Event(), text("")))
    answer = await bottega.client.post(
        "/v1/runs?wait=30",
        json={"mode": "dag", "graph": "g", "input": "x", "timeout_s": 0.3},
    )
    assert answer.json()["status"] == "timeout"
    await model.disconnected(2)
    tasks = (await bottega.client.get(f"/v1/runs/{answer.json()['id']}/tasks")).json()["items"]
    assert {task["status"] for task in tasks} == {"cancelled"}


@pytest.mark.parametrize("policy", ["tool_results", "full_history"])
async def test_provenance_names_the_inputs_actually_given(
    bottega: Running, model: FakeModel, policy: str
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"), ("x", "b"))
    await bottega.client.delete("/v1/graphs/g/edges?source=x&target=b")
    added = await bottega.client.post(
        "/v1/graphs/g/edges", json={"source": "x", "target": "b", "policy": policy}
    )
    assert added.status_code == 200
    model.decide = says()
    run = await run_dag(bottega)
    items = (await bottega.client.get(f"/v1/runs/{run['id']}/context/b")).json()["items"]
    request = next(request for request in model.requests if named(request) == "b")
    given = systems(request)[1:]
    assert [item["source"] for item in items] == ["a", "x"]
    assert [item["policy"] for item in items] == ["final_response_only", policy]
    for item, message in zip(items, given, strict=True):
        assert f">{item['content']}</shared-context-" in message
        assert item["edge"] == [item["source"], "b"]
    assert (await bottega.client.get(f"/v1/runs/{run['id']}/context/a")).json() == {"items": []}
    assert (await bottega.client.get(f"/v1/runs/{run['id']}/context/zz")).status_code == 404


@pytest.mark.parametrize("said", ["so far", ""])
async def test_a_sink_without_iterations_left_ends_like_any_run(
    bottega: Running, model: FakeModel, said: str
) -> None:
    """Check that a text becomes the output, and that the run fails without one."""
    tools = [{"type": "builtin", "name": "current_time"}]
    await create(bottega, "b", max_iterations=1, tools=tools)
    await create(bottega, "a")
    edges = [{"source": "a", "target": "b"}]
    await bottega.client.post("/v1/graphs", json={"name": "g", "edges": edges})
    model.decide = says(b=calls(("current_time", {}), content=said))
    run = await run_dag(bottega)
    alone = await bottega.client.post("/v1/runs?wait=30", json={"agent": "b", "input": "x"})
    tasks = (await bottega.client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
    for found in (run, alone.json()):
        assert found["stop_reason"] == "max_iterations"
        end = "agent.completed" if said else "agent.failed"
        path = f"/v1/runs/{found['id']}/events"
        log = (await bottega.client.get(path)).json()["items"]
        ends = ("agent.completed", "agent.failed")
        assert [e["type"] for e in log if e["type"] in ends and e["agent"] == "b"] == [end]
        if said:
            assert (found["status"], found["output"]) == ("completed", "so far")
            assert found["error"] is None
        else:
            assert found["status"] == "failed"
    assert {each["agent"]: each["status"] for each in tasks}["b"] == run["status"]


async def test_an_unfinished_text_is_not_published(bottega: Running, model: FakeModel) -> None:
    """Check that successors of an agent whose iterations ran out fail."""
    tools = [{"type": "builtin", "name": "current_time"}]
    await create(bottega, "a", max_iterations=1, tools=tools)
    await create(bottega, "b")
    edges = [{"source": "a", "target": "b"}]
    await bottega.client.post("/v1/graphs", json={"name": "g", "edges": edges})
    model.decide = says(a=calls(("current_time", {}), content="so far"))
    run = await run_dag(bottega)
    assert (run["status"], run["stop_reason"]) == ("failed", "max_iterations")
    assert "a (no final answer within 1 iteration" in run["error"]["message"]
    assert [named(request) for request in model.requests] == ["a"]
