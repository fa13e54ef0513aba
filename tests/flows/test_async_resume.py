"""Runs with asynchronous sub-agents that another worker resumes."""

import asyncio
import signal
from collections import Counter
from typing import Any

import asyncpg
import pytest

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, gated_within, http_error, text
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of, running, watch
from tests.waiting import until

BEFORE = {
    "completed": ["done-1", "done-2", "done-3", "quit", "b-1", "b-2", "c-1", "c-2", "d-1", "g-1"],
    "failed": ["fail-1", "fail-2"],
    "timeout": ["late"],
    "cancelled": ["doomed", "q-1", "q-2"],
    "running": ["hasty", "lead-1", "lead-2", "deep", "run-1", "c-3", "d-2", "g-2"],
    "streaming": ["stream-1", "stream-2"],
    "queued": ["wait-1", "wait-2", "wait-3", "wait-4"],
}
"""The tree of 30 as the first worker leaves it; ``lead-1`` and ``deep`` are parked in a wait."""
CUT_OFF = {
    ("hasty", 2),
    ("lead-2", 2),
    ("run-1", 1),
    ("stream-1", 0),
    ("stream-2", 0),
    ("c-3", 0),
    ("d-2", 0),
    ("g-2", 0),
}
"""Model calls that are under way then."""
UNFINISHED = {*BEFORE["running"], *BEFORE["streaming"], *BEFORE["queued"]}


def folder_in(request: dict[str, Any]) -> str:
    asked = next(each for each in request["messages"] if each["role"] == "user")
    return str(asked["content"]).split("Your own folder is ")[1].split("/ ")[0]


def root_dispatches() -> Any:
    def task(prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
        return "dispatch_subagent", {"prompt": prompt, **more}

    return calls(
        ("write_file", {"path": "global/plan", "content": "the plan"}),
        *[task(prompt) for prompt in ("done-1", "done-2", "done-3", "fail-1", "fail-2", "doomed")],
        task("quit", agent="lead"),
        task("hasty", agent="hasty"),
        task("lead-1", agent="lead"),
        task("lead-2", agent="lead"),
        *[task(prompt) for prompt in ("run-1", "stream-1", "stream-2")],
    )


def script(busy: asyncio.Event, gate: asyncio.Event) -> dict[str, list[swarm.Step]]:
    def writes(request: dict[str, Any]) -> Reply:
        path = f"{folder_in(request)}/output/found"
        return calls(("write_file", {"path": path, "content": "gold"}))

    def reads(request: dict[str, Any]) -> Reply:
        first = swarm.ids_in(request)[0]
        return calls(
            ("read_file", {"path": f"/subagent/{first}/output/found"}),
            ("read_file", {"path": "/global/plan"}),
        )

    def streams(name: str) -> swarm.Step:
        answer = text(f"{name} is done")
        return lambda request: gated_within(gate, answer, events=2)

    late = swarm.held(gate, text("late"))
    return {
        "root": [
            root_dispatches(),
            swarm.held(busy, swarm.dispatches("wait-1", "wait-2", "wait-3", "wait-4")),
            swarm.awaits(timeout_ms=600_000),
            reads,
            text("the end"),
        ],
        "done-1": [writes, text("done-1 is done")],
        "fail-1": [lambda request: http_error(400)],
        "fail-2": [lambda request: http_error(400)],
        "doomed": [swarm.never],
        "quit": [swarm.dispatches("q-1", "q-2"), text("I quit")],
        "q-1": [swarm.never],
        "q-2": [swarm.never],
        "hasty": [swarm.dispatches("late"), swarm.awaits(), late],
        "late": [swarm.never],
        "lead-1": [
            calls(
                *[
                    ("dispatch_subagent", {"prompt": prompt})
                    for prompt in ("b-1", "b-2", "c-1", "c-2", "c-3")
                ],
                ("dispatch_subagent", {"prompt": "deep", "agent": "deep"}),
            ),
            swarm.awaits(),
            swarm.reports,
        ],
        "deep": [swarm.dispatches("g-1", "g-2"), swarm.awaits(), swarm.reports],
        "g-2": [swarm.held(gate, text("g-2 is done"))],
        "c-3": [swarm.held(gate, text("c-3 is done"))],
        "lead-2": [
            swarm.dispatches("d-1", "d-2"),
            swarm.awaits(mode="any"),
            swarm.held(gate, calls(("list_files", {}))),
            swarm.awaits(),
            swarm.reports,
        ],
        "d-2": [swarm.held(gate, text("d-2 is done"))],
        "run-1": [
            calls(("write_file", {"path": "notes", "content": "my notes"})),
            swarm.held(gate, calls(("read_file", {"path": "notes"}))),
            text("run-1 is done"),
        ],
        "stream-1": [streams("stream-1")],
        "stream-2": [streams("stream-2")],
    }


async def define(client: Any) -> None:
    await swarm.coordinator(client, "deep")
    await swarm.coordinator(client, "lead", subagents={"names": ["deep"]})
    await swarm.coordinator(client, "hasty", subagents={"limits": {"default_timeout": 0.3}})
    await swarm.coordinator(client, subagents={"names": ["lead", "hasty"]})


_STATES = """
SELECT t.status, array_agg(e.data ->> 'prompt') FROM tasks t JOIN run_events e
ON e.run_id = t.run_id AND e.task_id = t.id AND e.type = 'subagent.dispatched'
GROUP BY t.status
"""


_WAITS = """
SELECT count(*) >= 5 FROM run_events
WHERE type = 'tool.started' AND data ->> 'name' = 'await_subagent'
"""


def called(request: dict[str, Any]) -> tuple[str, int]:
    """Return the agent and the number of a model call."""
    return swarm.prompt_of(request), swarm.step_of(request)


async def states(connection: asyncpg.Connection) -> dict[str, list[str]]:
    return {status: sorted(prompts) for status, prompts in await connection.fetch(_STATES)}


@pytest.mark.parametrize(
    "way",
    ["killed", *(pytest.param(each, marks=pytest.mark.deep) for each in ("drained", "fenced"))],
)
async def test_a_tree_in_all_states_goes_on_elsewhere(
    database_url: str, model: FakeModel, way: str
) -> None:
    busy, gate = asyncio.Event(), asyncio.Event()
    model.decide = swarm.plays(script(busy, gate))
    no_breaker = {"BOTTEGA_SUBAGENT_FAILURE_THRESHOLD": "10"}
    with_model = environment(database_url, model, BOTTEGA_DRAIN_GRACE_S="0", **no_breaker)
    connection = await asyncpg.connect(database_url)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await define(client)
        async with command("worker", **with_model) as first:
            run_id = await swarm.start(client)
            await swarm.until(database_url, "SELECT count(*) >= 17 FROM tasks")
            doomed = await connection.fetchval(
                "SELECT task_id FROM run_events WHERE data ->> 'prompt' = 'doomed'"
            )
            answer = await client.post(f"/v1/runs/{run_id}/tasks/{doomed}/cancel")
            assert answer.is_success, answer.text
            expected = {status: sorted(prompts) for status, prompts in BEFORE.items()}
            waiting = {"queued": expected.pop("queued")}
            await until(lambda: states(connection), lambda seen: seen == expected)
            # Each holds a slot then. One that still waits for a task would leave it to `wait-1`.
            await until(lambda: {called(request) for request in model.requests} >= CUT_OFF)
            busy.set()
            expected |= waiting
            await until(lambda: states(connection), lambda seen: seen == expected)
            await swarm.until(database_url, _WAITS)
            before = await swarm.tasks_of(client, run_id)
            match way:
                case "killed":
                    first.kill()
                    await first.process.wait()
                case "drained":
                    first.process.send_signal(signal.SIGTERM)
                    assert await first.process.wait() == 0
                    assert await states(connection) == expected
                case "fenced":
                    first.process.send_signal(signal.SIGSTOP)
            asked = len(model.requests)
            async with command("worker", **with_model):
                await model.received(asked + len(CUT_OFF))
                if way == "fenced":
                    first.process.send_signal(signal.SIGCONT)
                    await first.says("run.fenced")
                gate.set()
                frames = await watch(api.port, run_id)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
        after = await swarm.tasks_of(client, run_id)
    await connection.close()
    swarm.assert_whole(frames)
    assert run["output"] == "the end"
    ids = swarm.dispatched(frames)
    assert len(ids) == len(before) == len(after) == 30
    # Finished tasks are unchanged; unfinished ones are tried again and end.
    finished = {ids[prompt] for status in swarm.FINAL for prompt in BEFORE[status]}
    old, new = ({task["id"]: task for task in tasks} for tasks in (before, after))
    for task_id in finished:
        assert new[task_id] == old[task_id]
    resumed = [f for f in frames if f["type"] == "subagent.resumed"]
    assert sorted(f["task_id"] for f in resumed) == sorted(ids[each] for each in UNFINISHED)
    assert {f["data"]["attempt"] for f in resumed} == {2}
    for prompt in UNFINISHED:
        assert (new[ids[prompt]]["status"], new[ids[prompt]]["attempt"]) == ("completed", 2)
    # No stored answer is asked for again.
    made = Counter(called(request) for request in model.requests)
    assert {call for call, times in made.items() if times > 1} == CUT_OFF
    assert set(made.values()) == {1, 2}
    # The coordinator reads all results, under the ids that it knows.
    last = [request for request in model.requests if swarm.prompt_of(request) == "root"][-1]
    results = swarm.results_in(last)
    told = {task["task_id"]: task for task in results[-3]["tasks"]}
    prompts = {task_id: prompt for prompt, task_id in ids.items()}
    asked_for = [call.arguments.get("prompt") for call in root_dispatches().calls]
    known = [prompts[each] for each in swarm.ids_in(last)]
    assert known == [*filter(None, asked_for), "wait-1", "wait-2", "wait-3", "wait-4"]
    for prompt in ("done-1", "done-2", "run-1", "stream-1", "wait-4"):
        assert told[ids[prompt]]["final_output"] == f"{prompt} is done"
    assert told[ids["fail-1"]]["status"] == "failed"
    assert told[ids["doomed"]]["status"] == "cancelled"
    assert "completed: c-1 is done" in told[ids["lead-1"]]["final_output"]
    assert "completed: g-2 is done" in told[ids["lead-1"]]["final_output"]
    # Files are restored.
    assert [result["content"] for result in results[-2:]] == ["gold", "the plan"]
    (mine,) = [r for r in model.requests if swarm.prompt_of(r) == "run-1" and swarm.step_of(r) == 2]
    assert swarm.results_in(mine)[-1]["content"] == "my notes"
    # The tokens of finished tasks count for the run.
    answers = [f["data"]["usage"] for f in frames if f["type"] == "llm.completed"]
    counted = ("input", "output", "cached", "reasoning")
    of_all = {key: sum(usage[key] for usage in answers) for key in counted}
    # So do those that a task took whose call was cut off: they are an estimate.
    assert all(of_all[key] <= run["usage"][key] for key in counted)
    assert run["usage"]["model_calls"] == len(answers)


async def test_a_wait_continues_without_a_worker(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Check that after an hour a wait of ten minutes is over, and the task continues."""
    gate = asyncio.Event()
    wait: swarm.Step = swarm.awaits(timeout_ms=600_000)
    model.decide = swarm.plays(
        {
            "root": [swarm.dispatches("old"), wait, swarm.dispatches("new"), wait, wait, wait],
            "old": [swarm.never],
            "new": [swarm.held(gate, text("new"))],
        }
    )
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    started = "SELECT count(*) FROM run_events WHERE type = 'tool.started' AND data ->> 'name' = $1"
    async with running(configured, database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client)
        await swarm.start(bottega.client)
        await swarm.until(database_url, started, "await_subagent")
    async with running(configured, database_url) as bottega:
        past = "UPDATE run_steps SET at = at - interval '1 hour' WHERE events ~ $1"
        await bottega.owner.execute(past, '"(tool.started|subagent.dispatched)"')
    async with running(configured, database_url, worker=True) as bottega:
        await swarm.until(
            database_url, "SELECT EXISTS (SELECT FROM run_events WHERE data ->> 'prompt' = 'new')"
        )
    request = next(r for r in model.requests if called(r) == ("root", 2))
    waited = swarm.results_in(request)[-1]
    assert waited["wait_timed_out"]
    assert waited["status"] in ("queued", "running")


async def test_a_tree_survives_repeated_interruptions(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Check it also with interruptions before a task and its subtree had their turn again."""
    gate = asyncio.Event()
    slow = swarm.held(gate, text("done"))
    tasks = [("dispatch_subagent", {"prompt": name, "agent": "lead"}) for name in ("a", "b")]
    below = [swarm.dispatches("leaf"), swarm.awaits(), slow]
    model.decide = swarm.plays(
        {
            "root": [calls(*tasks), swarm.awaits(), swarm.reports],
            **dict.fromkeys("ab", below),
            "leaf": [slow],
        }
    )
    configured = settings.model_copy(
        update={"openai_base_url": model.base_url, "drain_grace_s": 0.0}
    )
    narrow = configured.model_copy(update={"subagent_min_workers": 1, "subagent_max_workers": 1})
    resumed = "SELECT count(*) = $1 FROM run_events WHERE type = 'subagent.resumed'"
    async with running(configured, database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client, "lead")
        await swarm.coordinator(bottega.client, subagents={"names": ["lead"]})
        run_id = await swarm.start(bottega.client)
        await until(lambda: sum(called(request) == ("leaf", 0) for request in model.requests) >= 2)
    async with running(narrow, database_url, worker=True):
        await swarm.until(database_url, resumed, 4)
    gate.set()
    async with running(configured, database_url, worker=True) as bottega:
        frames = await watch(bottega.port, run_id)
        run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
        after = await swarm.tasks_of(bottega.client, run_id)
    swarm.assert_whole(frames)
    assert run["output"] == "completed: done\ncompleted: done"
    again = [
        (f["task_id"], f["data"]["attempt"]) for f in frames if f["type"] == "subagent.resumed"
    ]
    assert sorted(again) == sorted((task["id"], n) for task in after for n in (2, 3))
    assert [(task["status"], task["attempt"]) for task in after] == [("completed", 3)] * 4
