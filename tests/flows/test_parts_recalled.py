"""Parts of runs: what nodes and sub-agents did is given to the same part of later runs."""

import asyncio
import functools
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from bottega.agents.parts import estimated_tokens
from bottega.memory.episodes.episode import episode_id_of
from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, gated, text
from tests.flows.test_agent_data import create
from tests.flows.test_child_runs import children_of
from tests.flows.test_dag import named
from tests.service import Running, running
from tests.waiting import until

TASK = "Write the offer of the paper mill in Fabriano for blotting paper."
REASON = 'Failed because: the answer did not contain "VAT" (check).'
CHECK = [{"type": "contains", "value": "VAT"}]


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    guest_model.decide = careful
    return guest_model


def careful(request: dict[str, Any]) -> Reply:
    """Answer as the agent that is asked: `pricer` forgets the VAT, unless its prompt names it."""
    name, prompt = named(request), str(request["messages"])
    if name == "pricer":
        return text("90 euros with VAT" if "VAT" in prompt else "90 euros")
    if name == "clerk" and not any(each["role"] == "tool" for each in request["messages"]):
        return calls(("pricer", {"query": "What does blotting paper cost?"}))
    return text(f"{name} has done it")


async def define(bottega: Running, *nodes: Any, **fields: Any) -> None:
    """Store the graph `offers` of three nodes in a row, and their agents."""
    nodes = nodes or ("reader", {"agent": "pricer", "success_check": CHECK}, "writer")
    names = [each if isinstance(each, str) else each["agent"] for each in nodes]
    for name in names:
        await create(bottega, name)
    edges = [{"source": a, "target": b} for a, b in pairwise(names)]
    body = {"name": "offers", "nodes": nodes, "edges": edges, **fields}
    stored = await bottega.client.post("/v1/graphs", json=body)
    assert stored.status_code == 201, stored.text


async def run(bottega: Running, **more: Any) -> dict[str, Any]:
    body = {"mode": "dag", "graph": "offers", "input": TASK, "user": "ada", **more}
    answer = await bottega.client.post("/v1/runs?wait=30", json=body)
    assert answer.status_code == 202, answer.text
    done: dict[str, Any] = answer.json()
    return done


async def parts(bottega: Running, done: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parts of a run's episode by node or agent."""
    found = await bottega.client.get(f"/v1/episodes/{episode_id_of(UUID(done['id']))}")
    assert found.status_code == 200, found.text
    return {each["node"] or each["agent"]: each for each in found.json()["parts"]}


async def recalled_texts(bottega: Running, done: dict[str, Any]) -> dict[str, list[str]]:
    """Return what parts of a run were given of earlier runs, by agent."""
    found: dict[str, list[str]] = {}
    for each in await bottega.frames(f"/v1/runs/{done['id']}/ws"):
        if each["type"] == "context.recalled" and each["task_id"] is not None:
            found.setdefault(each["agent"], []).append(each["data"]["content"])
    return found


def prompt(model: FakeModel, agent: str) -> str:
    """Return the last prompt of an agent."""
    return str([each for each in model.requests if named(each) == agent][-1]["messages"])


async def test_a_node_that_failed_a_check_does_it_right_the_next_time(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega)
    first = await run(bottega)
    assert (first["status"], first["error"]["code"]) == ("failed", "check_failed")
    told = await parts(bottega, first)
    assert list(told) == ["reader", "pricer"], "the writer did not begin"
    assert told["pricer"] == {
        "agent": "pricer",
        "node": "pricer",
        "input": TASK,
        "received": [{"source": "reader", "content": "reader has done it"}],
        "steps": "",
        "output": "90 euros",
        "error": {"code": "check_failed", "message": 'the answer did not contain "VAT"'},
        "verdict": told["pricer"]["verdict"],
    }
    verdict = told["pricer"]["verdict"]
    assert (verdict["outcome"], verdict["by"]) == ("FAILURE", "check")
    assert verdict["reason"] == 'the answer did not contain "VAT"'
    second = await run(bottega)
    assert (second["status"], second["output"]) == ("completed", "writer has done it")
    recalled = await recalled_texts(bottega, second)
    assert recalled["pricer"][0].splitlines()[0] == REASON
    assert recalled["reader"][0].splitlines()[0].startswith("[UNKNOWN")
    assert "writer" not in recalled, "it has not taken part in a run yet"
    assert REASON in prompt(model, "pricer")
    assert "90 euros" in prompt(model, "pricer"), "what it answered then"
    assert (await parts(bottega, second))["pricer"]["verdict"]["outcome"] == "SUCCESS"


async def test_a_sub_agent_is_given_why_its_answer_was_not_good(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "pricer", success_check=CHECK)
    await create(bottega, "clerk", subagents={"names": ["pricer"]})
    asked = {"mode": "orchestrated", "graph": None, "agent": "clerk"}
    first = await run(bottega, **asked)
    assert (first["status"], first["outcome"]["value"]) == ("completed", "UNKNOWN")
    told = (await parts(bottega, first))["pricer"]
    assert (told["node"], told["input"]) == (None, "What does blotting paper cost?")
    assert (told["output"], told["verdict"]["outcome"]) == ("90 euros", "FAILURE")
    second = await run(bottega, **asked)
    assert (await recalled_texts(bottega, second))["pricer"][0].splitlines()[0] == REASON
    assert (await parts(bottega, second))["pricer"]["output"] == "90 euros with VAT"


async def test_a_child_run_is_given_what_its_agent_did_before(
    bottega: Running, model: FakeModel
) -> None:
    asked = "What does blotting paper of the mill in Fabriano cost?"
    wanted = [{"agent": "pricer", "prompt": each} for each in ("Is this a task?", asked)]

    def decide(request: dict[str, Any]) -> Reply:
        done = [each for each in request["messages"] if each["role"] == "tool"]
        if named(request) != "clerk" or len(done) > 1:
            return careful(request)
        if not done:
            return calls(("dispatch_subagents", {"tasks": wanted}))
        tasks = [each["task_id"] for each in swarm.results_in(request)[0]["tasks"]]
        return calls(("await_subagent", {"task_ids": tasks}))

    model.decide = decide
    await create(bottega, "pricer", success_check=CHECK)
    limits = {"mode": "async", "names": ["pricer"], "limits": {"spread_above": 1}}
    await create(bottega, "clerk", subagents=limits)
    begin = {"mode": "orchestrated", "graph": None, "agent": "clerk"}
    first = await run(bottega, **begin)
    assert (await parts(bottega, first))["pricer"]["verdict"]["outcome"] == "FAILURE"
    second = await run(bottega, **begin)
    (child,) = await children_of(bottega, second["id"])
    assert (child["input"].startswith(asked), child["output"]) == (True, "90 euros with VAT")
    frames = await bottega.frames(f"/v1/runs/{child['id']}/ws")
    recalled = next(each["data"] for each in frames if each["type"] == "context.recalled")
    assert recalled["content"].startswith(REASON)


async def test_an_agent_s_own_check_judges_its_node_and_does_not_fail_it(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "clever", success_check=CHECK)
    nodes = [
        "clever",
        {"name": "own", "agent": "clever", "success_check": [{**CHECK[0], "value": "done"}]},
    ]
    await bottega.client.post("/v1/graphs", json={"name": "g", "nodes": nodes})
    done = await run(bottega, graph="g")
    assert done["status"] == "completed"
    told = await parts(bottega, done)
    assert {name: each["verdict"]["outcome"] for name, each in told.items()} == {
        "clever": "FAILURE",
        "own": "SUCCESS",
    }
    again = await run(bottega, graph="g")
    recalled = [each.splitlines()[0] for each in (await recalled_texts(bottega, again))["clever"]]
    assert REASON in recalled
    assert sum(each.startswith("[SUCCESS") for each in recalled) == 1, "each its own part"


JUDGES = [*CHECK, {"type": "judge", "criteria": "The answer names the tax.", "model": None}]
JUDGED_BAD = "Failed because: The tax is missing (judge)."


def judging(passed: bool, reason: str) -> Callable[[dict[str, Any]], Reply]:
    """Return a model whose `pricer` names the VAT, and whose judge says ``reason``."""

    def decide(request: dict[str, Any]) -> Reply:
        if str(request["messages"][0]["content"]).startswith("You judge"):
            return calls(("answer", {"passed": passed, "reason": reason}))
        return text("90 euros with VAT") if named(request) == "pricer" else careful(request)

    return decide


async def judged(bottega: Running, done: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `pricer` once its checks are over."""

    async def pricer() -> dict[str, Any]:
        return (await parts(bottega, done))["pricer"]

    return await until(pricer, lambda part: part["verdict"] is not None)


@pytest.mark.parametrize("is_node", [True, False])
async def test_a_judge_of_an_agent_judges_its_part(
    bottega: Running, model: FakeModel, is_node: bool
) -> None:
    await create(bottega, "pricer", success_check=JUDGES)
    await create(bottega, "clerk", subagents={"names": ["pricer"]})
    graph = {"name": "offers", "nodes": ["pricer"]}
    assert (await bottega.client.post("/v1/graphs", json=graph)).status_code == 201
    begin = {} if is_node else {"mode": "orchestrated", "graph": None, "agent": "clerk"}
    model.decide = judging(False, "The tax is missing.")

    bad = await judged(bottega, first := await run(bottega, **begin))

    assert {**bad["verdict"], "at": None} == {
        "outcome": "FAILURE",
        "reason": "The tax is missing.",
        "by": "judge",
        "at": None,
    }
    shown = (await bottega.client.get(f"/v1/runs/{first['id']}")).json()
    assert (shown["outcome"]["value"], shown["success_check"]) == ("UNKNOWN", None)
    asked = next(each for each in model.requests if "You judge" in str(each["messages"][0]))
    wanted = TASK if is_node else "What does blotting paper cost?"
    assert json.loads(asked["messages"][1]["content"]) == {
        "task": wanted,
        "result": "90 euros with VAT",
    }
    model.decide = judging(True, "The tax is named.")
    second = await run(bottega, **begin)
    assert (await recalled_texts(bottega, second))["pricer"][0].splitlines()[0] == JUDGED_BAD
    assert (await judged(bottega, second))["verdict"]["outcome"] == "SUCCESS"
    rows = "SELECT count(*), count(asked) FROM run_checks c JOIN runs r ON r.id = c.run_id"
    tenant = "SELECT tenant_id FROM runs WHERE id = $1"
    of_tenant = f"{rows} WHERE c.tenant_id = ({tenant})"
    assert tuple(await bottega.owner.fetchrow(of_tenant, UUID(first["id"]))) == (2, 0)


async def test_a_simple_check_that_fails_asks_no_judge(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "pricer", success_check=JUDGES)
    await bottega.client.post("/v1/graphs", json={"name": "offers", "nodes": ["pricer"]})
    done = await run(bottega)
    verdict = (await parts(bottega, done))["pricer"]["verdict"]
    assert (verdict["outcome"], verdict["by"]) == ("FAILURE", "check")
    assert len(model.requests) == 1


async def test_the_check_of_a_graph_judges_its_runs(bottega: Running, model: FakeModel) -> None:
    checks = [{"type": "contains", "value": "VAT"}, {"type": "equals", "value": 1}]
    await define(bottega, "reader", "writer", success_check=checks)
    stored = (await bottega.client.get("/v1/graphs/offers")).json()
    assert stored["success_check"] == checks
    done = await run(bottega)

    async def shown() -> dict[str, Any]:
        found: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{done['id']}")).json()
        return found

    judged = await until(shown, lambda found: found["outcome"]["source"] is not None)
    why = 'the answer did not contain "VAT"'
    assert judged["outcome"] == {"value": "FAILURE", "source": "check", "reason": why}
    assert [each["passed"] for each in judged["success_check"]["results"]] == [False, False]
    bad = {"name": "h", "nodes": ["reader"], "success_check": [{"type": "python", "name": "no"}]}
    refused = await bottega.client.post("/v1/graphs", json=bad)
    assert (refused.status_code, refused.json()["code"]) == (422, "unknown_plugin")
    for check in ({"type": "judge", "criteria": "Is it kind?"}, {"type": "python", "name": "no"}):
        node = {"agent": "reader", "success_check": [check]}
        refused = await bottega.client.post("/v1/graphs", json={"name": "h", "nodes": [node]})
        assert refused.status_code == 422
        assert "of the expected tags: 'equals', 'contains', 'json_schema'" in refused.text


async def test_a_node_with_memory_off_is_given_nothing_and_leaves_nothing(
    bottega: Running, model: FakeModel
) -> None:
    nodes = ({"agent": "reader", "memory": "off"}, {"agent": "pricer", "memory": "read"}, "writer")
    await define(bottega, *nodes)
    stored = (await bottega.client.get("/v1/graphs/offers")).json()["nodes"]
    assert [each.get("memory") for each in stored] == ["off", "read", None]
    first, second = await run(bottega), await run(bottega)
    assert set(await parts(bottega, first)) == {"writer"}
    assert set(await recalled_texts(bottega, second)) == {"writer"}
    path = f"/v1/episodes/{episode_id_of(UUID(first['id']))}"
    episode = (await bottega.client.get(path)).text
    assert "reader has done it" not in episode
    assert "90 euros" not in episode
    changed = {"nodes": ["reader", "pricer", "writer"]}
    assert (await bottega.client.put("/v1/graphs/offers", json=changed)).is_success
    third = await run(bottega)
    assert set(await parts(bottega, third)) == {"reader", "pricer", "writer"}
    assert set(await recalled_texts(bottega, third)) == {"writer"}


async def test_other_users_runs_and_runs_of_nobody_are_given_nothing(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega, "reader", "writer")
    assert (await run(bottega))["memory_used"] == "user"
    for more in ({"user": "bob"}, {"user": None}, {"user": None, "session_id": "s"}):
        assert await recalled_texts(bottega, await run(bottega, **more)) == {}, more
    assert await recalled_texts(bottega, await run(bottega, input="Paint a fence green now.")) == {}
    assert await recalled_texts(bottega, await run(bottega, memory="off")) == {}
    assert len(await recalled_texts(bottega, await run(bottega, memory="read"))) == 2


async def test_nothing_is_left_after_the_erasure_of_the_user(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega, "reader", "writer")
    episode_id = episode_id_of(UUID((await run(bottega))["id"]))
    exported = (await bottega.client.get("/v1/users/ada/export")).text
    assert '"episode_parts"' in exported
    rows = f"SELECT count(*) FROM episode_parts WHERE episode_id = '{episode_id}'"
    assert await bottega.owner.fetchval(rows) == 2
    assert (await bottega.client.delete("/v1/users/ada")).status_code < 300
    gone = functools.partial(bottega.client.get, "/v1/users/ada")
    await until(gone, lambda answer: answer.status_code == 404)
    assert await bottega.owner.fetchval(rows) == 0
    assert await recalled_texts(bottega, await run(bottega)) == {}


async def test_elements_of_a_node_share_one_search(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "reader")
    each = {"from": "run", "pointer": "/metadata/pages"}
    nodes = [{"agent": "reader", "for_each": {**each, "spread_above": 3}}]
    await bottega.client.post("/v1/graphs", json={"name": "g", "nodes": nodes})
    for pages in (["a", "b"], ["a", "b", "c", "d"]):
        first = await run(bottega, graph="g", metadata={"pages": pages})
        assert (await parts(bottega, first))["reader"]["output"].count("reader has done it") > 1
    asked = [str(each["messages"]) for each in model.requests]
    assert [text.count("earlier run: Task") for text in asked] == [0, 0, 1, 1, 1, 1]


async def test_a_part_is_given_two_earlier_ones_within_its_tokens(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega, "reader", "writer")
    done = [
        await run(bottega, input=f"{TASK} {'Long words follow. ' * 200} {number}")
        for number in range(4)
    ]
    for texts in (await recalled_texts(bottega, done[-1])).values():
        assert len(texts) == 2
        assert sum(map(estimated_tokens, texts)) <= 600


async def test_a_killed_run_goes_on_with_the_same_memory(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    changed = {"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    configured = settings.model_copy(update=changed)
    gate = asyncio.Event()

    def stops(request: dict[str, Any]) -> Reply:
        return gated(gate, text("no")) if named(request) == "pricer" else careful(request)

    async with running(configured, database_url, worker=True) as bottega:
        model.decide = careful
        await define(bottega)
        await run(bottega)
        model.decide = stops
        count = len(model.requests)
        body = {"mode": "dag", "graph": "offers", "input": TASK, "user": "ada"}
        started = (await bottega.client.post("/v1/runs", json=body)).json()
        await model.received(count + 2)
    before = model.requests[-1]["messages"]
    assert REASON in str(before)
    async with running(configured, database_url) as bottega:
        # A new search would find nothing.
        await bottega.owner.execute("DELETE FROM episode_search")
    model.decide = careful
    async with running(configured, database_url, worker=True) as bottega:
        recalled = await recalled_texts(bottega, started)
        assert [len(each) for each in recalled.values()] == [1, 1]
        again = [each["messages"] for each in model.requests if named(each) == "pricer"]
        assert again[-1] == before
        assert set(await parts(bottega, started)) == {"reader", "pricer", "writer"}
