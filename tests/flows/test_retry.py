"""Repeating finished runs."""

import asyncio
import json
from collections import Counter
from typing import Any
from uuid import UUID

import pytest
import websockets
from pydantic_core import from_json

from bottega.memory.episodes.episode import episode_id_of
from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, calls, chunk, gated, http_error, sse, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import DIAMOND, named, says
from tests.flows.test_resume import configured
from tests.service import Running, running
from tests.team import CALLS, define, define_graph, start


@pytest.fixture
def bottega(guest: Running) -> Running:
    return guest


@pytest.fixture
def model(guest_model: FakeModel) -> FakeModel:
    return guest_model


async def ended(bottega: Running, run_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    frames = await bottega.frames(f"/v1/runs/{run_id}/ws")
    run: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))
    return run, frames


async def again(bottega: Running, run_id: str, place: str) -> dict[str, Any]:
    answer = await bottega.client.post(f"/v1/runs/{run_id}/retry", json={"from": place})
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    assert (run["retry_of"], run["status"]) == (run_id, "queued")
    assert answer.headers["location"] == f"/v1/runs/{run['id']}"
    return run


async def test_a_retry_from_the_start_repeats_everything(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    run_id = await start(bottega.client, metadata={"mine": 1}, priority=3)
    first, _ = await ended(bottega, run_id)
    second = await again(bottega, run_id, "start")
    run, frames = await ended(bottega, second["id"])
    assert run["status"] == "completed"
    assert (run["metadata"], run["priority"]) == ({"mine": 1}, 3)
    assert frames[0]["data"]["retry_of"] == run_id
    assert len(model.requests) == 2 * CALLS
    assert first["output"] == run["output"]


async def test_a_retry_from_the_last_step_repeats_only_failed_work(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    model.script(calls(("requirements", {"query": "go"})), text("R1"), http_error(400))
    run_id = await start(bottega.client, session_id="s")
    failed, old = await ended(bottega, run_id)
    assert (failed["status"], len(model.requests)) == ("failed", 3)
    model.script(text("all good now"))
    run, frames = await ended(bottega, (await again(bottega, run_id, "last_step"))["id"])
    assert (run["status"], run["output"]) == ("completed", "all good now")
    assert len(model.requests) == 4
    assert model.requests[3]["messages"] == model.requests[2]["messages"]
    assert run["usage"]["model_calls"] == 3
    types = [frame["type"] for frame in frames]
    assert types.count("run.started") == types.count("agent.completed") - 1 == 1
    # Carried tasks and publications are unchanged.
    task_id = next(frame["task_id"] for frame in old if frame["task_id"])
    path = f"/v1/runs/{run['id']}"
    (task,) = (await bottega.client.get(f"{path}/tasks")).json()["items"]
    assert (task["id"], task["status"], task["output"]) == (task_id, "completed", "R1")
    graph = (await bottega.client.get(f"{path}/graph")).json()
    published = {node["agent"]: node["published"] for node in graph["nodes"]}
    assert published["requirements"]["content"] == "R1"
    ended_with = frames[-1]["data"]["answer_seq"]
    assert frames[ended_with - 1]["data"]["output"] == "all good now"


async def test_a_handled_failure_is_kept(bottega: Running, model: FakeModel) -> None:
    """Let the coordinator continue after its sub-agent failed, and fail itself later."""
    await define(bottega.client)
    model.script(
        calls(("requirements", {"query": "go"})),
        http_error(400),
        calls(("designer", {"query": "go"})),
        text("D1"),
        http_error(400),
    )
    run_id = await start(bottega.client)
    await ended(bottega, run_id)
    model.script(text("the end"))
    run, _ = await ended(bottega, (await again(bottega, run_id, "last_step"))["id"])
    assert (run["status"], len(model.requests)) == ("completed", 6)
    tasks = (await bottega.client.get(f"/v1/runs/{run['id']}/tasks")).json()["items"]
    assert {task["agent"]: task["status"] for task in tasks} == {
        "requirements": "failed",
        "designer": "completed",
    }


async def test_a_dag_repeats_the_failed_agent_and_its_descendants(
    bottega: Running, model: FakeModel
) -> None:
    await define_graph(bottega.client, "g", *DIAMOND)
    model.decide = says(b=http_error(400))
    body = {"mode": "dag", "graph": "g", "input": "x"}
    failed = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    assert failed["status"] == "failed"
    before = len(model.requests)
    model.decide = says()
    run, _ = await ended(bottega, (await again(bottega, failed["id"], "last_step"))["id"])
    assert (run["status"], run["output"]) == ("completed", "d's answer")
    asked = [named(request) for request in model.requests[before:]]
    assert "a" not in asked
    assert {"b", "d"} <= set(asked)


async def test_a_retry_can_itself_be_retried(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "leaf")
    await create(bottega, "root", subagents={"names": ["leaf"]})
    model.script(calls(("leaf", {"query": "go"})), text("L"), http_error(400))
    body = {"agent": "root", "input": "x"}
    first = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    model.script(http_error(400))
    second, _ = await ended(bottega, (await again(bottega, first["id"], "last_step"))["id"])
    assert (second["status"], len(model.requests)) == ("failed", 4)
    model.script(text("third time lucky"))
    third, _ = await ended(bottega, (await again(bottega, second["id"], "last_step"))["id"])
    assert (third["output"], len(model.requests)) == ("third time lucky", 5)
    path = f"/v1/runs/{third['id']}/tasks"
    assert [task["output"] for task in (await bottega.client.get(path)).json()["items"]] == ["L"]


async def test_a_completed_run_repeated_from_its_last_step_makes_no_calls(
    bottega: Running, model: FakeModel
) -> None:
    await define(bottega.client)
    run_id = await start(bottega.client)
    first, _ = await ended(bottega, run_id)
    run, frames = await ended(bottega, (await again(bottega, run_id, "last_step"))["id"])
    assert (run["output"], len(model.requests)) == (first["output"], CALLS)
    (stored,) = [frame for frame in frames if frame["type"] == "episode.stored"]
    assert stored["seq"] == len(frames) - 1
    assert stored["data"]["episode_id"] == str(episode_id_of(UUID(run["id"])))


async def test_an_unfinished_run_cannot_be_retried(bottega: Running, model: FakeModel) -> None:
    await create(bottega, "solo")
    gate = asyncio.Event()
    model.script(gated(gate, text("done")))
    body = {"agent": "solo", "input": "x"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    answer = await bottega.client.post(f"/v1/runs/{run_id}/retry", json={})
    assert (answer.status_code, answer.json()["code"]) == (409, "not_final")
    gate.set()
    await ended(bottega, run_id)
    unknown = "/v1/runs/01a1fdb7-6ff4-7105-ba5d-4c99da8e1434/retry"
    assert (await bottega.client.post(unknown, json={})).status_code == 404
    odd = await bottega.client.post(f"/v1/runs/{run_id}/retry", json={"from": "middle"})
    assert odd.status_code == 422


async def test_a_resumed_repetition_keeps_its_work(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    """Let leaf answer before the failure, and again in the repetition, which is interrupted."""
    body = {"agent": "root", "graph": "g", "input": "x", "session_id": "s"}
    views: list[Any] = []

    async def look(bottega: Running, run_id: str) -> None:
        path = f"/v1/runs/{run_id}"
        tasks = (await bottega.client.get(f"{path}/tasks")).json()["items"]
        told = [(task["agent"], task["status"], task["output"], task["depth"]) for task in tasks]
        graph = (await bottega.client.get(f"{path}/graph")).json()["nodes"]
        memory = (await bottega.client.get("/v1/sessions/s")).json()["memory"]
        views.append((told, graph, memory))

    async with running(configured(settings, model), database_url, worker=True) as bottega:
        await create(bottega, "leaf")
        await create(bottega, "mid", subagents={"names": ["leaf"]})
        await create(bottega, "root", subagents={"names": ["leaf", "mid"]})
        await bottega.client.post("/v1/graphs", json={"name": "g", "nodes": ["leaf"], "edges": []})
        model.script(calls(("leaf", {"query": "1"})), text("L1"), calls(("mid", {"query": "2"})))
        model.script(calls(("leaf", {"query": "3"})), *[http_error(400)] * 3)
        first = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
        assert first["status"] == "failed"
        asked = len(model.requests)
        model.script(text("L2"), text("M"), gated(asyncio.Event(), text("never")))
        second = await again(bottega, first["id"], "last_step")
        await model.received(asked + 3)
        await look(bottega, second["id"])
    model.script(text("the end"))
    async with running(configured(settings, model), database_url, worker=True) as bottega:
        run, _ = await ended(bottega, second["id"])
        await look(bottega, second["id"])
    assert (run["output"], len(model.requests)) == ("the end", asked + 4)
    assert views[0] == views[1]
    tasks, (leaf,), (memory,) = views[1]
    assert tasks == [
        ("leaf", "completed", "L1", 0),
        ("mid", "completed", "M", 0),
        ("leaf", "completed", "L2", 1),
    ]
    assert (leaf["published"]["version"], leaf["published"]["content"]) == (2, "L2")
    # The session has L1 from the first run; a repetition does not add it again.
    assert (memory["version"], memory["content"]) == (2, "L2")


async def test_work_done_beside_the_failure_is_kept(bottega: Running, model: FakeModel) -> None:
    """Let b fail while c works; later steps of c in the log are not repeated."""
    gate = asyncio.Event()
    await define_graph(bottega.client, "g", *DIAMOND)
    model.decide = says(b=http_error(400), c=gated(gate, text("c's answer")))
    body = {"mode": "dag", "graph": "g", "input": "x"}
    run_id = (await bottega.client.post("/v1/runs", json=body)).json()["id"]
    async with websockets.connect(
        f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws", additional_headers=bottega.headers
    ) as socket:
        async for message in socket:
            if from_json(message)["type"] == "agent.failed":
                gate.set()
    failed, _ = await ended(bottega, run_id)
    assert failed["status"] == "failed"
    before = len(model.requests)
    model.decide = says()
    run, frames = await ended(bottega, (await again(bottega, run_id, "last_step"))["id"])
    assert (run["status"], run["output"]) == ("completed", "d's answer")
    assert sorted(named(request) for request in model.requests[before:]) == ["b", "d"]
    assert [frame["type"] for frame in frames].count("agent.failed") == 0


def dear(*content: str, **fields: Any) -> Reply:
    """Return an answer that costs 990 tokens."""
    usage = {"prompt_tokens": 900, "completion_tokens": 90}
    return sse(chunk(*content, **fields), {"choices": [], "usage": usage})


async def test_a_budget_counts_only_the_run_s_own_tokens(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "leaf")
    await create(bottega, "root", subagents={"names": ["leaf"]})
    ask = {"index": 0, "id": "c", "function": {"name": "leaf", "arguments": '{"query": "go"}'}}
    model.script(dear(tool_calls=[ask], finish_reason="tool_calls"))
    body = {"agent": "root", "input": "x", "token_budget": 1000}
    first = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    assert first["error"]["code"] == "budget_exhausted"
    model.script(dear("L", finish_reason="stop"))
    second, _ = await ended(bottega, (await again(bottega, first["id"], "last_step"))["id"])
    assert (second["error"]["code"], len(model.requests)) == ("budget_exhausted", 2)
    model.script(dear("step by step", finish_reason="stop"))
    third, _ = await ended(bottega, (await again(bottega, second["id"], "last_step"))["id"])
    assert (third["output"], len(model.requests)) == ("step by step", 3)


class Swarm:
    """Plays a boss who dispatches tasks, awaits those that end, and then, if it may, the others.

    Attributes:
        works: whether all goes well: slow tasks answer, broken ones too, and the boss.
        slow: set when a slow task's model was asked.
    """

    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts
        self.works = False
        self.slow = asyncio.Event()

    def __call__(self, request: dict[str, Any]) -> Reply:
        messages = request["messages"]
        if named(request) != "boss":
            return self._task(messages[-1]["content"])
        told = [json.loads(m["content"]) for m in messages if m["role"] == "tool"]
        ids = [result["task_id"] for result in told if "task_id" in result]
        looks = len(told) - len(ids)
        if not ids:
            return calls(*[("dispatch_subagent", {"prompt": prompt}) for prompt in self.prompts])
        if not looks:
            ending = [i for i, prompt in zip(ids, self.prompts, strict=True) if prompt != "slow"]
            return calls(("await_subagent", {"task_ids": ending}))
        if not self.works:
            return gated(self.slow, http_error(400))
        return calls(("await_subagent", {"task_ids": ids})) if looks == 1 else text("all done")

    def _task(self, asked: str) -> Reply:
        if asked.startswith("slow"):
            self.slow.set()
            return text("slow but sure") if self.works else gated(asyncio.Event(), text("never"))
        if asked.startswith("broken"):
            return text("mended") if self.works else http_error(400)
        return text("quick")


async def test_finished_tasks_are_kept_and_interrupted_ones_repeated(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "boss", subagents={"mode": "async", "names": []})
    model.decide = swarm = Swarm("one", "two", "broken", "slow")
    body = {"agent": "boss", "input": "x"}
    failed = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    assert (failed["status"], len(model.requests)) == ("failed", 7)
    rows = await tasks_of(bottega, failed["id"])
    assert [row["status"] for row in rows] == ["completed", "completed", "failed", "cancelled"]
    swarm.works = True
    run, frames = await ended(bottega, (await again(bottega, failed["id"], "last_step"))["id"])
    assert (run["status"], run["output"]) == ("completed", "all done")
    assert run["usage"]["model_calls"] == 8  # of both runs, except for failed calls
    asked = [named(request) for request in model.requests[7:]]
    assert asked.count("boss") == 2
    assert len(asked) == 4  # the broken task and the slow one
    # The boss had not read of the failure; now it reads results without one.
    assert "mended" in model.requests[-1]["messages"][-1]["content"]
    kept = await tasks_of(bottega, run["id"])
    assert kept[:2] == [{**row, **times_of(new)} for row, new in zip(rows[:2], kept, strict=False)]
    assert [row["id"] for row in kept] == [row["id"] for row in rows]
    assert [row["status"] for row in kept] == ["completed"] * 4
    assert [row["attempt"] for row in kept] == [1, 1, 2, 2]
    assert {row["mode"] for row in kept} == {"async"}
    for row in kept:
        mine = [frame["type"] for frame in frames if frame["task_id"] == row["id"]]
        assert mine.count("subagent.dispatched") == mine.count("subagent.completed") == 1
        assert not {"subagent.failed", "subagent.cancelled", "agent.failed"} & set(mine)
        assert mine.count("subagent.resumed") == row["attempt"] - 1
    third, _ = await ended(bottega, (await again(bottega, run["id"], "last_step"))["id"])
    assert (third["output"], len(model.requests)) == ("all done", 11)


async def test_a_task_failure_that_its_parent_handled_is_kept(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "boss", subagents={"mode": "async", "names": []})
    works = False

    def decide(request: dict[str, Any]) -> Reply:
        told = [json.loads(m["content"]) for m in request["messages"] if m["role"] == "tool"]
        if named(request) != "boss":
            return http_error(400)
        if not told:
            return calls(("dispatch_subagent", {"prompt": "go"}))
        if len(told) < 3:
            return calls(("await_subagent", {"task_id": told[0]["task_id"]}))
        return text("without it") if works else http_error(400)

    model.decide = decide
    body = {"agent": "boss", "input": "x"}
    first = (await bottega.client.post("/v1/runs?wait=30", json=body)).json()
    assert (first["status"], len(model.requests)) == ("failed", 5)
    works = True
    run, frames = await ended(bottega, (await again(bottega, first["id"], "last_step"))["id"])
    assert (run["output"], len(model.requests)) == ("without it", 6)
    assert parsed(model.requests[5]) == parsed(model.requests[4])
    assert [frame["type"] for frame in frames].count("subagent.failed") == 1
    (old,), (new,) = await tasks_of(bottega, first["id"]), await tasks_of(bottega, run["id"])
    assert new == {**old, **times_of(new)}
    assert (new["status"], new["attempt"]) == ("failed", 1)


async def test_a_cancelled_tree_of_tasks_continues_where_it_stopped(
    bottega: Running, model: FakeModel
) -> None:
    await create(bottega, "lead", subagents={"mode": "async", "names": []})
    await create(bottega, "boss", subagents={"mode": "async", "names": ["lead"]})
    slow, hurries = asyncio.Event(), False
    asks = {
        "boss": [("dispatch_subagent", {"prompt": "lead them", "agent": "lead"})],
        "lead": [("dispatch_subagent", {"prompt": prompt}) for prompt in ("quick", "slow")],
    }

    def decide(request: dict[str, Any]) -> Reply:
        who = named(request)
        if who not in asks:
            if request["messages"][-1]["content"].startswith("quick"):
                return text("quick")
            slow.set()
            return text("at last") if hurries else gated(asyncio.Event(), text("never"))
        told = [json.loads(m["content"]) for m in request["messages"] if m["role"] == "tool"]
        if not told:
            return calls(*asks[who])
        if "tasks" not in told[-1]:
            return calls(("await_subagent", {"task_ids": [each["task_id"] for each in told]}))
        return text(" and ".join(task["final_output"] for task in told[-1]["tasks"]))

    model.decide = decide
    run_id = await start(bottega.client, agent="boss", graph=None)
    async with websockets.connect(
        f"ws://127.0.0.1:{bottega.port}/v1/runs/{run_id}/ws", additional_headers=bottega.headers
    ) as socket:
        seen = Counter[str]()
        async for message in socket:  # until all answers but the slow task's are stored
            seen[from_json(message)["type"]] += 1
            if seen["llm.completed"] == 5 and seen["subagent.completed"]:
                break
    await slow.wait()
    await bottega.client.post(f"/v1/runs/{run_id}/cancel")
    old, _ = await ended(bottega, run_id)
    assert (old["status"], len(model.requests)) == ("cancelled", 6)
    hurries = True
    run, _ = await ended(bottega, (await again(bottega, run_id, "last_step"))["id"])
    assert (run["output"], len(model.requests)) == ("quick and at last", 9)
    first, second = await tasks_of(bottega, run_id), await tasks_of(bottega, run["id"])
    shape = ("id", "parent_id", "agent", "depth")
    assert [[row[name] for name in shape] for row in first] == [
        [row[name] for name in shape] for row in second
    ]
    assert [row["attempt"] for row in second] == [2, 1, 2]


def parsed(request: dict[str, Any]) -> list[Any]:
    """Return a request's messages, with tool results parsed from JSON."""
    return [
        {**message, "content": json.loads(message["content"])}
        if message["role"] == "tool"
        else message
        for message in request["messages"]
    ]


async def tasks_of(bottega: Running, run_id: str) -> list[dict[str, Any]]:
    answer = await bottega.client.get(f"/v1/runs/{run_id}/tasks")
    rows: list[dict[str, Any]] = answer.json()["items"]
    return rows


def times_of(row: dict[str, Any]) -> dict[str, Any]:
    times = ("created_at", "started_at", "ended_at", "status_changed_at")
    return {name: row[name] for name in times}


async def test_a_retry_s_memory_access_follows_the_server_s_current_setting(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    async with running(configured(settings, model), database_url) as bottega:
        await define(bottega.client)
        run_id = await start(bottega.client)
        await bottega.client.post(f"/v1/runs/{run_id}/cancel")
    less = configured(settings, model).model_copy(update={"memory": "read"})
    async with running(less, database_url) as bottega:
        assert (await again(bottega, run_id, "start"))["memory"] == "read"
