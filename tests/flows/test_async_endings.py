"""Ends of asynchronous sub-agents: by a person, by time, by a budget, by their run's end."""

import asyncio
from collections.abc import Callable

import pytest

from bottega.settings import Settings
from tests import swarm, waiting
from tests.fake_model import FakeModel, calls, text
from tests.service import Running, running, watch

STATES = "SELECT status, count(*) FROM tasks GROUP BY status"


async def states(bottega: Running) -> dict[str, int]:
    return dict(await bottega.owner.fetch(STATES))


async def until(bottega: Running, **expected: int) -> None:
    """Wait until so many tasks are in each state."""
    await waiting.until(lambda: states(bottega), lambda seen: seen == expected)


WAITS = """
    SELECT count(*) = 2 FROM run_events
    WHERE type = 'tool.started' AND data ->> 'name' = 'await_subagent'
"""


async def until_parents_wait(bottega: Running) -> None:
    """Wait until the root and the lead of the tree wait for their tasks, and the log says so."""
    await waiting.until(lambda: bottega.owner.fetchval(WAITS))


async def test_cancelling_a_task_cancels_its_subtree_and_informs_its_parent(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    script: dict[str, list[swarm.Step]] = {
        "root": [
            calls(
                ("dispatch_subagent", {"prompt": "lead", "agent": "lead"}),
                ("dispatch_subagent", {"prompt": "other"}),
            ),
            swarm.awaits(),
            swarm.reports,
        ],
        "lead": [swarm.dispatches("a", "b", "c", "d"), swarm.awaits()],
        **{leaf: [swarm.never] for leaf in "abcd"},
        "other": [swarm.held(gate, text("OTHER"))],
    }
    model.decide = swarm.plays(script)
    await swarm.coordinator(bottega.client, "lead", subagents={"limits": {"max_concurrent": 2}})
    await swarm.coordinator(bottega.client, subagents={"names": ["lead"]})
    run_id = await swarm.start(bottega.client)
    path = f"/v1/runs/{run_id}"
    await model.received(7)
    await until(bottega, running=4, queued=2)
    tasks = await swarm.tasks_of(bottega.client, run_id)
    (lead,) = [task["id"] for task in tasks if task["agent"] == "lead"]
    (other,) = [t["id"] for t in tasks if t["parent_id"] is None and t["id"] != lead]
    answer = await bottega.client.post(f"{path}/tasks/{lead}/cancel")
    assert answer.status_code == 200, answer.text
    told = {item["task_id"]: item["status"] for item in answer.json()["items"]}
    assert told == {task["id"]: "stopped" for task in tasks if task["id"] != other}
    await model.disconnected(2)
    again = await bottega.client.post(f"{path}/tasks/{lead}/cancel")
    assert {item["status"] for item in again.json()["items"]} == {"already_final"}
    gate.set()
    frames = await watch(bottega.port, run_id)
    swarm.assert_whole(frames)
    run = (await bottega.client.get(path)).json()
    assert run["output"] == "cancelled: somebody cancelled this task\ncompleted: OTHER"
    ends = {f["task_id"]: f["data"] for f in frames if f["type"] == "subagent.cancelled"}
    assert len(ends) == 5
    assert ends[lead]["error"]["code"] == "cancelled"
    below = {end["error"]["message"] for task, end in ends.items() if task != lead}
    assert below == {"parent-cancelled:somebody cancelled this task"}
    assert await states(bottega) == {"cancelled": 5, "completed": 1}
    assert model.disconnects == 2
    assert len(model.requests) == 8


async def test_a_tree_of_100_ends_with_its_run_about_as_fast_as_it_began(
    configured: Callable[..., Settings], database_url: str, model: FakeModel
) -> None:
    leads = [f"lead-{number}" for number in range(9)]
    script: dict[str, list[swarm.Step]] = {
        "root": [swarm.dispatches(*leads, agent="lead"), swarm.awaits()]
    }
    for lead in leads:
        leaves = [f"{lead}.{number}" for number in range(10)]
        script[lead] = [swarm.dispatches(*leaves), swarm.awaits()]
        script |= {leaf: [swarm.never] for leaf in leaves}
    script["lead-0"][0] = swarm.dispatches(*[f"lead-0.{number}" for number in range(11)])
    script["lead-0.10"] = [swarm.never]
    model.decide = swarm.plays(script)
    wide = configured(
        subagent_max_concurrent=50, subagent_max_queue_size=200, subagent_max_queued=100
    )
    async with running(wide, database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client, "lead")
        await swarm.coordinator(bottega.client, subagents={"names": ["lead"]})
        run_id = await swarm.start(bottega.client)
        await until(bottega, running=59, queued=41)
        await waiting.until(
            lambda: sum("." in swarm.prompt_of(request) for request in model.requests) >= 50
        )
        assert (await bottega.client.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
        frames = await watch(bottega.port, run_id)
        began, ended = await bottega.owner.fetchrow(
            "SELECT cancel_requested_at - started_at, ended_at - cancel_requested_at FROM runs"
        )
        await model.disconnected(50)
        assert await states(bottega) == {"cancelled": 100}
    swarm.assert_whole(frames, "run.cancelled")
    assert ended < 2 * began  # of the same machine, however busy; usually half as long
    assert model.disconnects == 50


TREE: dict[str, list[swarm.Step]] = {
    "root": [
        calls(
            ("dispatch_subagent", {"prompt": "lead", "agent": "lead"}),
            ("dispatch_subagent", {"prompt": "quick"}),
        ),
        swarm.awaits(),
        swarm.reports,
    ],
    "lead": [swarm.dispatches("a", "b"), swarm.awaits(), swarm.reports],
    "a": [swarm.never],
    "b": [swarm.never],
}


async def define_tree(bottega: Running) -> None:
    await swarm.coordinator(bottega.client, "lead", subagents={"limits": {"max_concurrent": 1}})
    await swarm.coordinator(bottega.client, subagents={"names": ["lead"]})


async def test_tasks_share_the_deadline_of_their_run(bottega: Running, model: FakeModel) -> None:
    model.decide = swarm.plays(TREE)
    await define_tree(bottega)
    frames = await watch(bottega.port, await swarm.start(bottega.client, timeout_s=1))
    swarm.assert_whole(frames, "run.timeout")
    assert not {"queued", "running", "streaming"} & (await states(bottega)).keys()


@pytest.mark.parametrize("why", ["run cancelled", "run crashed too often", "parent out of time"])
async def test_a_task_that_is_not_dispatched_again_ends(
    configured: Callable[..., Settings],
    database_url: str,
    model: FakeModel,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """End its run, or its parent, before a resumed run comes to that place again."""
    model.decide = swarm.plays(TREE)
    async with running(configured(), database_url, worker=True) as bottega:
        await define_tree(bottega)
        run_id = await swarm.start(bottega.client)
        await until(bottega, running=2, queued=1, completed=1)
        await until_parents_wait(bottega)
    async with running(configured(), database_url) as bottega:
        match why:
            case "run cancelled":  # between its claim and its first step
                await bottega.owner.execute("UPDATE runs SET cancel_requested_at = now()")
            case "parent out of time":
                await bottega.owner.execute(
                    """UPDATE run_steps SET at = at - interval '1 hour'
                       WHERE events LIKE '%"agent":"lead"%'"""
                )
    asked = len(model.requests)
    if why == "run crashed too often":
        monkeypatch.setattr("bottega.container.MAX_CRASHES", 0)
    async with running(configured(), database_url, worker=True) as bottega:
        frames = await watch(bottega.port, run_id)
        run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
        ended = await states(bottega)
    if why == "parent out of time":
        swarm.assert_whole(frames)
        assert run["output"].startswith("timeout: the task's time is up")
        assert run["output"].endswith("completed: quick is done")
        assert ended == {"completed": 1, "timeout": 1, "cancelled": 2}
        assert [swarm.prompt_of(request) for request in model.requests[asked:]] == ["root"]
    else:
        swarm.assert_whole(
            frames, "run.failed" if why == "run crashed too often" else "run.cancelled"
        )
        assert ended == {"completed": 1, "cancelled": 3}
        assert len(model.requests) == asked


async def test_a_run_that_no_worker_has_ends_with_all_its_tasks(
    configured: Callable[..., Settings], database_url: str, model: FakeModel
) -> None:
    """Check that the database ends the run alone, with the same task states as a worker."""
    model.decide = swarm.plays(TREE)
    async with running(configured(), database_url, worker=True) as bottega:
        await define_tree(bottega)
        run_id = await swarm.start(bottega.client)
        await until(bottega, running=2, queued=1, completed=1)
        await until_parents_wait(bottega)
    async with running(configured(), database_url) as bottega:
        answer = await bottega.client.post(f"/v1/runs/{run_id}/cancel")
        assert answer.json()["status"] == "cancelled"
        frames = await watch(bottega.port, run_id)
        tasks = await swarm.tasks_of(bottega.client, run_id)
    swarm.assert_whole(frames, "run.cancelled")
    cut = {task["id"]: task for task in tasks if task["status"] == "cancelled"}
    assert len(cut) == 3
    for frame in frames:
        if frame["type"] == "subagent.cancelled":
            task, data = cut[frame["task_id"]], frame["data"]
            assert task["error"] == data["error"]
            assert task["error"] == {"code": "cancelled", "message": "parent-ended"}
            assert task["duration_ms"] == data["duration_ms"] > 0
            assert (frame["agent"], frame["parent_task_id"]) == (task["agent"], task["parent_id"])
    called = [frame["task_id"] for frame in frames if frame["type"] == "llm.completed"]
    spent = {f["task_id"]: f["data"]["token_usage"] for f in frames if "token_usage" in f["data"]}
    assert {task: usage["output"] > 0 for task, usage in spent.items()} == {
        task: task in called for task in spent
    }


async def test_task_cancelled_while_no_worker_has_its_run_does_not_start_again(
    configured: Callable[..., Settings], database_url: str, model: FakeModel
) -> None:
    model.decide = swarm.plays(TREE)
    async with running(configured(), database_url, worker=True) as bottega:
        await define_tree(bottega)
        run_id = await swarm.start(bottega.client)
        await until(bottega, running=2, queued=1, completed=1)
        await until_parents_wait(bottega)
    async with running(configured(), database_url) as bottega:
        tasks = await swarm.tasks_of(bottega.client, run_id)
        lead = next(task["id"] for task in tasks if task["agent"] == "lead")
        await bottega.client.post(f"/v1/runs/{run_id}/tasks/{lead}/cancel")
    asked = len(model.requests)
    async with running(configured(), database_url, worker=True) as bottega:
        frames = await watch(bottega.port, run_id)
        ended = await states(bottega)
    swarm.assert_whole(frames)
    assert ended == {"completed": 1, "cancelled": 3}
    assert [swarm.prompt_of(request) for request in model.requests[asked:]] == ["root"]
