"""The way of a run, from POST to the last frame: the map of the service.

POST /v1/runs → row, first event and queue entry in one statement → a worker is notified, claims the
run, builds its agents → a client of the model server sends each call → answers flow along the graph
→ every step is journalled → a WebSocket shows it.
"""

import asyncio
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import websockets

from bottega.cli.scenarios import SOFTWARE
from bottega.clock import monotonic
from bottega.settings import Settings
from tests.arch.sources import PACKAGE
from tests.arch.test_budgets import BUDGETS
from tests.fake_model import FakeModel, gated, text
from tests.flows.test_processes import environment
from tests.processes import command
from tests.service import Running, running
from tests.team import CALLS, asked_of, define, start, systems
from tests.waiting import until

AWARENESS = """You are coordinating sub-agents with dependencies.

Dependency order (call upstream before downstream):
  requirements -> designer
  requirements -> implementer
  designer -> implementer

Recommended execution order: requirements, designer, implementer

Guideline: do not call an agent before its prerequisites have been executed."""


def content_of(fenced: str, source: str) -> str:
    """Return the content of a shared-context message, after checking its fence."""
    match = re.fullmatch(
        rf"Shared context from {source}:\n<(shared-context-[0-9a-f]+)>(.*)</\1>", fenced, re.DOTALL
    )
    assert match, fenced
    return match.group(2)


async def test_a_run_from_post_to_the_last_frame(bottega: Running, model: FakeModel) -> None:
    await define(bottega.client)
    run_id = await start(bottega.client)
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")

    # The model's side of the socket: the order of agents and requests.
    assert [asked_of(request) for request in model.requests] == [
        "coordinator",
        "requirements",
        "coordinator",
        "designer",
        "coordinator",
        "implementer",
        "coordinator",
    ]
    by_agent = {asked_of(request): request for request in model.requests}
    answers = published(frames)
    assert systems(by_agent["coordinator"])[1:] == [AWARENESS]
    assert systems(by_agent["requirements"])[1:] == []
    (context,) = systems(by_agent["designer"])[1:]
    assert content_of(context, "requirements") == answers["requirements"]
    first, second = systems(by_agent["implementer"])[1:]
    assert content_of(first, "requirements") == answers["requirements"]
    assert content_of(second, "designer") == answers["designer"]
    for request in model.requests:
        assert request["stream"] is True
        assert request["stream_options"] == {"include_usage": True}

    # The subscriber's side: a log without gaps that ends once.
    assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))
    assert [frame["type"] for frame in frames if frame["type"].startswith("run.")] == [
        "run.queued",
        "run.started",
        "run.completed",
    ]
    assert frames[-1]["type"] == "run.completed"
    injected = [frame for frame in frames if frame["type"] == "memory.injected"]
    assert [(frame["agent"], frame["data"]["source"]) for frame in injected] == [
        ("designer", "requirements"),
        ("implementer", "requirements"),
        ("implementer", "designer"),
    ]

    # The API's view afterwards.
    run = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert run["status"] == "completed"
    assert run["usage"]["model_calls"] == CALLS
    assert [attempt["cause"] for attempt in run["attempts"]] == ["start"]
    completed = [frame for frame in frames if frame["type"] == "agent.completed"]
    assert run["output"] == completed[-1]["data"]["output"]
    assert "requirements" in run["output"]
    page = (await bottega.client.get(f"/v1/runs/{run_id}/events?limit=200")).json()
    assert page["items"] == frames
    tasks = (await bottega.client.get(f"/v1/runs/{run_id}/tasks")).json()["items"]
    assert [(task["agent"], task["status"], task["output"]) for task in tasks] == [
        (name, "completed", answers[name]) for name in ("requirements", "designer", "implementer")
    ]
    graph = (await bottega.client.get(f"/v1/runs/{run_id}/graph")).json()
    assert {node["agent"]: node["published"]["content"] for node in graph["nodes"]} == answers
    path = f"/v1/graphs/{SOFTWARE.graph_name}/drawing"
    drawn = (await bottega.client.get(path, params={"run_id": run_id})).text
    assert drawn.count("v1") >= 3
    assert "v1" not in (await bottega.client.get(path)).text


def published(frames: list[dict[str, Any]]) -> dict[str, str]:
    """Return each agent's publication, found through the event that it refers to."""
    by_seq = {frame["seq"]: frame for frame in frames}
    return {
        frame["agent"]: by_seq[frame["data"]["answer_seq"]]["data"]["output"]
        for frame in frames
        if frame["type"] == "memory.published"
    }


async def test_a_run_without_a_graph_has_no_awareness_and_no_sharing(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    answer = await bottega.client.post(
        "/v1/runs?wait=30", json={"agent": SOFTWARE.coordinator, "input": "Build it."}
    )
    assert answer.status_code == 202
    assert answer.json()["status"] == "completed"
    assert all(len(systems(request)) == 1 for request in model.requests)
    graph = await bottega.client.get(f"/v1/runs/{answer.json()['id']}/graph")
    assert graph.status_code == 404
    assert graph.json()["code"] == "no_graph"


IDLE_S = 3.0


@contextmanager
def modules_run() -> Iterator[set[str]]:
    """Collect the modules with a function that runs during the block, but not the fake model's."""
    run: set[str] = set()

    def observe(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")
        if event == "call" and not module.startswith(("/", "<", "llm/demo_model/")):
            run.add(module)

    threading.setprofile(observe)
    sys.setprofile(observe)
    try:
        yield run
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def idle_modules() -> set[str]:
    """Return the modules that an idle service runs."""
    with modules_run() as idle:
        ends_at = monotonic() + IDLE_S
        await until(lambda: monotonic() > ends_at)
    return idle


def check(name: str, ways: Sequence[set[str]], idle: set[str]) -> None:
    """Check the number of modules that each way needs, without those of an idle service."""
    needed = set.intersection(*ways) - idle
    assert len(needed) <= BUDGETS["ways"][name], " ".join(sorted(needed))


@pytest.mark.parametrize("memory", ["off", "full"])
async def test_few_modules_run_between_a_post_and_the_first_model_call(
    bottega: Running, model: FakeModel, memory: str
) -> None:
    await define(bottega.client)
    body = {"agent": "designer", "input": "Draw the harbour warehouse.", "memory": memory}
    for _ in range(2):  # the later ones recall an episode
        done = await bottega.client.post("/v1/runs?wait=30", json=body | {"user": "ada"})
        assert done.json()["status"] == "completed"
    idle = await idle_modules()
    ways = []
    for _ in range(6):
        calls = len(model.requests)
        with modules_run() as way:
            run = await bottega.client.post("/v1/runs", json=body | {"user": "ada"})
            await model.received(calls + 1)
        ways.append(way)
        await bottega.watch(run.json()["id"])
    check(f"post_to_model_memory_{memory}", ways, idle)


async def test_few_modules_run_between_a_websocket_and_its_first_frame(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    run_id = await start(bottega.client)
    await bottega.watch(run_id)
    idle = await idle_modules()
    ways = []
    for _ in range(6):  # background work runs beside some of them
        with modules_run() as way:
            address = f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws"
            # Its end waits for the server's, behind unread messages: let all of them in.
            async with websockets.connect(address, max_queue=None) as socket:
                await socket.recv()
        ways.append(way)
    check("websocket_to_first_frame", ways, idle)


@pytest.mark.deep
async def test_few_modules_run_between_the_end_of_a_worker_and_the_next_model_call(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Kill the worker that has the run; count in this process, whose worker takes it over."""
    limits = {"openai_base_url": model.base_url, "takeover_s": 2.0}
    configured = settings.model_copy(update=limits)
    with_model = environment(database_url, model, BOTTEGA_TAKEOVER_S="2")
    ways, idle = list[set[str]](), set[str]()
    async with running(configured, database_url) as api:
        await define(api.client)
        for _ in range(2):
            model.script(gated(asyncio.Event(), text("never")))
            async with command("worker", **with_model) as victim:
                calls = len(model.requests)
                run_id = await start(api.client)
                await model.received(calls + 1)
                async with running(configured, database_url, worker=True) as other:
                    idle |= await idle_modules()
                    victim.kill()
                    with modules_run() as way:
                        await model.received(calls + 2)
                    assert (await other.watch(run_id))[-1]["type"] == "run.completed"
            ways.append(way)
    check("takeover_to_model", ways, idle)
