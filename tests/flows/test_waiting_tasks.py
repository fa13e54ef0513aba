"""Runs with asynchronous sub-agents that wait for people."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import pytest

from tests import swarm
from tests.fake_model import FakeModel, calls, gated, text
from tests.flows.test_patience import ended
from tests.flows.test_processes import environment
from tests.flows.test_waiting import resolve
from tests.processes import command
from tests.service import Running, client_of, watch
from tests.waiting import until

APPROVED = {"approval": "always"}
ADDS = {"type": "builtin", "name": "calculator", **APPROVED}
ASKS = calls(("calculator", {"expression": "20+1"}))


async def team(client: Any, **limits: Any) -> None:
    """Create a coordinator of agents that ask for an approval."""
    await swarm.agent(client, "clerk", tools=[ADDS])
    await swarm.coordinator(client, subagents={"names": ["clerk"], "limits": limits})


def sends(*prompts: str, **common: Any) -> Any:
    return swarm.dispatches(*prompts, agent="clerk", **common)


async def pending(bottega: Running, run_id: str, count: int = 1, status: str = "waiting") -> Any:
    """Wait until a run has so many pending interrupts and this status; return them in order."""
    query = """SELECT i.* FROM interrupts i JOIN runs r ON r.id = i.run_id
               WHERE i.status = 'pending' AND r.id = $1 AND r.status = $2 ORDER BY i.created_at"""
    return await until(
        lambda: bottega.owner.fetch(query, UUID(run_id), status), lambda rows: len(rows) == count
    )


def moves(frames: Sequence[Mapping[str, Any]], task_id: str) -> list[str]:
    """Return the states that a task entered, but for ``streaming``, which depends on timing."""
    return [state for state in swarm.moves(frames, task_id) if state != "streaming"]


async def statuses(bottega: Running, run_id: str) -> list[str]:
    return [task["status"] for task in await swarm.tasks_of(bottega.client, run_id)]


async def test_a_run_waits_for_its_tasks_and_goes_on(
    guest: Running, guest_model: FakeModel
) -> None:
    guest_model.decide = swarm.plays(
        {
            "root": [sends("a", "b"), swarm.awaits(), swarm.reports],
            "a": [ASKS, text("a is done")],
        }
    )
    await team(guest.client)
    run_id = await swarm.start(guest.client)
    (interrupt,) = await pending(guest, run_id)
    row = await guest.owner.fetchrow("SELECT * FROM runs WHERE id = $1", UUID(run_id))
    assert row["status"] == "waiting"
    assert await statuses(guest, run_id) == ["waiting", "completed"]
    counted = (await guest.client.get(f"/v1/runs/{run_id}")).json()["tasks"]
    assert (counted["waiting"], counted["running"], counted["done"]) == (1, 0, 1)
    await resolve(guest, interrupt, decision="approve")
    run = await ended(guest, run_id)
    assert run["output"] == "completed: a is done\ncompleted: b is done"
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "interrupt"]
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames)
    a, b = (swarm.dispatched(frames)[prompt] for prompt in "ab")
    assert moves(frames, a) == ["running", "waiting", "running", "completed"]
    assert moves(frames, b) == ["running", "completed"]
    assert sum(swarm.prompt_of(request) == "b" for request in guest_model.requests) == 1


@pytest.mark.deep
async def test_other_tasks_work_on_and_the_run_waits_when_none_can(
    guest: Running, guest_model: FakeModel
) -> None:
    gate = asyncio.Event()
    guest_model.decide = swarm.plays(
        {
            "root": [sends("a", "b", "c"), swarm.awaits(timeout_ms=1_000), swarm.reports],
            "a": [ASKS, text("a is done")],
            "b": [swarm.held(gate, text("b is done"))],
            "c": [ASKS, text("c is done")],
        }
    )
    await team(guest.client, default_timeout=3.0, max_concurrent=2)
    run_id = await swarm.start(guest.client)
    a, c = await pending(guest, run_id, 2, "running")
    assert {str(a["task_id"]), str(c["task_id"])} == {
        task["id"]
        for task in await swarm.tasks_of(guest.client, run_id)
        if task["status"] == "waiting"
    }
    # Longer than the timeouts of the tasks and of the wait for them: all but b's stand still.
    await until(lambda: statuses(guest, run_id), lambda seen: "timeout" in seen)
    await pending(guest, run_id, 2)
    await resolve(guest, a, decision="approve")
    await pending(guest, run_id, 1)
    await resolve(guest, c, decision="deny", comment="no")
    run = await ended(guest, run_id)
    done = run["output"].splitlines()
    assert (done[0], done[2]) == ("completed: a is done", "completed: c is done")
    assert done[1].startswith("timeout: ")
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start", "interrupt", "interrupt"]


async def test_a_decision_reaches_a_task_whose_run_works_on(
    guest: Running, guest_model: FakeModel
) -> None:
    gate = asyncio.Event()
    guest_model.decide = swarm.plays(
        {
            "root": [sends("a", "b"), swarm.awaits(), swarm.reports],
            "a": [ASKS, text("a is done")],
            "b": [swarm.held(gate, text("b is done"))],
        }
    )
    await team(guest.client)
    run_id = await swarm.start(guest.client)
    (interrupt,) = await pending(guest, run_id, 1, "running")
    await until(lambda: statuses(guest, run_id), lambda seen: seen[0] == "waiting")
    await resolve(guest, interrupt, decision="approve")
    await until(lambda: statuses(guest, run_id), lambda seen: seen[0] == "completed")
    gate.set()
    run = await ended(guest, run_id)
    assert (run["output"], len(run["attempts"])) == (
        "completed: a is done\ncompleted: b is done",
        1,
    )
    frames = await guest.watch(run_id)
    a = swarm.dispatched(frames)["a"]
    assert moves(frames, a) == ["running", "waiting", "queued", "running", "completed"]


async def test_three_decisions_wake_the_run_once(guest: Running, guest_model: FakeModel) -> None:
    three = calls(*[("calculator", {"expression": f"{n}+0"}) for n in (1, 2, 3)])
    guest_model.decide = swarm.plays(
        {"root": [sends("a"), swarm.awaits(), swarm.reports], "a": [three, text("a is done")]}
    )
    await team(guest.client)
    run_id = await swarm.start(guest.client)
    found = await pending(guest, run_id, 3)
    await asyncio.gather(*[resolve(guest, each, decision="approve") for each in found])
    run = await ended(guest, run_id)
    assert (run["output"], len(run["attempts"])) == ("completed: a is done", 2)
    asked = [request for request in guest_model.requests if swarm.prompt_of(request) == "a"]
    assert len(asked) == 2
    assert len([each for each in asked[1]["messages"] if each["role"] == "tool"]) == 3


async def test_the_time_of_tasks_stands_still_while_their_run_waits(
    guest: Running, guest_model: FakeModel
) -> None:
    """Let a run wait for an hour: longer than its task, the lead and both waits may take."""
    guest_model.decide = swarm.plays(
        {
            "root": [swarm.dispatches("lead", agent="lead"), swarm.awaits(), swarm.reports],
            "lead": [sends("a"), swarm.awaits(), swarm.reports],
            "a": [ASKS, text("a is done")],
        }
    )
    await swarm.agent(guest.client, "clerk", tools=[ADDS])
    await swarm.coordinator(guest.client, "lead", subagents={"names": ["clerk"]})
    await swarm.coordinator(guest.client, subagents={"names": ["lead"]})
    run_id = await swarm.start(guest.client)
    (interrupt,) = await pending(guest, run_id)
    assert await statuses(guest, run_id) == ["waiting", "waiting"]
    await guest.owner.execute(
        "UPDATE run_steps SET at = at - interval '1 hour' WHERE run_id = $1", UUID(run_id)
    )
    await guest.owner.execute(
        """WITH runs AS (
               UPDATE runs SET deadline = deadline - interval '1 hour' WHERE id = $1)
           UPDATE run_waits SET since = since - interval '1 hour' WHERE run_id = $1""",
        UUID(run_id),
    )
    await resolve(guest, interrupt, decision="approve")
    assert (await ended(guest, run_id))["output"] == "completed: completed: a is done"
    frames = await guest.watch(run_id)
    assert moves(frames, swarm.dispatched(frames)["lead"]) == [
        *("running", "waiting", "running", "completed")
    ]


async def test_synchronous_tasks_wait_with_those_that_they_call(
    guest: Running, guest_model: FakeModel
) -> None:
    def decide(request: dict[str, Any]) -> Any:
        below = {"LEAD": "mid", "MID": "clerk"}.get(request["messages"][0]["content"])
        if request["messages"][-1]["role"] == "tool":
            return text("done")
        return calls((below, {"query": "q"})) if below else ASKS

    guest_model.decide = decide
    await swarm.agent(guest.client, "clerk", tools=[ADDS])
    for name, below in (("mid", "clerk"), ("lead", "mid")):
        subagents = {"mode": "sync", "names": [below]}
        await swarm.agent(guest.client, name, system_message=name.upper(), subagents=subagents)
    body = {"agent": "lead", "input": "x"}
    run_id = (await guest.client.post("/v1/runs", json=body)).json()["id"]
    (interrupt,) = await pending(guest, run_id)
    assert await statuses(guest, run_id) == ["waiting", "waiting"]
    await resolve(guest, interrupt, decision="approve")
    assert (await ended(guest, run_id))["output"] == "done"
    assert await statuses(guest, run_id) == ["completed", "completed"]
    seen = [frame["type"] for frame in await guest.watch(run_id)]
    assert seen.count("agent.waiting") == 2


async def test_a_waiting_task_can_be_cancelled(guest: Running, guest_model: FakeModel) -> None:
    guest_model.decide = swarm.plays(
        {"root": [sends("a"), swarm.awaits(), swarm.reports], "a": [ASKS]}
    )
    await team(guest.client)
    run_id = await swarm.start(guest.client)
    (interrupt,) = await pending(guest, run_id)
    path = f"/v1/runs/{run_id}/tasks/{interrupt['task_id']}/cancel"
    assert (await guest.client.post(path)).is_success
    run = await ended(guest, run_id)
    assert run["output"] == "cancelled: somebody cancelled this task"
    assert await resolve(guest, interrupt, decision="approve") == {"refused": "cancelled"}


async def test_a_run_that_waits_for_tasks_can_be_cancelled(
    guest: Running, guest_model: FakeModel
) -> None:
    guest_model.decide = swarm.plays({"root": [sends("a"), swarm.awaits()], "a": [ASKS]})
    await team(guest.client)
    run_id = await swarm.start(guest.client)
    await pending(guest, run_id)
    assert (await guest.client.post(f"/v1/runs/{run_id}/cancel")).status_code == 202
    assert (await ended(guest, run_id))["status"] == "cancelled"
    assert await statuses(guest, run_id) == ["cancelled"]
    swarm.assert_whole(await guest.watch(run_id), "run.cancelled")


async def test_a_call_beside_one_that_asks_is_made_before_the_run_waits(
    guest: Running, guest_model: FakeModel
) -> None:
    gate = asyncio.Event()
    both = calls(("calculator", {"expression": "20+1"}), ("plain", {"query": "q"}))

    def decide(request: dict[str, Any]) -> Any:
        if request["messages"][0]["content"] == "You are plain.":
            return gated(gate, text("plain is done"))
        return text("done") if request["messages"][-1]["role"] == "tool" else both

    guest_model.decide = decide
    await swarm.agent(guest.client, "plain")
    subagents = {"mode": "sync", "names": ["plain"]}
    await swarm.agent(guest.client, "lead", tools=[ADDS], subagents=subagents)
    body = {"agent": "lead", "input": "x"}
    run_id = (await guest.client.post("/v1/runs", json=body)).json()["id"]
    await guest_model.received(2)
    (interrupt,) = await pending(guest, run_id, 1, "running")
    gate.set()
    await pending(guest, run_id)
    await resolve(guest, interrupt, decision="approve")
    run = await ended(guest, run_id)
    assert (run["output"], len(run["attempts"])) == ("done", 2)


async def test_tasks_are_listed_by_status(guest: Running, guest_model: FakeModel) -> None:
    guest_model.decide = swarm.plays(
        {"root": [sends("a", "b"), swarm.awaits()], "a": [ASKS]},
    )
    await team(guest.client)
    run_id = await swarm.start(guest.client)
    (interrupt,) = await pending(guest, run_id)
    page = await guest.client.get(f"/v1/runs/{run_id}/tasks?status=waiting")
    assert [task["id"] for task in page.json()["items"]] == [str(interrupt["task_id"])]
    refused = await guest.client.get(f"/v1/runs/{run_id}/tasks?status=lazy")
    assert refused.status_code == 422


@pytest.mark.deep
async def test_nothing_is_lost_when_the_worker_of_waiting_tasks_is_killed(
    database_url: str, model: FakeModel
) -> None:
    """Kill it while one task asks and another is at work, and again while the run waits."""
    gate = asyncio.Event()
    model.decide = swarm.plays(
        {
            "root": [sends("a", "b", "c"), swarm.awaits(), swarm.reports],
            "a": [ASKS, text("a is done")],
            "b": [swarm.held(gate, text("b is done"))],
        }
    )
    with_model = environment(database_url, model)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):

        async def states() -> list[str]:
            return [task["status"] for task in await swarm.tasks_of(client, run_id)]

        await team(client)
        async with command("worker", **with_model) as victim:
            run_id = await swarm.start(client)
            await until(states, lambda seen: seen == ["waiting", "running", "completed"])
            victim.kill()
            await victim.process.wait()
        gate.set()
        async with command("worker", **with_model) as victim:
            await until(states, lambda seen: seen == ["waiting", "completed", "completed"])
            found = f"/v1/interrupts?status=pending&run_id={run_id}"
            (interrupt,) = (await client.get(found)).json()["items"]
            victim.kill()
            await victim.process.wait()
        path = f"/v1/interrupts/{interrupt['id']}/resolve"
        answer = await client.post(path, json={"decision": "approve"})
        assert answer.status_code == 200, answer.text
        async with command("worker", **with_model):
            frames = await watch(api.port, run_id)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
    swarm.assert_whole(frames)
    assert run["output"] == "\n".join(f"completed: {name} is done" for name in "abc")
    asked = Counter(swarm.prompt_of(request) for request in model.requests)
    assert (asked["a"], asked["c"]) == (2, 1)
    assert [frame["type"] for frame in frames].count("interrupt.created") == 1


async def test_a_decision_queues_the_tasks_with_their_run(
    guest: Running, guest_model: FakeModel
) -> None:
    guest_model.decide = swarm.plays({"root": [sends("a"), swarm.awaits()], "a": [ASKS]})
    await team(guest.client)
    run_id = await swarm.start(guest.client)
    (interrupt,) = await pending(guest, run_id)
    async with guest.owner.acquire() as connection, connection.transaction():
        await connection.execute(
            "SELECT set_config('bottega.tenant', $1, true)", str(interrupt["tenant_id"])
        )
        await connection.execute(
            "SELECT resolve_interrupt($1, $2, 'resolved', '{\"decision\": \"approve\"}', NULL)",
            *(interrupt["tenant_id"], interrupt["id"]),
        )
        query = "SELECT status FROM tasks WHERE run_id = $1"
        assert await connection.fetchval(query, UUID(run_id)) == "queued"


async def test_a_run_waits_when_a_task_ends_that_nobody_awaits(
    guest: Running, guest_model: FakeModel
) -> None:
    gate = asyncio.Event()
    guest_model.decide = swarm.plays(
        {
            "root": [swarm.dispatches("b"), ASKS, text("done")],
            "b": [swarm.held(gate, text("b is done"))],
        }
    )
    await swarm.coordinator(guest.client, tools=[ADDS])
    run_id = await swarm.start(guest.client)
    await pending(guest, run_id, 1, "running")
    await until(lambda: statuses(guest, run_id), lambda seen: seen == ["running"])
    gate.set()
    (interrupt,) = await pending(guest, run_id)
    await resolve(guest, interrupt, decision="approve")
    assert (await ended(guest, run_id))["output"] == "done"


async def test_a_task_ends_though_what_people_decided_on_is_cancelled(
    guest: Running, guest_model: FakeModel
) -> None:
    """Cancel a call of a task while the task waits for a slot because of its decision."""
    gate = asyncio.Event()
    guest_model.decide = swarm.plays(
        {
            "root": [sends("a", "b"), swarm.awaits(), swarm.reports],
            "a": [calls(("asker", {"query": "c"})), text("a is done")],
            "b": [swarm.held(gate, text("b is done"))],
            "c": [ASKS, text("c is done")],
        }
    )
    await swarm.agent(guest.client, "asker", tools=[ADDS])
    await swarm.agent(guest.client, "clerk", subagents={"mode": "sync", "names": ["asker"]})
    limits = {"max_concurrent": 1}
    await swarm.coordinator(guest.client, subagents={"names": ["clerk"], "limits": limits})
    run_id = await swarm.start(guest.client)
    (interrupt,) = await pending(guest, run_id, 1, "running")
    await until(lambda: statuses(guest, run_id), lambda seen: "running" in seen[:2])
    await resolve(guest, interrupt, decision="approve")
    await until(lambda: statuses(guest, run_id), lambda seen: "queued" in seen)
    path = f"/v1/runs/{run_id}/tasks/{interrupt['task_id']}/cancel"
    assert (await guest.client.post(path)).is_success
    await until(lambda: statuses(guest, run_id), lambda seen: "cancelled" in seen)
    gate.set()
    assert (await ended(guest, run_id))["output"] == "completed: a is done\ncompleted: b is done"
