"""Runs that dispatch many asynchronous tasks, with the default settings."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, http_error, response, text
from tests.service import Running, running, watch
from tests.waiting import until


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: FakeModel
) -> AsyncIterator[Running]:
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as server:
        yield server


class Crowd:
    """A model of one coordinator that dispatches leaves.

    Attributes:
        gate: opens for the leaves' answers.
        now, most: leaves that are asked at this moment, and the most at one moment.
    """

    def __init__(self, count: int, *, in_one_call: bool) -> None:
        self.gate = asyncio.Event()
        self.now = self.most = 0
        leaves = [{"prompt": f"leaf {number}"} for number in range(count)]
        self.dispatch = (
            calls(("dispatch_subagents", {"tasks": leaves}))
            if in_one_call
            else calls(*[("dispatch_subagent", leaf) for leaf in leaves])
        )

    def ids(self, request: dict[str, Any]) -> list[str]:
        results = swarm.results_in(request)
        answers = [task for result in results for task in result.get("tasks", [result])]
        return [answer["task_id"] for answer in answers if "queue_position" in answer]

    def awaits(self, request: dict[str, Any]) -> Reply:
        ids = self.ids(request)
        pages = [ids[at : at + 50] for at in range(0, len(ids), 50)]
        return calls(*[("await_subagent", {"task_ids": page}) for page in pages])

    def decide(self, request: dict[str, Any]) -> Reply:
        prompt = swarm.prompt_of(request)
        if prompt.startswith("leaf"):
            return self.leaf(prompt)
        script: dict[str, list[swarm.Step]] = {prompt: [self.dispatch, self.awaits, text("done")]}
        return swarm.plays(script)(request)

    def leaf(self, prompt: str) -> Reply:
        def make(body: dict[str, Any]) -> ASGIApp:
            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                self.now += 1
                self.most = max(self.most, self.now)
                await self.gate.wait()
                self.now -= 1
                await response(text(f"{prompt} is done"), body)(scope, receive, send)

            return app

        return make


@pytest.mark.parametrize("in_one_call", [True, False])
@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.deep), 100])
async def test_all_tasks_are_accepted_and_end(
    bottega: Running, model: FakeModel, count: int, in_one_call: bool
) -> None:
    crowd = Crowd(count, in_one_call=in_one_call)
    crowd.gate.set()
    model.decide = crowd.decide
    await swarm.coordinator(bottega.client)
    runs = [await swarm.start(bottega.client) for _ in range(2)]
    for run_id in runs:
        frames = await watch(bottega.port, run_id)
        swarm.assert_whole(frames)
        kinds = [frame["type"] for frame in frames]
        assert kinds.count("subagent.completed") == count
        assert "subagent.backpressure" not in kinds


@pytest.mark.parametrize(("in_one_call", "most"), [(True, 20), (False, 5)])
async def test_a_large_call_runs_more_tasks_at_once(
    bottega: Running, model: FakeModel, in_one_call: bool, most: int
) -> None:
    crowd = Crowd(50, in_one_call=in_one_call)
    model.decide = crowd.decide
    await swarm.coordinator(bottega.client)
    run_id = await swarm.start(bottega.client)
    await until(lambda: crowd.now == most)
    crowd.gate.set()
    swarm.assert_whole(await watch(bottega.port, run_id))
    assert crowd.most == most


async def test_a_bad_task_of_a_call_does_not_stop_the_others(
    bottega: Running, model: FakeModel
) -> None:
    tasks = [{"prompt": "leaf"}, {"prompt": ""}, {"prompt": "x", "agent": "nobody"}]
    model.decide = swarm.plays(
        {"root": [calls(("dispatch_subagents", {"tasks": tasks})), text("done")]}
    )
    await swarm.coordinator(bottega.client)
    await watch(bottega.port, await swarm.start(bottega.client))
    asked = [each for each in model.requests if swarm.prompt_of(each) == "root"][-1]
    first, empty, unknown = swarm.results_in(asked)[-1]["tasks"]
    assert "task_id" in first
    assert empty["index"] == 1
    assert empty["error"]
    assert "nobody" in unknown["error"]


async def test_a_helper_dispatches_helpers_while_the_depth_allows(
    bottega: Running, model: FakeModel
) -> None:
    script: dict[str, list[swarm.Step]] = {
        name: [swarm.dispatches(below), swarm.awaits(), text(f"{name} is done")]
        for name, below in (("root", "first"), ("first", "second"), ("second", "third"))
    }
    model.decide = swarm.plays(script)
    await swarm.coordinator(bottega.client)
    frames = await watch(bottega.port, await swarm.start(bottega.client))
    swarm.assert_whole(frames)
    assert {*swarm.dispatched(frames)} == {"first", "second", "third"}
    tools = {
        swarm.prompt_of(request): {tool["function"]["name"] for tool in request["tools"]}
        for request in model.requests
    }
    assert "dispatch_subagents" in tools["second"]
    assert tools["third"] == {"read_file", "write_file", "list_files"}


async def test_a_wait_that_times_out_returns_what_tasks_have_said(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()

    def ends(request: dict[str, Any]) -> Reply:
        gate.set()
        return text("done")

    model.decide = swarm.plays(
        {
            "root": [swarm.dispatches("leaf"), swarm.awaits(timeout_ms=1000), ends],
            "leaf": [lambda request: swarm.speaks(gate)],
        }
    )
    await swarm.coordinator(bottega.client)
    await watch(bottega.port, await swarm.start(bottega.client))
    asked = [each for each in model.requests if swarm.prompt_of(each) == "root"][-1]
    answer = swarm.results_in(asked)[-1]
    assert (answer["wait_timed_out"], answer["tasks"][0]["partial_output"]) == (True, "so far")


@pytest.mark.deep
@pytest.mark.parametrize("names", [[], ["leaf"]])
async def test_a_sub_agent_is_less_patient_with_its_model_than_a_run(
    settings: Settings,
    database_url: str,
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
) -> None:
    monkeypatch.setattr("bottega.subagents.child.PATIENCE_S", 0.3)
    monkeypatch.setattr("bottega.model_services.PATIENCE_S", 0.3)
    dispatch = {"prompt": "leaf"} | ({"agent": "leaf"} if names else {})
    model.decide = swarm.plays(
        {
            "root": [calls(("dispatch_subagent", dispatch)), swarm.awaits(), text("done")],
            "leaf": [lambda request: http_error(503)],
        }
    )
    configured = settings.model_copy(update={"openai_base_url": model.base_url})
    async with running(configured, database_url, worker=True) as bottega:
        await swarm.agent(bottega.client, "leaf")
        await swarm.coordinator(bottega.client, subagents={"names": names})
        frames = await watch(bottega.port, await swarm.start(bottega.client))
    swarm.assert_whole(frames)
    (failed,) = [frame["data"] for frame in frames if frame["type"] == "subagent.failed"]
    assert failed["error"]["code"] == "model_unavailable"


async def test_metrics_tell_how_tasks_fare(bottega: Running, model: FakeModel) -> None:
    model.decide = swarm.plays(
        {
            "root": [swarm.dispatches("a", "b"), swarm.awaits(), text("done")],
            "b": [lambda request: http_error(400)],
        }
    )
    await swarm.coordinator(bottega.client)
    before = await _metrics(bottega)
    await watch(bottega.port, await swarm.start(bottega.client))
    after = await _metrics(bottega)
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    assert more['ended_total{status="completed"}'] == more['ended_total{status="failed"}'] == 1
    assert more["dispatched_total"] == more["duration_seconds_count"] == 2
    assert more["queue_wait_seconds_count"] == 2
    assert more['tokens_total{direction="input"}'] > 0
    assert (after["queue_depth"], after["active"]) == (0, 0)
    assert (after["pool_size"], after["pool_utilization"]) == (50, 0)
    for name in (
        "breakers_opened_total",
        "collected_total",
        'tokens_total{direction="output"}',
        *(f'rejected_total{{reason="{reason}"}}' for reason in ("guard", "budget", "depth")),
        *(f'rejected_total{{reason="{reason}"}}' for reason in ("circuit_open", "queue_full")),
        *(f'ended_total{{status="{status}"}}' for status in ("timeout", "cancelled")),
    ):
        assert name in after


async def _metrics(bottega: Running) -> dict[str, float]:
    """Return the values of metrics of tasks by name, without the prefix."""
    prefix = "bottega_subagent_"
    lines = (await bottega.client.get("/metrics")).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(prefix))
    return {name.removeprefix(prefix): float(value) for name, value in pairs}


async def test_a_task_is_shown_in_full_while_it_waits_runs_and_is_over(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    about = {"instructions": "Be brief.", "token_budget": 90_000, "metadata": {"k": "v"}}
    model.decide = swarm.plays(
        {
            "root": [
                calls(
                    ("dispatch_subagent", {"prompt": "leaf", "timeout_ms": 60_000, **about}),
                    ("dispatch_subagent", {"prompt": "next", "priority": 7}),
                    ("dispatch_subagent", {"prompt": "last", "priority": 8}),
                ),
                swarm.awaits(),
                text("done"),
            ],
            "leaf": [lambda request: swarm.speaks(gate)],
        }
    )
    await swarm.coordinator(bottega.client, subagents={"limits": {"max_concurrent": 1}})
    run_id = await swarm.start(bottega.client)
    url = f"/v1/runs/{run_id}"

    async def shown() -> Any:
        return {task["prompt"]: task for task in await swarm.tasks_of(bottega.client, run_id)}

    tasks = await until(shown, lambda tasks: tasks.get("leaf", {}).get("partial_output"))
    leaf = tasks["leaf"]
    assert {name: leaf[name] for name in about} == about
    assert leaf["partial_output"] == "so far"
    assert (leaf["queue_position"], leaf["timeout_ms"], leaf["depth"]) == (None, 60_000, 0)
    assert [tasks[name]["queue_position"] for name in ("next", "last")] == [0, 1]
    assert tasks["next"]["partial_output"] is None
    counts = {"waiting": 2, "running": 1, "done": 0, "failed": 0, "estimated_ms": None}
    assert (await bottega.client.get(url)).json()["tasks"] == counts
    gate.set()
    swarm.assert_whole(await watch(bottega.port, run_id))
    over = (await shown())["leaf"]
    assert (over["partial_output"], over["queue_position"]) == (None, None)
    assert over["status_changed_at"] == over["ended_at"]
    over_counts = {"waiting": 0, "running": 0, "done": 3, "failed": 0, "estimated_ms": 0}
    assert (await bottega.client.get(url)).json()["tasks"] == over_counts
    plain = await bottega.client.post("/v1/runs", json={"agent": "boss", "input": "plain"})
    assert (await bottega.client.get(f"/v1/runs/{plain.json()['id']}")).json()["tasks"] is None
