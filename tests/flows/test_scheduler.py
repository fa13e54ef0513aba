"""Waiting and running tasks, as shown by their rows and the workers' heartbeats."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pydantic_core import from_json

from bottega.settings import Settings
from tests.fake_model import FakeModel, Reply, calls, gated, http_error, text
from tests.flows.test_agent_data import create
from tests.flows.test_dag import named
from tests.service import Running, running, watch
from tests.waiting import until

LIMITS = {"max_concurrent": 1, "max_timeout": 60}
PRIORITIES = (2, 7, 7)


def dispatched(request: dict[str, Any]) -> list[str]:
    """Return the ids of the dispatched tasks in a request."""
    told = [m["content"] for m in request["messages"] if m["role"] == "tool"]
    return [found["task_id"] for one in told if "task_id" in (found := from_json(one))]


def team(*prompts: tuple[int, str], worker: Reply, last: Reply) -> Callable[[Any], Reply]:
    """Return a model that dispatches a task for each (priority, prompt), and awaits them all."""

    def decide(request: dict[str, Any]) -> Reply:
        if named(request) != "boss":
            return worker
        told = sum(message["role"] == "tool" for message in request["messages"])
        if told == 0:
            made = [{"prompt": prompt, "agent": "worker"} for _, prompt in prompts]
            asked = [
                {**each, "priority": priority, "metadata": {"n": priority}}
                for each, (priority, _) in zip(made, prompts, strict=True)
            ]
            return calls(*(("dispatch_subagent", each) for each in asked))
        if told == len(prompts):
            return calls(("await_subagent", {"task_ids": dispatched(request)}))
        return last

    return decide


async def start(bottega: Running, **limits: Any) -> str:
    await create(bottega, "worker")
    subagents = {"mode": "async", "names": ["worker"], "limits": limits}
    await create(bottega, "boss", subagents=subagents)
    answer = await bottega.client.post("/v1/runs", json={"agent": "boss", "input": "x"})
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


async def tasks(bottega: Running, run_id: str, **query: Any) -> dict[str, Any]:
    answer = await bottega.client.get(f"/v1/runs/{run_id}/tasks", params=query)
    found: dict[str, Any] = answer.json()
    return found


async def workers(bottega: Running, accepts: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the state of the one worker, once it is as expected."""

    async def look() -> dict[str, Any]:
        (worker,) = (await bottega.client.get("/v1/scheduler")).json()["workers"]
        found: dict[str, Any] = worker
        return found

    return await until(look, accepts)


@pytest.mark.deep
async def test_waiting_and_running_tasks_are_shown(bottega: Running, model: FakeModel) -> None:
    gate = asyncio.Event()
    wanted = [(priority, f"part {n}") for n, priority in enumerate(PRIORITIES)]
    model.decide = team(*wanted, worker=gated(gate, text("done")), last=text("all done"))
    run_id = await start(bottega, **LIMITS)
    worker = await workers(
        bottega, lambda told: (told["pool"]["busy"], told["pool"]["queued"]) == (1, 2)
    )
    assert worker["pool"]["runs"] == 1
    assert worker["pool"]["size"] == worker["pool"]["max"] == 50
    assert worker["pool"]["queue"] == worker["tenant"]["queue"] == {"7": 2}
    own = [worker["tenant"][name] for name in ("running", "parked", "queued")]
    assert own == [1, 0, 2]
    page = await until(
        lambda: tasks(bottega, run_id),
        lambda page: [each["status"] for each in page["items"]] == ["running", "queued", "queued"],
    )
    now = page["items"]
    assert now[0]["started_at"] >= now[0]["created_at"]
    assert [task["started_at"] for task in now[1:]] == [None, None]
    assert [task["ended_at"] for task in now] == [None] * 3
    gate.set()
    frames = await watch(bottega.port, run_id)
    assert frames[-1]["type"] == "run.completed"
    over = (await tasks(bottega, run_id))["items"]
    assert [task["id"] for task in over] == [task["id"] for task in now]
    for task, before, (priority, _) in zip(over, now, wanted, strict=True):
        assert (task["status"], task["output"]) == ("completed", "done")
        assert (task["mode"], task["agent"], task["depth"]) == ("async", "worker", 0)
        assert (task["priority"], task["metadata"]) == (priority, {"n": priority})
        assert (task["timeout_ms"], task["attempt"]) == (60_000, 1)
        assert task["duration_ms"] >= 0
        assert task["created_at"] == before["created_at"] <= task["started_at"] <= task["ended_at"]
    idle = await workers(bottega, lambda told: told["pool"]["runs"] == 0)
    assert (idle["pool"]["busy"], idle["pool"]["queued"], idle["tenant"]["running"]) == (0, 0, 0)


async def test_pages_of_tasks_are_in_dispatch_order(bottega: Running, model: FakeModel) -> None:
    """Check that it is not the order of starts: the last task had the highest priority."""
    wanted = [(priority, f"part {n}") for n, priority in enumerate((9, 5, 1))]
    model.decide = team(*wanted, worker=text("done"), last=text("all done"))
    run_id = await start(bottega, **LIMITS)
    await watch(bottega.port, run_id)
    whole = (await tasks(bottega, run_id))["items"]
    assert [task["priority"] for task in whole] == [9, 5, 1]
    for order, expected in (("asc", whole), ("desc", whole[::-1])):
        page = await tasks(bottega, run_id, limit=1, order=order)
        found = page["items"]
        while cursor := page["next_cursor"]:
            page = await tasks(bottega, run_id, limit=1, order=order, cursor=cursor)
            found += page["items"]
        assert found == expected


@pytest.mark.deep
async def test_an_open_breaker_is_shown(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    last = gated(gate, text("it failed"))
    model.decide = team((5, "part"), worker=http_error(500), last=last)
    configured = settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "model_patience_s": 0.0,
            "subagent_failure_threshold": 1,
        }
    )
    async with running(configured, database_url, worker=True) as bottega:
        run_id = await start(bottega)
        worker = await workers(bottega, lambda told: bool(told["tenant"]["breakers"]))
        (breaker,) = worker["tenant"]["breakers"]
        assert (breaker["agent"], breaker["state"], breaker["failures"]) == ("worker", "open", 1)
        assert 0 < breaker["retry_after_ms"] <= 30_000
        gate.set()
        await watch(bottega.port, run_id)
        (task,) = (await tasks(bottega, run_id))["items"]
        assert (task["status"], task["mode"]) == ("failed", "async")
        assert task["error"]["code"]
