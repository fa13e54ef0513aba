"""A run's graph as it stood at each event of its log."""

from typing import Any

import pytest

from tests.fake_model import FakeModel, http_error, text
from tests.flows.test_dag import DIAMOND
from tests.flows.test_deciding_graphs import (
    define_decision,
    end_of,
    interrupt_of,
    run,
    says,
    start,
)
from tests.service import Running
from tests.team import define_graph


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def graph_at(bottega: Running, run_id: str, seq: int | str | None = None) -> dict[str, Any]:
    query = "" if seq is None else f"?seq={seq}"
    answer = await bottega.client.get(f"/v1/runs/{run_id}/graph{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def statuses(shown: dict[str, Any]) -> dict[str, str]:
    return {node["name"]: node["status"] for node in shown["nodes"]}


def expected_at(log: list[dict[str, Any]], seq: int) -> dict[str, Any]:
    """Return what the events up to ``seq`` say, by rules that know nothing of replays."""
    found: dict[str, Any] = {}
    edges: dict[tuple[str, str], bool] = {}
    published: dict[str, int] = {}
    for event in log[:seq]:
        data = event["data"]
        if event["type"].startswith("node."):
            state = event["type"].removeprefix("node.").replace("started", "running")
            found[data["node"]] = state
        elif event["type"] == "edge.decided":
            edges[data["source"], data["target"]] = data["taken"]
        elif event["type"] == "memory.published":
            published[data.get("node", event["agent"])] = data["version"]
        elif event["type"] in ("agent.waiting", "run.resumed"):
            waits = event["type"] == "agent.waiting"
            found = {
                name: ("waiting" if waits else "running") if name == "check" else state
                for name, state in found.items()
            }
    return {"statuses": found, "edges": edges, "published": published}


async def test_it_stands_as_its_log_says_at_every_event(bottega: Running, model: FakeModel) -> None:
    await define_decision(bottega)
    model.decide = says()
    run_id = await start(bottega)
    found = await interrupt_of(bottega, run_id)
    await bottega.client.post(
        f"/v1/interrupts/{found['id']}/resolve", json={"answer": {"ok": True}}
    )
    _, log = await end_of(bottega, run_id)
    seen = set()
    for seq in range(1, len(log) + 1):
        shown = await graph_at(bottega, run_id, seq)
        assert shown["seq"] == seq
        expected = expected_at(log, seq)
        pending = dict.fromkeys(("a", "check", "yes", "no"), "pending")
        assert statuses(shown) == pending | expected["statuses"], seq
        seen |= set(statuses(shown).values())
        taken = {
            (each["source"], each["target"]): each["taken"]
            for each in shown["edges"]
            if each["taken"] is not None
        }
        assert taken == expected["edges"], seq
        versions = {
            node["name"]: node["published"]["version"]
            for node in shown["nodes"]
            if node["published"]
        }
        assert versions == expected["published"], seq
    assert seen == {"pending", "running", "waiting", "completed", "skipped"}
    assert await graph_at(bottega, run_id) == await graph_at(bottega, run_id, len(log))


async def test_a_plain_graph_stands_as_its_agents_do(bottega: Running, model: FakeModel) -> None:
    await define_graph(bottega.client, "g", *DIAMOND)
    model.decide = says(c=http_error(400, message="no"))
    found, log = await run(bottega)
    assert found["status"] == "failed"
    first = await graph_at(bottega, found["id"], 1)
    assert set(statuses(first).values()) == {"pending"}
    seen = [statuses(await graph_at(bottega, found["id"], each["seq"])) for each in log]
    assert [each["a"] for each in seen] == sorted(
        (each["a"] for each in seen), key=["pending", "running", "completed"].index
    )
    assert {each["a"] for each in seen} == {"pending", "running", "completed"}
    assert seen[-1] == {"a": "completed", "b": "completed", "c": "failed", "d": "failed"}


async def test_what_the_session_knew_stands_from_the_first_event(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", *DIAMOND)
    model.decide = says(a=[text("old"), text("new")])
    session = {"session_id": "s", "conversation": "none"}
    await run(bottega, **session)
    found, _ = await run(bottega, **session)
    first = {each["name"]: each for each in (await graph_at(bottega, found["id"], 1))["nodes"]}
    assert (first["a"]["published"]["content"], first["a"]["status"]) == ("old", "pending")
    last = {each["name"]: each for each in (await graph_at(bottega, found["id"]))["nodes"]}
    assert (last["a"]["published"]["content"], last["a"]["status"]) == ("new", "completed")
    assert last["a"]["published"]["version"] == first["a"]["published"]["version"] + 1


@pytest.mark.parametrize("seq", ["0", "-1", "x", "1.5", "beyond", "99999999999999999999"])
async def test_an_event_that_there_is_not_is_refused(
    bottega: Running, model: FakeModel, seq: str
) -> None:
    await define_graph(bottega.client, "g", *DIAMOND)
    model.decide = says()
    found, log = await run(bottega)
    asked = len(log) + 1 if seq == "beyond" else seq
    answer = await bottega.client.get(f"/v1/runs/{found['id']}/graph?seq={asked}")
    assert answer.status_code == 422, answer.text
    assert "seq" in answer.text
    if seq == "beyond":
        assert f"from 1 to {len(log)}" in answer.json()["detail"]
