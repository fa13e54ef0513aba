"""Shared memory that outlives a run."""

import asyncio
from typing import Any

import pytest

from tests.fake_model import FakeModel, gated, http_error, text
from tests.flows.test_dag import named, says
from tests.service import Running
from tests.team import define_graph, systems
from tests.waiting import until


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def dag(bottega: Running, graph: str, session: str | None) -> dict[str, Any]:
    body = {
        "mode": "dag",
        "graph": graph,
        "input": "x",
        "session_id": session,
        "conversation": "none",
    }
    answer = await bottega.client.post("/v1/runs?wait=30", json=body)
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    return run


async def memory(bottega: Running, session: str) -> dict[str, tuple[int, str]]:
    found = (await bottega.client.get(f"/v1/sessions/{session}")).json()
    return {item["agent"]: (item["version"], item["content"]) for item in found["memory"]}


async def test_a_later_run_sees_earlier_publications(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says(a=text("first a"))
    first = await dag(bottega, "g", "s1")
    assert await memory(bottega, "s1") == {"a": (1, "first a"), "b": (1, "b's answer")}

    # The reader alone, in the same session: it sees the other run's publications.
    answer = await bottega.client.post(
        "/v1/runs?wait=30",
        json={"agent": "b", "graph": "g", "input": "again", "session_id": "s1"},
    )
    later = answer.json()
    (context,) = systems(model.requests[-1])[1:]
    assert "first a" in context
    items = (await bottega.client.get(f"/v1/runs/{later['id']}/context/b")).json()["items"]
    assert [(item["source"], item["version"], item["content"]) for item in items] == [
        ("a", 1, "first a")
    ]
    graph = (await bottega.client.get(f"/v1/runs/{later['id']}/graph")).json()
    published = {node["agent"]: node["published"]["version"] for node in graph["nodes"]}
    assert published == {"a": 1, "b": 2}
    assert (await memory(bottega, "s1"))["b"] == (2, "b's answer")

    listed = (await bottega.client.get("/v1/runs?session_id=s1")).json()["items"]
    assert [run["id"] for run in listed] == [first["id"], later["id"]]


async def test_runs_without_the_session_or_of_another_see_nothing_of_it(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says()
    await dag(bottega, "g", "s1")
    for session in (None, "s2"):
        body = {"agent": "b", "graph": "g", "input": "x", "session_id": session, "memory": "off"}
        await bottega.client.post("/v1/runs?wait=30", json=body)
        assert systems(model.requests[-1])[1:] == []
    names = [item["id"] for item in (await bottega.client.get("/v1/sessions")).json()["items"]]
    assert names == ["s1", "s2"]


async def test_concurrent_runs_lose_no_publication(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    gate = asyncio.Event()
    model.decide = says(b=gated(gate, text("b")))
    runs = [asyncio.ensure_future(dag(bottega, "g", "s")) for _ in range(5)]
    await until(lambda: sum(named(request) == "b" for request in model.requests) >= 5)
    gate.set()
    assert {run["status"] for run in await asyncio.gather(*runs)} == {"completed"}
    assert {agent: version for agent, (version, _) in (await memory(bottega, "s")).items()} == {
        "a": 5,
        "b": 5,
    }


async def test_a_failed_run_leaves_what_it_published(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says(b=http_error(400))
    assert (await dag(bottega, "g", "s"))["status"] == "failed"
    assert await memory(bottega, "s") == {"a": (1, "a's answer")}


async def test_what_was_published_is_deleted_and_the_runs_stay(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", ("a", "b"))
    model.decide = says()
    run = await dag(bottega, "g", "s")
    one = await bottega.client.delete("/v1/sessions/s/memory?agent=a")
    assert one.json() == {"id": "s", "removed": {"session_memory": 1}}
    assert await memory(bottega, "s") == {"b": (1, "b's answer")}
    rest = await bottega.client.delete("/v1/sessions/s/memory")
    assert rest.json()["removed"] == {"session_memory": 1}
    assert (await bottega.client.delete("/v1/sessions/s/memory")).json()["removed"] == {}
    assert (await bottega.client.get(f"/v1/runs/{run['id']}")).status_code == 200
    assert (await bottega.client.delete("/v1/sessions/t/memory")).status_code == 404
    await dag(bottega, "g", "s")
    assert (await memory(bottega, "s")).keys() == {"a", "b"}
