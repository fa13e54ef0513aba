"""Tests of tasks that their parent steers, over the death of a worker."""

import asyncio
from typing import Any

import pytest

from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, gated, text
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import client_of, watch


def tells_what_it_heard(request: dict[str, Any]) -> Reply:
    """Answer with the file's text and the number of messages heard."""
    told = "".join(m["content"] for m in request["messages"] if m["role"] == "user")
    return text(f"{swarm.results_in(request)[-1]['content']} {told.count('look twice')}")


def reads_input(request: dict[str, Any]) -> Reply:
    question = next(m["content"] for m in request["messages"] if m["role"] == "user")
    assert 'Metadata: {"part": "market"}' in question
    folder = question.split("Your own folder is ")[1].split("/ ")[0]
    return calls(("read_file", {"path": f"{folder}/input/notes.md"}))


def fan_out(request: dict[str, Any]) -> Reply:
    one = {"prompt": "one", "input": {"notes.md": "known"}, "metadata": {"part": "market", "x": 1}}
    return calls(("dispatch_subagents", {"tasks": [one, {"prompt": ""}, {"prompt": "two"}]}))


def started(request: dict[str, Any]) -> list[str]:
    return [task["task_id"] for task in swarm.results_in(request)[0]["tasks"] if "task_id" in task]


def sends(request: dict[str, Any]) -> Reply:
    one, two = started(request)
    return calls(
        ("send_to_subagent", {"task_id": one, "message": "look twice"}),
        ("cancel_subagent", {"task_ids": [two]}),
    )


def awaits_success(request: dict[str, Any]) -> Reply:
    return calls(("await_subagent", {"task_ids": started(request), "mode": "any_success"}))


_WAITS = """
SELECT count(*) = 1 FROM run_events
WHERE type = 'tool.started' AND data ->> 'name' = 'await_subagent'
"""


@pytest.mark.deep
async def test_messages_and_files_survive_the_death_of_a_worker(
    database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = swarm.plays(
        {
            "root": [fan_out, sends, awaits_success, swarm.reports],
            "one": [lambda request: gated(gate, reads_input(request)), tells_what_it_heard],
            "two": [swarm.never],
        }
    )
    with_model = environment(database_url, model)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await swarm.coordinator(client, subagents={"share_metadata": ["part"]})
        async with command("worker", **with_model) as first:
            run_id = await swarm.start(client)
            await swarm.until(database_url, _WAITS)
            first.kill()
            await first.process.wait()
        gate.set()
        async with command("worker", **with_model):
            frames = await watch(api.port, run_id)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
    swarm.assert_whole(frames)
    assert run["output"].split("\n") == [
        "completed: known 1",
        "cancelled: its parent cancelled it",
    ]
    kinds = [frame["type"] for frame in frames]
    assert kinds.count("subagent.message_sent") == kinds.count("message.delivered") == 1
    assert "subagent.resumed" in kinds


def reads_the_answer(request: dict[str, Any]) -> Reply:
    (task,) = swarm.results_in(request)[-1]["tasks"]
    path = task["final_output"]["file"]
    return calls(
        ("read_file", {"path": path, "offset": 39_990}),
        ("poll_subagent", {"task_ids": [task["task_id"]]}),
    )


def tells_what_it_read(request: dict[str, Any]) -> Reply:
    read, polled = swarm.results_in(request)[-2:]
    (task,) = polled["tasks"]
    return text(f"{read['content']} {task['status']} {task['sent_before']}")


async def test_after_a_restart_the_file_of_a_long_answer_is_there_and_a_poll_does_not_repeat_it(
    database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = swarm.plays(
        {
            "root": [
                swarm.dispatches("long"),
                swarm.awaits(),
                lambda request: gated(gate, reads_the_answer(request)),
                tells_what_it_read,
            ],
            "long": [text("0123456789" * 4_000)],
        }
    )
    with_model = environment(database_url, model)
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await swarm.coordinator(client)
        async with command("worker", **with_model) as first:
            run_id = await swarm.start(client)
            await swarm.until(database_url, _HAS_AWAITED)
            first.kill()
            await first.process.wait()
        gate.set()
        async with command("worker", **with_model):
            frames = await watch(api.port, run_id)
        swarm.assert_whole(frames)
        assert (await client.get(f"/v1/runs/{run_id}")).json()["output"] == (
            "0123456789 completed True"
        )


_HAS_AWAITED = """
SELECT count(*) = 1 FROM run_events
WHERE type = 'tool.completed' AND data ->> 'name' = 'await_subagent'
"""
