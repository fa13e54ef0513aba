"""Limits of asynchronous sub-agents, as their parents' models see them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bottega.agents import Usage
from bottega.settings import Settings
from tests import swarm
from tests.domain.subagents import passed
from tests.fake_model import FakeModel, calls, http_error, text
from tests.service import Running, running, watch
from tests.tenants import holder
from tests.waiting import until

DEQUEUED = "subagent.dequeued"


async def play(
    bottega: Running, model: FakeModel, script: dict[str, list[swarm.Step]], **fields: Any
) -> list[dict[str, Any]]:
    """Run a script to its end; return its log."""
    model.decide = swarm.plays(script)
    return await watch(bottega.port, await swarm.start(bottega.client, **fields))


def last_of(model: FakeModel, prompt: str) -> list[dict[str, Any]]:
    """Return the latest tool results that an agent read."""
    asked = [request for request in model.requests if swarm.prompt_of(request) == prompt]
    return swarm.results_in(asked[-1])


def of(frames: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [frame["data"] for frame in frames if frame["type"] == kind]


async def test_a_task_s_own_time_and_tokens(bottega: Running, model: FakeModel) -> None:
    await swarm.coordinator(bottega.client, subagents={"limits": {"max_timeout": 0.5}})
    script: dict[str, list[swarm.Step]] = {
        "root": [
            calls(
                ("dispatch_subagent", {"prompt": "slow", "timeout_ms": 600_000}),
                ("dispatch_subagent", {"prompt": "poor", "token_budget": 20}),
            ),
            swarm.awaits(),
            swarm.reports,
        ],
        "slow": [swarm.never],
    }
    frames = await play(bottega, model, script)
    swarm.assert_whole(frames)
    slow, poor = last_of(model, "root")[-1]["tasks"]
    assert (slow["status"], poor["status"]) == ("timeout", "failed")
    assert "0.5 s" in slow["error"]
    assert "used up" in poor["error"]
    (failed,), (late,) = of(frames, "subagent.failed"), of(frames, "subagent.timeout")
    assert (failed["error"]["code"], late["error"]["code"]) == ("budget_exhausted", "timeout")
    assert failed["token_usage"] == Usage().to_dict()
    tasks = await swarm.tasks_of(bottega.client, frames[0]["run_id"])
    assert {task["timeout_ms"] for task in tasks} == {500}
    assert {task["error"]["code"] for task in tasks} == {"budget_exhausted", "timeout"}
    await model.disconnected()


async def test_tasks_share_the_token_budget_of_their_run(
    bottega: Running, model: FakeModel
) -> None:
    """Check that the task fails, its parent reads so, and the run fails at its own next call."""
    await swarm.coordinator(bottega.client)
    writes: list[swarm.Step] = [
        calls(("write_file", {"path": "x", "content": "y"}), content="spent " * 300)
    ]
    script: dict[str, list[swarm.Step]] = {
        "root": [swarm.dispatches("greedy"), swarm.awaits(), swarm.reports],
        "greedy": writes,
    }
    frames = await play(bottega, model, script, token_budget=7000)
    (failed,) = of(frames, "subagent.failed")
    assert failed["error"]["code"] == "budget_exhausted"
    assert "the run's token_budget is used up" in failed["error"]["message"]
    assert failed["token_usage"]["output"] > 0
    run = (await bottega.client.get(f"/v1/runs/{frames[0]['run_id']}")).json()
    spent = run["usage"]
    paid = await bottega.owner.fetchval("SELECT amount FROM daily_spending WHERE unit = 'tokens'")
    assert paid == spent["input"] + spent["output"]
    if frames[-1]["type"] == "run.completed":
        swarm.assert_whole(frames)
        assert run["output"].startswith("failed: the run's token_budget is used up")
        assert paid <= 7000 + 1000  # the largest error of one call's estimates
    else:
        swarm.assert_whole(frames, "run.failed")
        assert run["error"]["code"] == "budget_exhausted"


async def test_tasks_count_in_the_day_s_tokens(
    configured: Callable[..., Settings], database_url: str, model: FakeModel
) -> None:
    async with running(configured(tokens_per_day=4000), database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client)
        spends = calls(("write_file", {"path": "x", "content": "y"}), content="spent " * 300)
        script: dict[str, list[swarm.Step]] = {
            "root": [swarm.dispatches("greedy"), swarm.awaits(), swarm.reports],
            "greedy": [spends],
        }
        frames = await play(bottega, model, script)
    (failed,) = of(frames, "subagent.failed")
    assert "the tenant's limit of tokens for today" in failed["error"]["message"]
    assert failed["error"]["code"] == "budget_exhausted"


async def test_tasks_nest_up_to_the_limit(bottega: Running, model: FakeModel) -> None:
    for name, below in (("low", []), ("mid", ["low"]), ("high", ["mid"]), ("boss", ["high"])):
        await swarm.coordinator(bottega.client, name, subagents={"names": below})
    deeper = [swarm.awaits(), swarm.reports]
    script: dict[str, list[swarm.Step]] = {
        "root": [swarm.dispatches("1", agent="high"), *deeper],
        "1": [swarm.dispatches("2", agent="mid"), *deeper],
        "2": [swarm.dispatches("3", agent="low"), *deeper],
        "3": [swarm.dispatches("4"), text("no deeper")],
    }
    frames = await play(bottega, model, script)
    swarm.assert_whole(frames)
    (refused,) = last_of(model, "3")
    assert "3 deep" in refused["error"]
    (told,) = of(frames, "subagent.backpressure")
    assert (told["code"], told["limit"]) == ("subagent_depth_exceeded", 3)
    depths = [task["depth"] for task in await swarm.tasks_of(bottega.client, frames[0]["run_id"])]
    assert sorted(depths) == [0, 1, 2]
    run = (await bottega.client.get(f"/v1/runs/{frames[0]['run_id']}")).json()
    assert run["output"] == "completed: completed: completed: no deeper"


async def test_an_agent_lowers_what_the_operator_allows(
    configured: Callable[..., Settings], database_url: str, model: FakeModel
) -> None:
    """Check that of five tasks two run, two wait and one is refused; the operator allows three."""
    gate = asyncio.Event()
    script: dict[str, list[swarm.Step]] = {
        "root": [swarm.dispatches("a", "b", "c", "d", "e"), swarm.awaits(), swarm.reports],
        **{leaf: [swarm.held(gate, text(leaf))] for leaf in "abcd"},
    }
    before = configured(subagent_max_queued=50)
    async with running(before, database_url) as bottega:
        limits = {"max_concurrent": 2, "max_queued": 50}
        await swarm.coordinator(bottega.client, subagents={"limits": limits})
    allowed = configured(subagent_max_concurrent=3, subagent_max_queued=2)
    async with running(allowed, database_url, worker=True) as bottega:
        shown = (await bottega.client.get("/v1/agents/boss")).json()
        assert shown["subagents"]["limits"]["max_queued"] == 50
        assert shown["effective_limits"]["max_queued"] == 2, "the operator has lowered it"
        model.decide = swarm.plays(script)
        run_id = await swarm.start(bottega.client)
        await model.received(4)  # two of the root, and those of a and b
        await swarm.until(database_url, "SELECT count(*) = 2 FROM tasks WHERE status = 'running'")
        await swarm.until(database_url, "SELECT count(*) = 2 FROM tasks WHERE status = 'queued'")
        assert sorted(map(swarm.prompt_of, model.requests)) == ["a", "b", "root", "root"]
        gate.set()
        frames = await watch(bottega.port, run_id)
    swarm.assert_whole(frames)
    refused = last_of(model, "root")[4]
    assert "await some" in refused["error"]
    (told,) = of(frames, "subagent.backpressure")
    assert (told["code"], told["size"], told["limit"]) == ("subagent_quota_exceeded", 2, 2)
    assert [task["status"] for task in last_of(model, "root")[-1]["tasks"]] == ["completed"] * 4


async def test_patience_that_ends_on_429_opens_no_breaker(
    configured: Callable[..., Settings], database_url: str, model: FakeModel
) -> None:
    """Check it with a server that asks for a longer wait than the agents have."""
    again = {"prompt": "again", "agent": "weak"}
    script: dict[str, list[swarm.Step]] = {
        "root": [
            swarm.dispatches(*"vwxyz", agent="weak"),
            swarm.awaits(),
            calls(("dispatch_subagent", again)),
            text("done"),
        ],
        **{
            leaf: [lambda request: http_error(429, {"retry-after": "600"})]
            for leaf in (*"vwxyz", "again")
        },
    }
    async with running(configured(model_patience_s=2.0), database_url, worker=True) as bottega:
        await swarm.agent(bottega.client, "weak", model="overloaded")
        await swarm.coordinator(bottega.client, subagents={"names": ["weak"]})
        frames = await play(bottega, model, script)
    failed = [data["error"]["code"] for data in of(frames, "subagent.failed")]
    assert failed[:5] == ["model_unavailable"] * 5
    assert last_of(model, "root")[-1]["status"] == "queued"
    assert of(frames, "subagent.circuit_opened") == []


async def test_a_dispatch_with_retries_survives_failures_of_its_model(
    configured: Callable[..., Settings], database_url: str, model: FakeModel
) -> None:
    failures = iter([http_error(500), http_error(500)])
    script: dict[str, list[swarm.Step]] = {
        "root": [swarm.dispatches("firm", retries=2), swarm.awaits(), swarm.reports],
        "firm": [lambda request: next(failures, text("held out"))],
    }
    async with running(configured(), database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client)
        frames = await play(bottega, model, script)
        (task,) = last_of(model, "root")[-1]["tasks"]
        (row,) = await bottega.owner.fetch("SELECT status FROM tasks")
    swarm.assert_whole(frames)
    assert (task["status"], task["final_output"]) == ("completed", "held out")
    assert [data["attempt"] for data in of(frames, "subagent.retried")] == [2, 3]
    assert all(data["reason"] for data in of(frames, "subagent.retried"))
    assert len(of(frames, "subagent.dispatched")) == len(of(frames, "subagent.completed")) == 1
    assert row["status"] == "completed"


@pytest.mark.deep
async def test_the_fifth_failure_of_an_agent_opens_its_breaker_in_that_run(
    configured: Callable[..., Settings], database_url: str, model: FakeModel
) -> None:
    gate = asyncio.Event()
    script: dict[str, list[swarm.Step]] = {
        "root": [
            swarm.dispatches(*"vwxyz", agent="weak", instructions="Fail."),
            swarm.awaits(),
            calls(
                ("dispatch_subagent", {"prompt": "u", "agent": "weak", "instructions": "Fail."}),
                ("dispatch_subagent", {"prompt": "fine"}),
            ),
            swarm.held(gate, text("done")),
        ],
        **{leaf: [calls(("write_file", {"path": "x", "content": "y"}))] for leaf in "vwxyz"},
    }
    mine, other = [await holder(database_url, name) for name in ("mine", "other")]
    async with (
        running(configured(), database_url, worker=True) as bottega,
        mine.client(bottega) as client,
        other.client(bottega) as stranger,
    ):
        await swarm.agent(client, "weak", max_iterations=1)
        await swarm.coordinator(client, subagents={"names": ["weak"]})
        model.decide = swarm.plays(script)
        await swarm.start(client)
        await swarm.until(
            database_url, "SELECT EXISTS (SELECT FROM run_events WHERE data ->> 'prompt' = 'fine')"
        )
        await swarm.until(database_url, "SELECT count(*) = 1 FROM tasks WHERE status = 'completed'")

        async def shown(who: Any) -> Any:
            return (await who.get("/v1/scheduler")).json()

        await until(lambda: shown(client), lambda seen: seen["workers"][0]["tenant"]["breakers"])
        ours, theirs = await shown(client), await shown(stranger)
        gate.set()
        await swarm.until(database_url, "SELECT status = 'completed' FROM runs")
        kinds = await bottega.owner.fetch(
            "SELECT type, data FROM run_events WHERE type LIKE 'subagent.circuit%' "
            "OR type LIKE 'subagent.back%' ORDER BY seq"
        )
    assert [row["type"] for row in kinds] == ["subagent.circuit_opened", "subagent.backpressure"]
    assert "subagent_circuit_open" in kinds[1]["data"]
    refused, taken = last_of(model, "root")[-2:]
    assert "failed repeatedly" in refused["error"]
    assert 0 < refused["retry_after_ms"] <= 30_000
    assert taken["status"] == "queued"
    (breaker,) = ours["workers"][0]["tenant"]["breakers"]
    assert (breaker["state"], breaker["failures"], breaker["agent"]) == ("open", 5, "weak")
    assert theirs["workers"][0]["tenant"]["breakers"] == []


@pytest.mark.deep
async def test_estimates_and_sums_are_so_in_a_run(bottega: Running, model: FakeModel) -> None:
    await swarm.coordinator(bottega.client)
    script: dict[str, list[swarm.Step]] = {
        "root": [
            swarm.dispatches(*(f"leaf {n}" for n in range(4))),
            swarm.awaits(),
            swarm.dispatches(*(f"leaf {n}" for n in range(10, 22))),
            calls(("poll_subagent", {})),
            swarm.awaits(),
            text("done"),
        ]
    }
    script |= {f"leaf {n}": [swarm.after(lambda: passed(1.2), text("found"))] for n in range(22)}
    frames = await play(bottega, model, script)
    swarm.assert_whole(frames)
    answers = {each["task_id"]: each for each in last_of(model, "root") if "task_id" in each}
    assert len(answers) == 16
    waits = {f["task_id"]: f["data"]["waited_ms"] for f in frames if f["type"] == DEQUEUED}
    for task_id, answer in answers.items():
        wait, estimate = waits[task_id], answer["estimated_start_ms"]
        assert answer["status"] == "queued"
        if estimate is not None and wait > 800:
            assert wait / 3 <= estimate <= 4 * wait, (wait, estimate)
        if estimate is not None and wait > 1000:
            assert estimate >= 0.4 * wait, (wait, estimate)
    assert any(each["estimated_start_ms"] for each in answers.values())
    polled = next(each for each in last_of(model, "root") if "summary" in each)
    statuses = [task["status"] for task in polled["tasks"]]
    assert polled["summary"]["total"] == len(statuses) == 16
    assert all(polled["summary"][each] == statuses.count(each) for each in {*statuses})
    assert statuses.count("queued") == 7, "five of twelve run"
    assert "note" not in polled


async def test_a_task_shows_the_time_that_it_has(bottega: Running, model: FakeModel) -> None:
    await swarm.coordinator(bottega.client, subagents={"limits": {"max_concurrent": 1}})
    asked = [("dispatch_subagent", {"prompt": name, "timeout_ms": 60_000}) for name in "ab"]
    script: dict[str, list[swarm.Step]] = {
        "root": [calls(*asked, ("dispatch_subagent", {"prompt": "c"})), swarm.awaits(), text("x")],
        "a": [swarm.after(lambda: passed(1.0), text("found"))],
    }
    frames = await play(bottega, model, script, timeout_s=20)
    ids = swarm.dispatched(frames)
    left = {f["task_id"]: f["data"]["timeout_ms"] for f in frames if f["type"] == DEQUEUED}
    tasks = {task["id"]: task for task in await swarm.tasks_of(bottega.client, frames[0]["run_id"])}
    for name in "abc":
        assert tasks[ids[name]]["timeout_ms"] == left[ids[name]] <= 20_000
    assert left[ids["b"]] <= left[ids["a"]] - 1000, "the run's time had gone on"
