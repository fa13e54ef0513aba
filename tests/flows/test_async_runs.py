"""Runs whose coordinator dispatches asynchronous sub-agents."""

import asyncio
from collections import Counter
from typing import Any

import websockets
from pydantic_core import from_json

from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, gated_within, text
from tests.service import Running, watch


async def ended(bottega: Running, run_id: str) -> dict[str, Any]:
    run: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    return run


async def test_a_coordinator_dispatches_polls_awaits_and_reports(
    bottega: Running, model: FakeModel
) -> None:
    stored: dict[str, int] = {}
    gate = asyncio.Event()

    async def look() -> None:
        """Record the stored rows when the first request of a child arrives."""
        rows = await bottega.owner.fetch(
            "SELECT type, count(*) FROM run_events WHERE type LIKE 'subagent.%' GROUP BY type"
        )
        for kind, count in rows:
            stored.setdefault(kind, count)

    async def look_and_wait() -> None:
        await look()
        await gate.wait()

    def polled(request: dict[str, Any]) -> Reply:
        gate.set()
        return calls(("await_subagent", {"task_ids": swarm.ids_in(request)}))

    script = {
        "root": [
            swarm.dispatches("one", "two", "three", metadata={"topic": "x"}),
            swarm.polls(),
            polled,
            swarm.reports,
        ],
        "one": [swarm.after(look_and_wait, text("ONE"))],
        "two": [swarm.after(look_and_wait, text("TWO"))],
        "three": [swarm.after(look_and_wait, text("THREE"))],
    }
    model.decide = swarm.plays(script)
    await swarm.coordinator(bottega.client)
    run_id = await swarm.start(bottega.client)
    frames = await watch(bottega.port, run_id)
    swarm.assert_whole(frames)
    run = await ended(bottega, run_id)
    tasks = await swarm.tasks_of(bottega.client, run_id)
    assert run["output"] == "completed: ONE\ncompleted: TWO\ncompleted: THREE"
    # A child's actions follow from the stored state.
    assert stored["subagent.dispatched"] == 3
    assert stored["subagent.dequeued"] == 3
    ids = swarm.dispatched(frames)
    for task_id in ids.values():
        assert swarm.moves(frames, task_id) == ["running", "streaming", "completed"]
    kinds = Counter(frame["type"] for frame in frames)
    assert kinds["subagent.dequeued"] == kinds["subagent.completed"] == 3
    (poll,) = [f for f in frames if f["type"] == "tool.completed" and "summary" in str(f["data"])]
    assert poll["data"]["result"]["summary"]["total"] == 3
    assert {task["id"]: task["status"] for task in tasks} == dict.fromkeys(
        ids.values(), "completed"
    )
    spent = Counter[str]()
    for task in tasks:
        assert (task["mode"], task["priority"], task["timeout_ms"]) == ("async", 5, 300_000)
        assert (task["parent_id"], task["depth"], task["attempt"]) == (None, 0, 1)
        assert (task["metadata"], task["agent"]) == ({"topic": "x"}, "subagent")
        assert task["duration_ms"] >= 0
        spent.update({name: task["usage"][name] for name in ("input", "output")})
    answers = [f["data"]["usage"] for f in frames if f["type"] == "llm.completed"]
    of_all = {
        key: sum(usage[key] for usage in answers)
        for key in ("input", "output", "cached", "reasoning")
    }
    assert of_all.items() <= run["usage"].items()
    assert run["usage"]["model_calls"] == len(answers) == 7
    for field in ("input", "output"):
        assert 0 < spent[field] < of_all[field]


async def test_a_task_s_text_is_shown_and_polled_while_it_streams(
    bottega: Running, model: FakeModel
) -> None:
    heard, gate = asyncio.Event(), asyncio.Event()

    def opens(request: dict[str, Any]) -> Reply:
        gate.set()
        return calls(("await_subagent", {"task_ids": swarm.ids_in(request)}))

    model.decide = swarm.plays(
        {
            "root": [
                swarm.dispatches("one"),
                swarm.after(heard.wait, swarm.polls(max_partial_output_length=4)),
                opens,
                swarm.reports,
            ],
            "one": [lambda request: gated_within(gate, text("one word after the other"), events=3)],
        }
    )
    await swarm.coordinator(bottega.client)
    run_id = await swarm.start(bottega.client)
    said: list[dict[str, Any]] = []
    async with websockets.connect(f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws") as socket:
        async for message in socket:
            frame = from_json(message)
            if frame["type"] == "llm.delta" and frame["task_id"] is not None:
                said.append(frame)
                heard.set()
    frames = await watch(bottega.port, run_id)
    swarm.assert_whole(frames)
    ids = swarm.dispatched(frames)
    assert {frame["task_id"] for frame in said} == {ids["one"]}
    polled = next(r for r in model.requests if swarm.step_of(r) == 2)
    (task,) = swarm.results_in(polled)[-1]["tasks"]
    assert task["status"] == "streaming"
    assert len(task["partial_output"]) == 4
    assert task["partial_output"] in "one word after the other"
    assert "output_chunk" not in str(frames)
