"""Live text of models while it streams: ``llm.delta``."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from operator import not_
from typing import Any
from uuid import uuid4

import websockets
from pydantic_core import from_json

from bottega.db.tables import DEFAULT_TENANT
from bottega.settings import Settings
from tests.claims import sweep
from tests.fake_model import FakeModel, Reply, calls, cut, gated_cut, gated_within, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running, running
from tests.team import define, start
from tests.waiting import until

Frame = dict[str, Any]
TEXT = "The quick brown fox jumps over the lazy dog, and then it does so again."
ANSWER = text(TEXT)
HALF = 6
"""Events of the model's stream for some words of the answer."""


async def frames(server: Running, path: str) -> AsyncGenerator[Frame, None]:
    async with websockets.connect(f"ws://127.0.0.1:{server.port}{path}") as socket:
        async for message in socket:
            yield from_json(message)


async def until_text(stream: AsyncIterator[Frame], length: int) -> tuple[list[Frame], str]:
    """Return all frames until the live text, joined as a client does, has a length."""
    seen: list[Frame] = []
    so_far = ""
    while len(so_far) < length:
        frame = await anext(stream)
        seen.append(frame)
        so_far = said(so_far, frame)
    return seen, so_far


def said(so_far: str, frame: Frame) -> str:
    if frame["type"] == "llm.started":
        return ""
    if frame["type"] not in ("llm.delta", "subagent.output_chunk"):
        return so_far
    offset: int = frame["data"]["offset"]
    assert offset <= len(so_far)
    return f"{so_far[:offset]}{frame['data']['text']}"


def types(seen: list[Frame]) -> list[str]:
    return [frame["type"] for frame in seen]


async def alone(server: Running) -> str:
    """Return the path of a new run of one agent."""
    await define(server.client)
    return f"/v1/runs/{await start(server.client, agent='requirements', graph=None)}"


async def test_live_text_reaches_early_and_late_subscribers_anywhere(
    bottega: Running, model: FakeModel, settings: Settings, database_url: str
) -> None:
    gate = asyncio.Event()
    model.script(gated_within(gate, ANSWER, events=HALF))
    path = await alone(bottega)
    async with (
        running(settings, database_url) as other,
        aclosing(frames(bottega, f"{path}/ws")) as early,
    ):
        seen, shown = await until_text(early, 10)
        assert TEXT.startswith(shown)
        assert types(seen).index("llm.delta") > types(seen).index("llm.started")
        delta = seen[-1]
        assert (delta["seq"], delta["task_id"], delta["agent"]) == (None, None, "requirements")
        assert (delta["data"]["call"], delta["data"]["attempt"]) == (1, 1)
        last = max(frame["seq"] or 0 for frame in seen)
        for server in (bottega, other):
            for after in (0, last):
                async with aclosing(frames(server, f"{path}/ws?after={after}")) as late:
                    seen, so_far = await until_text(late, len(shown))
                    assert types(seen).count("llm.delta") == 1
                    assert seen[-1]["data"]["offset"] == 0
                    assert so_far == shown
        gate.set()
        rest = [frame async for frame in early]
    assert rest[-1]["type"] == "run.completed"
    ended = types(rest).index("llm.completed")
    assert "llm.delta" not in types(rest)[ended:]


async def test_an_event_stream_shows_text_without_an_id(bottega: Running, model: FakeModel) -> None:
    gate = asyncio.Event()
    model.script(gated_within(gate, ANSWER, events=HALF))
    path = await alone(bottega)
    headers = {"accept": "text/event-stream"}
    url = f"{path}/events?types=llm.delta"
    async with bottega.client.stream("GET", url, headers=headers) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == "event: llm.delta"
        assert TEXT.startswith(from_json((await anext(lines))[6:])["data"]["text"])
        assert await anext(lines) == ""
        gate.set()
        rest = [line async for line in lines]
    assert "event: run.completed" in rest
    assert "event: llm.completed" not in rest


async def test_filters_apply_to_live_text(bottega: Running, model: FakeModel) -> None:
    gate = asyncio.Event()
    model.script(gated_within(gate, ANSWER, events=HALF))
    path = await alone(bottega)
    async with (
        aclosing(frames(bottega, f"{path}/ws?types=llm.completed")) as others,
        aclosing(frames(bottega, f"{path}/ws?agents=designer")) as designers,
        aclosing(frames(bottega, f"{path}/ws?agents=requirements&depth=0")) as wanted,
    ):
        await until_text(wanted, 10)
        gate.set()
        assert types([frame async for frame in others]) == ["llm.completed", "run.completed"]
        assert types([frame async for frame in designers]) == ["run.completed"]


async def test_text_of_a_failed_attempt_is_replaced(bottega: Running, model: FakeModel) -> None:
    breaks, goes_on = asyncio.Event(), asyncio.Event()
    second = "Something else altogether, from the beginning."
    model.script(
        gated_cut(breaks, ANSWER, events=HALF), gated_within(goes_on, text(second), events=HALF)
    )
    path = await alone(bottega)
    async with aclosing(frames(bottega, f"{path}/ws")) as stream:
        _, shown = await until_text(stream, 10)
        breaks.set()
        while not second.startswith(shown) or not shown:
            shown = said(shown, await anext(stream))
        goes_on.set()
        rest = [frame async for frame in stream]
    assert rest[-1]["type"] == "run.completed"


async def test_live_text_is_deleted_in_the_end(bottega: Running, model: FakeModel) -> None:
    gate = asyncio.Event()
    model.script(gated_within(gate, ANSWER, events=HALF))
    path = await alone(bottega)
    pool = bottega.owner
    async with aclosing(frames(bottega, f"{path}/ws")) as stream:
        await until_text(stream, 10)
        assert await pool.fetchval("SELECT count(*) FROM live_text") > 0
        gate.set()
        async for _ in stream:
            pass
    await until(lambda: pool.fetchval("SELECT count(*) FROM live_text"), not_)


async def test_text_of_a_finished_call_is_not_shown(bottega: Running, model: FakeModel) -> None:
    """Store late rows of an answered call and of an overtaken attempt."""
    gate = asyncio.Event()
    model.script(cut(ANSWER, events=2), gated_within(gate, ANSWER, events=HALF))
    path = await alone(bottega)
    async with aclosing(frames(bottega, f"{path}/ws")) as stream:
        await until_text(stream, 10)
        pool = bottega.owner
        await pool.execute(
            "INSERT INTO live_text (tenant_id, run_id, agent, call, attempt, at, text) SELECT "
            "tenant_id, run_id, agent, call + c, attempt + a, 0, 'stale' FROM live_text, "
            "(VALUES (1, 0), (0, 1), (0, -1)) AS v(c, a)"
        )
        async with aclosing(frames(bottega, f"{path}/ws?types=llm.delta")) as late:
            _, shown = await until_text(late, 10)
        assert TEXT.startswith(shown)
        gate.set()
        rest = [frame async for frame in stream]
    assert not [frame for frame in rest if "stale" in str(frame["data"])]
    late_frames = [frame async for frame in frames(bottega, f"{path}/ws")]
    assert "llm.delta" not in types(late_frames)


async def test_the_sweep_deletes_live_text_of_dead_workers(bottega: Running) -> None:
    pool = bottega.owner
    await pool.execute(
        "INSERT INTO live_text (tenant_id, run_id, call, attempt, at, text) "
        "VALUES ($1, $2, 1, 1, 0, 'left')",
        DEFAULT_TENANT,
        uuid4(),
    )

    async def swept() -> int:
        await sweep(pool)  # the server's own sweep may hold the lock
        left: int = await pool.fetchval("SELECT count(*) FROM live_text")
        return left

    assert await until(swept, not_) == 0


async def test_an_asynchronous_task_s_text_passes_the_output_filter(
    bottega: Running, model: FakeModel, settings: Settings, database_url: str
) -> None:
    gate = asyncio.Event()
    await create(bottega, "leaf")
    await create(bottega, "boss", subagents={"mode": "async", "names": ["leaf"]})

    def decide(request: Frame) -> Reply:
        if named(request) == "leaf":
            return gated_within(gate, ANSWER, events=HALF)
        if request["messages"][-1]["role"] != "tool":
            return calls(("dispatch_subagent", {"prompt": "Go.", "agent": "leaf"}))
        return gated_within(gate, text("The boss talks on and on, all the while."), events=HALF)

    model.decide = decide
    path = f"/v1/runs/{await start(bottega.client, agent='boss', graph=None)}"
    chunks = f"{path}/ws?types=subagent.output_chunk"
    async with (
        running(settings, database_url) as other,
        aclosing(frames(bottega, chunks)) as early,
        aclosing(frames(bottega, f"{path}/ws")) as whoever,
        aclosing(frames(bottega, f"{chunks},llm.delta")) as both,
    ):
        seen, shown = await until_text(early, 10)
        assert TEXT.startswith(shown)
        await until_text(whoever, 10)
        pairs: list[Frame] = []
        while {(frame["type"], bool(frame["task_id"])) for frame in pairs} != {
            ("llm.delta", False), ("llm.delta", True), ("subagent.output_chunk", True)
        }:  # fmt: skip
            pairs.append(await anext(both))
        # This process started after the dispatch; the log has been read by then.
        last = (await bottega.client.get(f"{path}/events?limit=200")).json()["items"][-1]["seq"]
        async with aclosing(frames(other, f"{chunks}&after={last}")) as late:
            assert TEXT.startswith((await until_text(late, 10))[1])
        gate.set()
        seen += [frame async for frame in early][:-1]
        others = [frame async for frame in whoever]
        pairs += [frame async for frame in both]
    (task,) = (await bottega.client.get(f"{path}/tasks")).json()["items"]
    assert {(frame["type"], frame["task_id"]) for frame in seen} == {
        ("subagent.output_chunk", task["id"])
    }
    assert {frame["seq"] for frame in seen} == {None}
    assert "subagent.output_chunk" not in types(others)
    mine = [frame for frame in pairs if frame["task_id"]]
    as_text, as_output = (
        [frame["data"] for frame in mine if frame["type"] == kind]
        for kind in ("llm.delta", "subagent.output_chunk")
    )
    assert as_text == as_output
