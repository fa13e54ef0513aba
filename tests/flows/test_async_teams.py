"""Asynchronous sub-agents together with graphs, synchronous agents and plugins."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, calls, text
from tests.service import Running, running, watch
from tests.team import systems
from tests.waiting import until


def only(model: FakeModel, prompt: str, step: int = 0) -> dict[str, Any]:
    """Return the only request for a step."""
    (found,) = [
        request
        for request in model.requests
        if (swarm.prompt_of(request), swarm.step_of(request)) == (prompt, step)
    ]
    return found


def configured(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(update={"openai_base_url": model.base_url, "drain_grace_s": 0.0})


async def define_graph(bottega: Running, **fields: dict[str, Any]) -> None:
    """Define a graph: boss dispatches w, r and d; d reads from r, and r from w."""
    for name in "wrd":
        await swarm.agent(bottega.client, name, **fields.get(name, {}))
    await swarm.coordinator(bottega.client, subagents={"names": ["w", "r", "d"]})
    edges = [{"source": "w", "target": "r"}, {"source": "r", "target": "d"}]
    body = {"name": "g", "edges": edges}
    assert (await bottega.client.post("/v1/graphs", json=body)).status_code == 201


def task(prompt: str, agent: str) -> tuple[str, dict[str, Any]]:
    return "dispatch_subagent", {"prompt": prompt, "agent": agent}


async def test_tasks_read_the_publications_of_their_siblings(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Check that successors wait though dispatched first, and that a new worker loses nothing."""
    gate = asyncio.Event()
    script: dict[str, list[swarm.Step]] = {
        "root": [
            calls(task("third", "d"), task("second", "r"), task("first", "w")),
            swarm.awaits(),
            swarm.reports,
        ],
        "first": [text("the word of w")],
        "second": [swarm.held(gate, text("the word of r"))],
    }
    model.decide = swarm.plays(script)
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await define_graph(bottega)
        run_id = await swarm.start(bottega.client, graph="g")
        await until(lambda: any(swarm.prompt_of(request) == "second" for request in model.requests))
        assert not any(swarm.prompt_of(request) == "third" for request in model.requests)
    script["second"] = [text("the word of r")]
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        frames = await watch(bottega.port, run_id)
        run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    gate.set()
    swarm.assert_whole(frames)
    assert run["output"].splitlines()[1:] == [
        "completed: the word of r",
        "completed: the word of w",
    ]
    asked = [request for request in model.requests if swarm.prompt_of(request) == "second"]
    assert len(asked) == 2
    for request in asked:
        assert "the word of w" in "".join(systems(request)[1:])
    assert "the word of r" in "".join(systems(only(model, "third"))[1:])
    versions = [f["data"]["version"] for f in frames if f["type"] == "memory.published"]
    assert versions == [1, 1, 1]


async def test_a_failed_task_does_not_block_its_siblings(
    bottega: Running, model: FakeModel
) -> None:
    script: dict[str, list[swarm.Step]] = {
        "root": [calls(task("later", "r"), task("first", "w")), swarm.awaits(), swarm.reports],
        "first": [calls(("read_file", {"path": "none"}))],
    }
    model.decide = swarm.plays(script)
    await define_graph(bottega, w={"max_iterations": 1})
    frames = await watch(bottega.port, await swarm.start(bottega.client, graph="g"))
    swarm.assert_whole(frames)
    warned = [f["data"]["code"] for f in frames if f["type"] == "warning"]
    assert warned.count("upstream_failed") == 1
    run = (await bottega.client.get(f"/v1/runs/{frames[0]['run_id']}")).json()
    assert run["output"].splitlines()[0] == "completed: later is done"


async def test_a_node_of_a_graph_dispatches(bottega: Running, model: FakeModel) -> None:
    script: dict[str, list[swarm.Step]] = {
        "x": [
            lambda request: (
                text("asked after it")
                if "You are z" in str(request["messages"][0])
                else swarm.dispatches("a", "b")
            )
        ],
    }

    def decide(request: dict[str, Any]) -> Any:
        if swarm.prompt_of(request) != "x" or "You are z" in str(request["messages"][0]):
            return swarm.plays(script)(request)
        steps = [swarm.dispatches("a", "b"), swarm.awaits(), swarm.reports]
        return swarm.plays({"x": steps})(request)

    model.decide = decide
    await swarm.coordinator(bottega.client)
    await swarm.agent(bottega.client, "z")
    body = {"name": "g", "edges": [{"source": "boss", "target": "z"}]}
    await bottega.client.post("/v1/graphs", json=body)
    body = {"mode": "dag", "graph": "g", "input": "x"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    frames = await watch(bottega.port, run_id)
    swarm.assert_whole(frames)
    tasks = {task["agent"]: task for task in await swarm.tasks_of(bottega.client, run_id)}
    assert tasks["subagent"]["parent_id"] == tasks["boss"]["id"]
    assert [tasks[name]["mode"] for name in ("boss", "z", "subagent")] == ["sync", "sync", "async"]
    (asked,) = [r for r in model.requests if "You are z" in str(r["messages"][0])]
    assert "completed: a is done" in "".join(systems(asked)[1:])


async def test_synchronous_and_asynchronous_agents_work_together(
    bottega: Running, model: FakeModel
) -> None:
    """Let root call lead and wait; lead dispatches to helper, which calls clerk and waits."""
    script: dict[str, list[swarm.Step]] = {
        "root": [calls(("lead", {"query": "lead it"})), text("all done")],
        "lead it": [calls(task("help", "helper")), swarm.awaits(), swarm.reports],
        "help": [calls(("clerk", {"query": "write"})), text("helped")],
    }
    model.decide = swarm.plays(script)
    await swarm.agent(bottega.client, "clerk")
    await swarm.agent(bottega.client, "helper", subagents={"names": ["clerk"]})
    await swarm.coordinator(bottega.client, "lead", subagents={"names": ["helper"]})
    await swarm.agent(bottega.client, "boss", subagents={"names": ["lead"]})
    run_id = await swarm.start(bottega.client)
    frames = await watch(bottega.port, run_id)
    swarm.assert_whole(frames)
    tasks = {task["agent"]: task for task in await swarm.tasks_of(bottega.client, run_id)}
    line = [(tasks[name]["parent_id"], tasks[name]["mode"]) for name in ("lead", "helper", "clerk")]
    ids = [None, tasks["lead"]["id"], tasks["helper"]["id"]]
    assert line == list(zip(ids, ("sync", "async", "sync"), strict=True))
    assert {task["status"] for task in tasks.values()} == {"completed"}
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert run["usage"]["model_calls"] == len(model.requests) == 8
    helped = swarm.results_in(only(model, "lead it", 2))[-1]["tasks"][0]
    assert helped["final_output"] == "helped"
    # The clerk's answers to the helper count as the helper's.
    assert helped["token_usage"].items() <= tasks["helper"]["usage"].items()
    assert helped["token_usage"].keys() == {"input", "output"}


PLUGIN = """
from dataclasses import replace
from bottega.subagents.plugins import Skip

def before_dispatch(context, request):
    if "secret" in request.prompt:
        return Skip("not allowed here")
    return replace(request, priority=2, metadata={"seen": "yes"})

def after_subagent_complete(context, outcome):
    with open(WHERE, "a") as file:
        file.write(f"{outcome.status} {outcome.output}\\n")
"""


async def test_plugins_of_the_operator_apply(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = tmp_path / "told"
    (tmp_path / "said.py").write_text(PLUGIN.replace("WHERE", repr(str(told))))
    info = tmp_path / "said-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: said\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[bottega.plugins]\nsaid = said\n")
    monkeypatch.syspath_prepend(tmp_path)
    script: dict[str, list[swarm.Step]] = {
        "root": [swarm.dispatches("a", "the secret"), swarm.awaits(), swarm.reports]
    }
    model.decide = swarm.plays(script)
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client)
        frames = await watch(bottega.port, await swarm.start(bottega.client))
        (task,) = await swarm.tasks_of(bottega.client, frames[0]["run_id"])
    swarm.assert_whole(frames)
    assert (task["priority"], task["metadata"]) == (2, {"seen": "yes"})
    skipped = swarm.results_in(only(model, "root", 2))[1]
    assert skipped == {"status": "skipped", "result": "not allowed here"}
    assert told.read_text() == "completed a is done\n"
