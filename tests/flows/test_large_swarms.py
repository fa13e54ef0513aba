"""Runs that dispatch many asynchronous tasks, with the default settings."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, http_error, response, text
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import Running, client_of, running, watch
from tests.waiting import until

MOST_IN_A_CALL = 100
RAISED = 2000
"""Tasks of a parent that may wait, where a test dispatches a thousand."""


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
        free: leaves that are answered before the gate opens.
        now, most: leaves that are asked at this moment, and the most at one moment.
        asked: how often each leaf was asked.
        answered: leaves that were answered.
    """

    def __init__(self, count: int, *, in_one_call: bool, free: int = 0) -> None:
        self.gate = asyncio.Event()
        self.free = free
        self.now = self.most = 0
        self.asked: Counter[str] = Counter()
        self.answered: set[str] = set()
        leaves = [{"prompt": f"leaf {number}"} for number in range(count)]
        pages = [leaves[at : at + MOST_IN_A_CALL] for at in range(0, count, MOST_IN_A_CALL)]
        self.dispatch = (
            calls(*[("dispatch_subagents", {"tasks": page}) for page in pages])
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
                self.asked[prompt] += 1
                self.now += 1
                self.most = max(self.most, self.now)
                if self.asked.total() > self.free:
                    await self.gate.wait()
                self.now -= 1
                await response(text(f"{prompt} is done"), body)(scope, receive, send)
                self.answered.add(prompt)

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


@pytest.mark.deep
async def test_a_thousand_tasks_end_on_one_worker(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    crowd = Crowd(1000, in_one_call=True, free=1000)
    model.decide = crowd.decide
    raised = settings.model_copy(
        update={"openai_base_url": model.base_url, "subagent_max_queued": RAISED}
    )
    async with running(raised, database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client)
        run_id = await swarm.start(bottega.client)
        frames = await watch(bottega.port, run_id)
        run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert_all_completed(frames, run, 1000)
    assert set(crowd.asked.values()) == {1}


def assert_all_completed(frames: list[dict[str, Any]], run: dict[str, Any], count: int) -> None:
    """Check that a coordinator dispatched so many tasks, that each completed, and that it ended."""
    swarm.assert_whole(frames)
    kinds = Counter(frame["type"] for frame in frames)
    assert kinds["subagent.dispatched"] == kinds["subagent.completed"] == count
    assert kinds["subagent.backpressure"] == 0
    assert (run["status"], run["output"]) == ("completed", "done")
    over = {"waiting": 0, "running": 0, "done": count, "failed": 0, "estimated_ms": 0}
    assert run["tasks"] == over


_COMPLETED = "SELECT count(*) = $1 FROM runs WHERE parent_run_id IS NOT NULL AND ended_at < now()"


@pytest.mark.parametrize(
    ("count", "workers", "free"), [(60, 2, 10), pytest.param(1000, 4, 300, marks=pytest.mark.deep)]
)
async def test_no_answer_is_lost_when_one_of_the_workers_of_many_child_runs_is_killed(
    database_url: str, model: FakeModel, count: int, workers: int, free: int
) -> None:
    crowd = Crowd(count, in_one_call=True, free=free)
    model.decide = crowd.decide
    # The other workers have no places for all child runs under way, so the killed one has some.
    under_way, places = 20, 1 + 20 // workers
    limited = environment(
        database_url,
        model,
        BOTTEGA_SUBAGENT_MAX_QUEUED=str(RAISED),
        BOTTEGA_WORKER_CONCURRENCY=str(places),
    )
    async with (
        command("serve", "--no-worker", "--port", "0", **limited) as api,
        client_of(api.port) as client,
        AsyncExitStack() as started,
    ):
        await swarm.coordinator(client, subagents={"limits": {"spread_above": 0}})
        killed, *_ = [
            await started.enter_async_context(command("worker", **limited)) for _ in range(workers)
        ]
        run_id = await swarm.start(client)
        await swarm.until(database_url, _COMPLETED, free)
        await until(lambda: crowd.now == under_way)
        killed.kill()
        await killed.process.wait()
        open_ones = crowd.asked.keys() - crowd.answered
        crowd.gate.set()
        frames = await watch(api.port, run_id)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
    assert_all_completed(frames, run, count)
    again = {prompt for prompt, times in crowd.asked.items() if times > 1}
    assert again
    assert again <= open_ones
    assert max(crowd.asked.values()) == 2


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


@pytest.mark.parametrize(
    ("mode", "names", "own", "patience"),
    [
        ("async", [], {}, 30),
        ("async", ["leaf"], {}, 30),
        ("sync", ["leaf"], {}, 30),
        ("sync", ["leaf"], {"model_patience_s": 50}, 50),
    ],
    ids=["a helper", "asynchronous", "synchronous", "its own patience"],
)
async def test_a_sub_agent_is_less_patient_with_its_model_than_a_run(
    bottega: Running,
    model: FakeModel,
    mode: str,
    names: list[str],
    own: dict[str, Any],
    patience: int,
) -> None:
    """Let the server ask for a longer wait than the patience: then the call fails at once."""
    dispatch = {"prompt": "leaf"} | ({"agent": "leaf"} if names else {})
    asks: dict[str, list[swarm.Step]] = {
        "async": [calls(("dispatch_subagent", dispatch)), swarm.awaits()],
        "sync": [calls(("leaf", {"query": "leaf"}))],
    }
    model.decide = swarm.plays(
        {
            "root": [*asks[mode], text("done")],
            "leaf": [lambda request: http_error(503, {"retry-after": "60"})],
        }
    )
    await swarm.agent(bottega.client, "leaf", **own)
    await swarm.coordinator(bottega.client, subagents={"mode": mode, "names": names})
    async with asyncio.timeout(30):
        frames = await watch(bottega.port, await swarm.start(bottega.client))
    assert frames[-1]["type"] == "run.completed"
    (failed,) = [frame["data"] for frame in frames if frame["type"] == "agent.failed"]
    assert failed["error"]["code"] == "model_unavailable"
    assert f"model_patience_s ({patience} s)" in failed["error"]["message"]


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
