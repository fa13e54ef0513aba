"""Answers in a run's log: each text stands there once, and clients get it with every event."""

import json
from typing import Any

import asyncpg
import pytest

from tests import swarm
from tests.fake_model import FakeModel, calls, text
from tests.service import Running, watch
from tests.service import frames as frames_of

LONG = 'an "answer" \\ with\nlines, ünïcode and {"answer_seq":1} ' * 20
KINDS = ("agent.completed", "tool.completed", "subagent.completed")


async def stored_texts(owner: asyncpg.Pool, run_id: str) -> int:
    """Count the places of a log where the text of an answer stands."""
    rows = await owner.fetch("SELECT events FROM run_steps WHERE run_id = $1", run_id)
    return sum(row["events"].count(json.dumps(LONG, ensure_ascii=False)) for row in rows)


async def pages_of(bottega: Running, run_id: str, query: str) -> list[dict[str, Any]]:
    answer = await bottega.client.get(f"/v1/runs/{run_id}/events?{query}")
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def outputs(frames: list[dict[str, Any]], task_id: str | None) -> dict[str, Any]:
    """Return the answers in the events about a task, by type."""
    return {
        frame["type"]: frame["data"].get("output")
        for frame in frames
        if frame["type"] in KINDS
        and (frame["task_id"] == task_id or frame["data"].get("name") == "low")
    }


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_text_is_stored_once_and_read_everywhere(
    bottega: Running, model: FakeModel, owner: asyncpg.Pool, mode: str
) -> None:
    await swarm.agent(bottega.client, "low")
    await swarm.agent(bottega.client, "boss", subagents={"mode": mode, "names": ["low"]})
    call = calls(("low", {"query": "long"})) if mode == "sync" else swarm.dispatches("long")
    ends = [text("ready")] if mode == "sync" else [swarm.awaits(), text("ready")]
    model.decide = swarm.plays({"root": [call, *ends], "long": [text(LONG)]})
    run_id = await swarm.start(bottega.client)
    frames = await watch(bottega.port, run_id)
    swarm.assert_whole(frames)
    task_id = next(frame["task_id"] for frame in frames if frame["task_id"])
    expected = dict.fromkeys(
        ("agent.completed", "tool.completed" if mode == "sync" else "subagent.completed"), LONG
    )
    assert outputs(frames, task_id) == expected
    # The result of an await stands in the log as the model read it.
    assert await stored_texts(owner, run_id) == (1 if mode == "sync" else 2)
    root = [f["data"] for f in frames if f["type"] == "agent.completed" and not f["task_id"]]
    assert [data["output"] for data in root] == ["ready"]

    assert await pages_of(bottega, run_id, "limit=200") == frames
    only = await pages_of(bottega, run_id, "types=" + ",".join(KINDS))
    assert outputs(only, task_id) == expected
    stream = f"/v1/runs/{run_id}/ws"
    for frame in frames:  # alone on its page, or first in a stream
        if frame["type"] in KINDS:
            around = f"after={frame['seq'] - 1}&limit=1"
            assert await pages_of(bottega, run_id, around) == [frame]
            assert (await frames_of(bottega.port, f"{stream}?after={frame['seq'] - 1}"))[0] == frame
    (task,) = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    assert task["output"] == LONG
