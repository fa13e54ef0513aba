"""The time of a node that is a graph: who is stopped, what is counted, and what a crash keeps."""

import asyncio
from typing import Any

import pytest

from tests.fake_model import FakeModel, Reply, gated, text
from tests.flows.test_dag import named
from tests.flows.test_deciding_graphs import (
    asks,
    define,
    edge,
    end_of,
    interrupt_of,
    nodes_of,
    run,
    says,
    start,
)
from tests.flows.test_graph_judges import Killer, finish, served
from tests.flows.test_nested_graph_judges import define as define_all
from tests.flows.test_nested_graphs import inner, store
from tests.service import Running
from tests.waiting import until


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


def never() -> Reply:
    return gated(asyncio.Event(), text(""))


@pytest.mark.deep
async def test_a_graph_in_a_node_has_its_own_time(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "deep", ["quick", "slow"], [edge("quick", "slow")])
    await store(bottega, "team", ["lead", inner("job", "deep")], [edge("lead", "job")])
    node = inner("sub", "team", timeout_s=3.0, on_error="continue")
    await define(bottega, [node, "next"], [edge("sub", "next")])
    shown = (await bottega.client.get("/v1/graphs/g")).json()
    assert shown["nodes"][0]["timeout_s"] == 3.0
    model.decide = says(slow=never())
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "next's answer")
    failed = {each["data"]["node"]: each["data"] for each in log if each["type"] == "node.failed"}
    error = {"code": "timeout", "message": "'sub' has not answered within 3 s"}
    assert {name: each["error"] for name, each in failed.items()} == {
        "sub/job/slow": error,
        "sub/job": error,
        "sub": error,
    }
    assert [failed[name].get("stopped_by") for name in failed] == ["sub", "sub", None]
    assert nodes_of(log)["sub/job/quick"] == "completed"
    tasks = (await bottega.client.get(f"/v1/runs/{found['id']}/tasks")).json()["items"]
    assert {each["agent"]: each["status"] for each in tasks} == {
        "lead": "completed",
        "quick": "completed",
        "slow": "failed",
        "next": "completed",
    }
    answered = [each for each in log if each["type"] == "llm.completed"]
    assert found["usage"]["model_calls"] == len(answered) == 3


@pytest.mark.deep
async def test_a_graph_that_was_too_slow_is_tried_again(bottega: Running, model: FakeModel) -> None:
    await store(bottega, "team", ["quick", "slow"], [edge("quick", "slow")])
    retry = {"max": 1, "backoff_s": 0.0, "on": ["timeout"]}
    loop = {"until": {"feature": "output", "op": "exists"}, "max": 3}
    await define(bottega, [inner("sub", "team", timeout_s=3.0, retry=retry, loop=loop)], [])
    model.decide = says(slow=[never(), text("done")])
    found, log = await run(bottega)
    assert (found["status"], found["output"]) == ("completed", "done")
    assert nodes_of(log) == {
        "sub": "completed",
        "sub/1/quick": "completed",
        "sub/1/slow": "failed",
        "sub/1/try-2/quick": "completed",
        "sub/1/try-2/slow": "completed",
    }
    assert found["usage"]["model_calls"] == 3


@pytest.mark.deep
async def test_elements_that_are_child_runs_are_stopped(bottega: Running, model: FakeModel) -> None:
    each = {"from": "run", "pointer": "/metadata/pages", "spread_above": 1}
    await store(bottega, "team", [{"agent": "slow", "for_each": each}], [])
    await define(bottega, [inner("sub", "team", timeout_s=4.0)], [])
    model.decide = says(slow=never())
    found, log = await run(bottega, metadata={"pages": ["one", "two"]})
    assert (found["status"], found["error"]["code"]) == ("failed", "timeout")
    assert nodes_of(log) == {"sub": "failed", "sub/slow": "failed"}
    path = f"/v1/runs?parent_run_id={found['id']}"

    async def statuses() -> list[str]:
        items = (await bottega.client.get(path)).json()["items"]
        return [item["status"] for item in items]

    await until(statuses, lambda each: each == ["cancelled", "cancelled"])


async def test_people_take_none_of_a_node_s_time(bottega: Running, model: FakeModel) -> None:
    """Check it with a log in which all happened an hour ago."""
    await store(
        bottega, "team", ["a", asks("check"), "b"], [edge("a", "check"), edge("check", "b")]
    )
    await define(bottega, [inner("sub", "team", timeout_s=30.0)], [])
    model.decide = says()
    run_id = await start(bottega)
    asked = await interrupt_of(bottega, run_id)

    async def status() -> str:
        found: str = (await bottega.client.get(f"/v1/runs/{run_id}")).json()["status"]
        return found

    await until(status, lambda each: each == "waiting")
    await bottega.owner.execute(
        "UPDATE run_steps SET at = at - interval '1 hour' WHERE run_id = $1", run_id
    )
    path = f"/v1/interrupts/{asked['id']}/resolve"
    await bottega.client.post(path, json={"answer": {"ok": True}})
    found, log = await end_of(bottega, run_id)
    assert (found["status"], found["output"]) == ("completed", "b's answer")
    assert nodes_of(log)["sub"] == "completed"


GRAPHS: list[dict[str, Any]] = [
    {"name": "team", "nodes": ["quick", "slow"], "edges": [edge("quick", "slow")]},
    {
        "name": "g",
        "nodes": [inner("sub", "team", timeout_s=3.0, on_error="continue"), "next"],
        "edges": [edge("sub", "next")],
    },
]


@pytest.mark.deep
@pytest.mark.parametrize("killed_at", ["slow", "next"])
async def test_a_graph_that_was_stopped_stays_so_after_a_crash(
    database_url: str, model: FakeModel, killed_at: str
) -> None:
    """Check it with a worker that dies before the record, and one that dies after it."""
    killer = Killer(killed_at)

    def decide(request: dict[str, Any]) -> Reply:
        name = named(request)
        is_killed = killer.meets(name)
        return never() if is_killed or name == "slow" else text(f"{name}'s answer")

    model.decide = decide
    async with served(database_url, model) as (client, port, workers):
        await define_all(client, {}, *GRAPHS)
        found, log = await finish(client, port, workers, {"graph": "g", "input": "Go."}, killer)
    assert (found["status"], found["output"]) == ("completed", "next's answer")
    assert nodes_of(log) == {
        "sub": "failed",
        "sub/quick": "completed",
        "sub/slow": "failed",
        "next": "completed",
    }
    assert found["usage"]["model_calls"] == 2
    if killed_at == "next":
        assert killer.seen == {"quick": 1, "slow": 1, "next": 2}


@pytest.mark.deep
async def test_the_time_before_a_crash_counts(
    database_url: str, model: FakeModel, owner: Any
) -> None:
    """Check it with a log in which all happened an hour before the crash."""
    await owner.execute("SELECT 1")
    killer = Killer("slow")

    def decide(request: dict[str, Any]) -> Reply:
        name = named(request)
        killer.meets(name)
        return never() if name == "slow" else text(f"{name}'s answer")

    model.decide = decide
    long = GRAPHS[1]["nodes"][0] | {"timeout_s": 600.0}
    graphs = [GRAPHS[0], GRAPHS[1] | {"nodes": [long, "next"]}]
    async with served(database_url, model) as (client, port, workers):
        await define_all(client, {}, *graphs)

        async def grow_old() -> None:
            await killer.killed.wait()
            await owner.execute("UPDATE run_steps SET at = at - interval '1 hour'")

        growing = asyncio.ensure_future(grow_old())
        found, log = await finish(client, port, workers, {"graph": "g", "input": "Go."}, killer)
        await growing
    assert (found["status"], nodes_of(log)["sub"]) == ("completed", "failed"), found["error"]
