"""Tests of tasks that become child runs, which any worker takes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from bottega.engine.child_runs import unread_text
from bottega.events.nats import LONGEST_END
from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, gated, http_error, text
from tests.flows.test_processes import environment
from tests.flows.test_run_limits import configured
from tests.processes import command
from tests.service import Running, client_of, running, watch
from tests.waiting import until

SPREAD = {"limits": {"spread_above": 1}}


def fans_out(*tasks: str | dict[str, Any]) -> Any:
    asked = [{"prompt": task} if isinstance(task, str) else task for task in tasks]
    return calls(("dispatch_subagents", {"tasks": asked}))


def started(request: dict[str, Any]) -> list[str]:
    return [task["task_id"] for task in swarm.results_in(request)[0]["tasks"]]


def awaits_all(request: dict[str, Any]) -> Reply:
    return calls(("await_subagent", {"task_ids": started(request)}))


def folder_of(request: dict[str, Any]) -> str:
    question = next(m["content"] for m in request["messages"] if m["role"] == "user")
    return str(question.split("Your own folder is ")[1].split("/ ")[0])


def reads_input(request: dict[str, Any]) -> Reply:
    return calls(("read_file", {"path": f"{folder_of(request)}/input/notes.md"}))


def writes_output(request: dict[str, Any]) -> Reply:
    read = swarm.results_in(request)[-1]["content"]
    path = f"{folder_of(request)}/output/found.md"
    return calls(("write_file", {"path": path, "content": f"{read} and gold"}))


def writes_note(request: dict[str, Any]) -> Reply:
    return calls(("write_file", {"path": f"{folder_of(request)}/output/note", "content": "x"}))


async def children_of(bottega: Running, run_id: str) -> list[dict[str, Any]]:
    page = (await bottega.client.get(f"/v1/runs?parent_run_id={run_id}&view=full")).json()
    items: list[dict[str, Any]] = page["items"]
    return items


async def test_tasks_above_the_limit_are_runs_of_their_own(
    guest: Running, guest_model: FakeModel
) -> None:
    guest_model.decide = swarm.plays(
        {
            "root": [
                fans_out("one", {"prompt": "two", "input": {"notes.md": "maps"}}, "three"),
                awaits_all,
                lambda request: calls(
                    ("read_file", {"path": f"/subagent/{started(request)[1]}/output/found.md"})
                ),
                lambda request: text(swarm.results_in(request)[-1]["content"]),
            ],
            "two": [reads_input, writes_output, text("TWO")],
        }
    )
    await swarm.coordinator(guest.client, subagents=SPREAD)
    run_id = await swarm.start(guest.client, metadata={"a": "b"})
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames)
    run = (await guest.client.get(f"/v1/runs/{run_id}")).json()
    assert run["output"] == "maps and gold"
    ids = swarm.dispatched(frames)
    children = {each["id"]: each for each in await children_of(guest, run_id)}
    assert children.keys() == {ids["two"], ids["three"]}
    assert {each["parent_run_id"] for each in children.values()} == {run_id}
    assert children[ids["two"]]["output"] == "TWO"
    listed = (await guest.client.get("/v1/runs")).json()["items"]
    assert [each["id"] for each in listed] == [run_id]
    tasks = {each["id"]: each for each in await swarm.tasks_of(guest.client, run_id)}
    assert {each["status"] for each in tasks.values()} == {"completed"}
    log = await guest.watch(ids["two"])
    assert [f["type"] for f in log if f["type"].startswith("tool.completed")] == [
        "tool.completed"
    ] * 2
    # The parent's usage has that of its child runs; in all, nothing is counted twice.
    assert run["usage"]["model_calls"] == 4 + 1 + 3 + 1
    used = (await guest.client.get("/v1/usage?by=agent")).json()["items"]
    total = sum(each["input"] + each["output"] for each in used)
    assert total == run["usage"]["input"] + run["usage"]["output"]
    assert sum(each["runs"] for each in used) >= 1


@pytest.mark.deep
async def test_the_ends_of_child_runs_are_those_of_their_tasks(
    guest: Running, guest_model: FakeModel
) -> None:
    guest_model.decide = swarm.plays(
        {
            "root": [
                fans_out(
                    "here",
                    "fails",
                    {"prompt": "late", "timeout_ms": 5_000},
                    {"prompt": "poor", "token_budget": 10},
                    "stopped",
                ),
                awaits_all,
                swarm.reports,
            ],
            "here": [text("HERE")],
            "fails": [lambda request: http_error(400)],
            "late": [swarm.never],
            "stopped": [swarm.never],
        }
    )
    await swarm.coordinator(guest.client, subagents=SPREAD)
    run_id = await swarm.start(guest.client)
    found = await until(lambda: children_of(guest, run_id), lambda runs: len(runs) == 4)
    stopped = next(each for each in found if each["input"].startswith("stopped"))
    await guest.client.post(f"/v1/runs/{stopped['id']}/cancel")
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames)
    tasks = await swarm.tasks_of(guest.client, run_id)
    assert [each["status"] for each in tasks] == [
        "completed",
        "failed",
        "timeout",
        "failed",
        "cancelled",
    ]
    codes = [each["error"]["code"] for each in tasks[1:]]
    assert codes == ["model_bad_request", "timeout", "budget_exhausted", "cancelled"]


async def test_cancelled_tasks_and_ended_parents_take_their_child_runs_along(
    guest: Running, guest_model: FakeModel
) -> None:
    never = [swarm.never]
    script = {"root": [fans_out("here", "one", "two"), awaits_all]}
    guest_model.decide = swarm.plays(script | dict.fromkeys(("here", "one", "two"), never))
    await swarm.coordinator(guest.client, subagents=SPREAD)
    run_id = await swarm.start(guest.client)
    is_running = lambda runs: [each["status"] for each in runs] == ["running"] * 2  # noqa: E731
    one, two = await until(lambda: children_of(guest, run_id), is_running)

    async def status(run_id: str) -> str:
        run: dict[str, Any] = (await guest.client.get(f"/v1/runs/{run_id}")).json()
        return str(run["status"])

    await guest.client.post(f"/v1/runs/{run_id}/tasks/{one['id']}/cancel")
    await until(lambda: status(one["id"]), lambda found: found == "cancelled")
    assert await status(two["id"]) == "running"
    await guest.client.post(f"/v1/runs/{run_id}/cancel")
    await until(lambda: status(two["id"]), lambda found: found == "cancelled")
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames, "run.cancelled")


async def test_what_a_cancelled_child_run_used_counts_for_its_parent(
    guest: Running, guest_model: FakeModel
) -> None:
    gate = asyncio.Event()

    def cancels(request: dict[str, Any]) -> Reply:
        return gated(gate, calls(("cancel_subagent", {"task_id": started(request)[1]})))

    guest_model.decide = swarm.plays(
        {
            "root": [
                fans_out("here", "one"),
                cancels,
                text("done"),
            ],
            "one": [writes_note, swarm.never],
        }
    )
    await swarm.coordinator(guest.client, subagents=SPREAD)
    run_id = await swarm.start(guest.client)
    (one,) = await until(lambda: children_of(guest, run_id), bool)

    async def asked() -> int:
        events = (await guest.client.get(f"/v1/runs/{one['id']}/events")).json()["items"]
        return sum(each["type"] == "llm.started" for each in events)

    await until(asked, lambda number: number == 2)
    gate.set()
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames)
    run, child = [
        (await guest.client.get(f"/v1/runs/{each}")).json() for each in (run_id, one["id"])
    ]
    assert child["status"] == "cancelled"
    assert child["usage"]["model_calls"] == 1
    assert run["usage"]["model_calls"] == 3 + 1 + 1


async def test_a_poll_reads_what_a_child_run_has_said(
    guest: Running, guest_model: FakeModel
) -> None:
    await swarm.polls_a_child_run(guest.client, guest_model)


def test_only_unread_text_counts() -> None:
    whole = "".join(map(str, range(9_000)))
    for read, now in ((0, 100), (100, 9_990), (9_990, 10_200), (12_000, 12_500), (12_500, 12_500)):
        known, text = whole[:read][-LONGEST_END:], whole[:now][-LONGEST_END:]
        assert unread_text(known, text) == whole[read:now], (read, now)
    assert unread_text("a first call", "another call") == "another call"
    assert unread_text(whole[:12_000], whole[25_000:35_000]) == whole[25_000:35_000]


async def test_a_child_run_reads_a_message_of_its_parent(
    guest: Running, guest_model: FakeModel
) -> None:
    gate = asyncio.Event()

    def sends(request: dict[str, Any]) -> Reply:
        first, second = started(request)
        return calls(
            ("send_to_subagent", {"task_id": first, "message": "look twice"}),
            ("send_to_subagent", {"task_id": second, "message": "too late"}),
        )

    def opens(request: dict[str, Any]) -> Reply:
        gate.set()
        return awaits_all(request)

    def tells(request: dict[str, Any]) -> Reply:
        return text(" ".join(m["content"] for m in request["messages"] if m["role"] == "user"))

    guest_model.decide = swarm.plays(
        {
            "root": [
                fans_out("slow", "quick"),
                lambda request: calls(("await_subagent", {"task_id": started(request)[1]})),
                sends,
                opens,
                swarm.reports,
            ],
            "slow": [lambda request: gated(gate, writes_note(request)), tells],
        }
    )
    await swarm.coordinator(guest.client, subagents={"limits": {"spread_above": 0}})
    run_id = await swarm.start(guest.client)
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames)
    sent = [f["data"] for f in frames if f["type"].startswith("tool.") and "name" in f["data"]]
    answers = [each for each in sent if each["name"] == "send_to_subagent" and "result" in each]
    assert sorted(each.get("error") is None for each in answers) == [False, True]
    run = (await guest.client.get(f"/v1/runs/{run_id}")).json()
    assert "look twice" in run["output"]


async def test_odd_characters_and_many_messages_stop_no_child_run(
    guest: Running, guest_model: FakeModel
) -> None:
    gate = asyncio.Event()

    def sends(request: dict[str, Any]) -> Reply:
        task_id = started(request)[0]
        many = [{"task_id": task_id, "message": f"{n}\x00"} for n in range(12)]
        return calls(*[("send_to_subagent", each) for each in many])

    def opens(request: dict[str, Any]) -> Reply:
        gate.set()
        return awaits_all(request)

    guest_model.decide = swarm.plays(
        {
            "root": [fans_out("slow", "odd\x00"), sends, opens, swarm.reports],
            "slow": [lambda request: gated(gate, writes_note(request)), text("SLOW")],
        }
    )
    await swarm.coordinator(guest.client, subagents={"limits": {"spread_above": 0}})
    run_id = await swarm.start(guest.client)
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames)
    sent = [f["data"] for f in frames if f["type"] == "tool.completed"]
    assert sum(each["name"] == "send_to_subagent" for each in sent) == 12
    output = (await guest.client.get(f"/v1/runs/{run_id}")).json()["output"]
    assert "completed: SLOW" in output
    assert output.count("completed") == 2


async def test_a_retried_parent_keeps_what_its_child_runs_found(
    guest: Running, guest_model: FakeModel
) -> None:
    is_broken = True

    def reads(request: dict[str, Any]) -> Reply:
        if is_broken:
            return http_error(400)
        return calls(("read_file", {"path": f"/subagent/{started(request)[0]}/output/note"}))

    guest_model.decide = swarm.plays(
        {
            "root": [
                fans_out("one", "two"),
                awaits_all,
                reads,
                lambda request: text(swarm.results_in(request)[-1]["content"]),
            ],
            "one": [writes_note, text("ONE")],
        }
    )
    await swarm.coordinator(guest.client, subagents={"limits": {"spread_above": 0}})
    failed = await swarm.start(guest.client, session_id="s")
    assert (await guest.watch(failed))[-1]["type"] == "run.failed"
    children = await children_of(guest, failed)
    assert len(children) == 2
    refused = await guest.client.post(f"/v1/runs/{children[0]['id']}/retry", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "child_run")

    is_broken = False
    body = {"from": "last_step"}
    run_id = (await guest.client.post(f"/v1/runs/{failed}/retry", json=body)).json()["id"]
    assert (await guest.watch(run_id))[-1]["type"] == "run.completed"
    assert (await guest.client.get(f"/v1/runs/{run_id}")).json()["output"] == "x"
    assert await children_of(guest, run_id) == []
    said = (await guest.client.get("/v1/sessions/s/messages")).json()["items"]
    assert {each["run_id"] for each in said} <= {failed, run_id}
    await guest.client.delete("/v1/sessions/s")
    gone = [await guest.client.get(f"/v1/runs/{each['id']}") for each in children]
    assert [answer.status_code for answer in gone] == [404, 404]


async def test_tasks_share_their_runs_budget_in_equal_parts(
    guest: Running, guest_model: FakeModel
) -> None:
    guest_model.decide = swarm.plays(
        {"root": [fans_out("here", "one", "two", "three"), awaits_all, swarm.reports]}
    )
    await swarm.coordinator(
        guest.client, subagents={"limits": {"spread_above": 1, "max_total_tokens": 90_000}}
    )
    run_id = await swarm.start(guest.client)
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames)
    parts = sorted(each["token_budget"] for each in await children_of(guest, run_id))
    assert parts[0] > 20_000
    assert parts[-1] - parts[0] < 3_000
    assert sum(parts) <= 90_000


@pytest.mark.deep
async def test_a_worker_full_of_parents_has_room_for_child_runs(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    model.decide = swarm.plays(
        {"root": [fans_out("one", "two", "three"), awaits_all, swarm.reports]}
    )
    few = configured(settings, model, worker_concurrency=2, concurrent_runs=2)
    async with running(few, database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client, subagents={"limits": {"spread_above": 0}})
        runs = [await swarm.start(bottega.client) for _ in range(2)]
        for run_id in runs:
            swarm.assert_whole(await bottega.watch(run_id))
            assert len(await children_of(bottega, run_id)) == 3


_CHILDREN = "SELECT count(*) = 3 FROM runs WHERE parent_run_id IS NOT NULL AND status = 'running'"


@pytest.mark.deep
@pytest.mark.parametrize("killed", ["parent", "child", "child of a waiting one"])
async def test_child_runs_survive_the_death_of_either_worker(
    database_url: str, model: FakeModel, killed: str
) -> None:
    gate = asyncio.Event()
    done: list[swarm.Step] = [lambda request: gated(gate, writes(request)), text("done")]

    def writes(request: dict[str, Any]) -> Reply:
        path = f"{folder_of(request)}/output/found.md"
        return calls(("write_file", {"path": path, "content": "gold"}))

    def reads(request: dict[str, Any]) -> Reply:
        paths = [f"/subagent/{each}/output/found.md" for each in started(request)]
        return calls(*[("read_file", {"path": path}) for path in paths])

    model.decide = swarm.plays(
        {
            "root": [
                fans_out("one", "two", "three"),
                awaits_all,
                reads,
                lambda request: text(
                    " ".join(each["content"] for each in swarm.results_in(request)[2:])
                ),
            ],
            **dict.fromkeys(("one", "two", "three"), done),
        }
    )
    with_model = environment(database_url, model)
    # The first worker has the parent, and no place for all of the children.
    few = with_model | {"BOTTEGA_WORKER_CONCURRENCY": "2"}
    async with (
        command("serve", "--no-worker", "--port", "0", **with_model) as api,
        client_of(api.port) as client,
    ):
        await swarm.coordinator(client, subagents={"limits": {"spread_above": 0}})
        async with command("worker", **few) as first:
            run_id = await swarm.start(client)
            await swarm.until(database_url, "SELECT count(*) > 0 FROM runs WHERE child_limit > 0")
            async with command("worker", **with_model) as second:
                await swarm.until(database_url, _CHILDREN)
                if killed == "child of a waiting one":
                    await swarm.until(database_url, "SELECT count(*) > 0 FROM run_waits")
                dead = first if killed == "parent" else second
                dead.kill()
                await dead.process.wait()
                gate.set()
                frames = await watch(api.port, run_id)
        swarm.assert_whole(frames)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
        assert run["output"] == "gold gold gold"
        children = (await client.get(f"/v1/runs?parent_run_id={run_id}")).json()["items"]
        assert [each["status"] for each in children] == ["completed"] * 3
        assert run["usage"]["model_calls"] == 4 + 3 * 2


@pytest.fixture
async def bottega(
    settings: Settings, database_url: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    """A service with one place and one run at a time, which suspends runs soon."""
    monkeypatch.setattr("bottega.engine.waiting.AWAITED_HERE_S", 0.1)
    one = configured(settings, model, worker_concurrency=1, concurrent_runs=1)
    async with running(one, database_url, worker=True) as server:
        yield server


async def run_of(bottega: Running, run_id: str) -> dict[str, Any]:
    run: dict[str, Any] = (await bottega.client.get(f"/v1/runs/{run_id}")).json()
    return run


async def waiting(bottega: Running, run_id: str) -> dict[str, Any]:
    """Return a run once it waits."""
    is_waiting = lambda run: run["status"] == "waiting"  # noqa: E731
    found: dict[str, Any] = await until(lambda: run_of(bottega, run_id), is_waiting)
    return found


async def heads(bottega: Running) -> set[str]:
    rows = await bottega.owner.fetch("SELECT run_id FROM run_heads")
    return {str(row["run_id"]) for row in rows}


async def test_a_parent_waits_for_its_child_runs_without_a_worker(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = swarm.plays(
        {
            "root": [fans_out("one", "two"), awaits_all, swarm.reports],
            **{name: [swarm.held(gate, text("found"))] for name in ("one", "two")},
        }
    )
    await swarm.coordinator(bottega.client, subagents={"limits": {"spread_above": 0}})
    run_id = await swarm.start(bottega.client)
    run = await waiting(bottega, run_id)
    assert run["waiting"]["reason"] == "children"
    assert run["waiting"]["until"] is not None
    listed = (await bottega.client.get("/v1/runs?waiting_for=children")).json()["items"]
    assert [each["id"] for each in listed] == [run_id]
    assert run_id not in await heads(bottega)
    # It counts in the limit of one run, and so no other run of the tenant begins.
    other = await swarm.start(bottega.client, "other")
    gate.set()
    frames = await bottega.watch(run_id)
    swarm.assert_whole(frames)
    kinds = [frame["type"] for frame in frames]
    assert kinds.count("run.waiting") == kinds.count("run.resumed") == 1
    resumed = next(frame["data"] for frame in frames if frame["type"] == "run.resumed")
    assert (resumed["cause"], resumed["reason"]) == ("children", "children")
    assert kinds.count("subagent.resumed") == 0
    run = await run_of(bottega, run_id)
    assert run["output"] == "completed: found\ncompleted: found"
    assert run["usage"]["model_calls"] == 3 + 2
    await bottega.watch(other)
    began = (await run_of(bottega, other))["started_at"]
    assert began >= run["ended_at"]


@pytest.mark.parametrize(
    "polls",
    [pytest.param(False, marks=pytest.mark.deep, id="awaiting"), pytest.param(True, id="polling")],
)
async def test_one_place_and_one_run_at_a_time_suffice_for_three_levels(
    bottega: Running, model: FakeModel, polls: bool
) -> None:
    def look(request: dict[str, Any]) -> Reply:
        if not polls:
            return awaits_all(request)
        last = swarm.results_in(request)[-1]["tasks"]
        if "status" in last[0] and all(each["status"] == "completed" for each in last):
            return swarm.reports(request)
        return calls(("poll_subagent", {"task_ids": started(request)}))

    def is_over() -> Awaitable[Any]:
        ended = "SELECT count(*) = 2 FROM runs WHERE parent_run_id IS NOT NULL AND ended_at < now()"
        return until(lambda: bottega.owner.fetchval(ended))

    def asks(*tasks: Any) -> list[swarm.Step]:
        return [fans_out(*tasks), look, swarm.after(is_over, look) if polls else swarm.reports]

    model.decide = swarm.plays(
        {
            "root": asks({"prompt": "middle", "agent": "lead"}),
            "middle": asks({"prompt": "low", "agent": "under"}),
            "low": asks("one", "two"),
        }
    )
    limits = {"limits": {"spread_above": 0}}
    for name, below in (("under", []), ("lead", ["under"]), ("boss", ["lead"])):
        await swarm.coordinator(
            bottega.client, name, subagents={**limits, "names": below}, max_iterations=100
        )
    run_id = await swarm.start(bottega.client)
    frames = await bottega.watch(run_id)
    swarm.assert_whole(frames)
    assert "is done" in (await run_of(bottega, run_id))["output"]
    assert len(await children_of(bottega, run_id)) == 2


async def test_no_more_child_runs_than_the_limit_are_queued_or_running(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    names = [str(n) for n in range(6)]
    held = {name: [swarm.held(gate, text("found"))] for name in names}
    model.decide = swarm.plays({"root": [fans_out(*names), awaits_all, swarm.reports], **held})
    limits = {"limits": {"spread_above": 0, "max_concurrent": 2}}
    await swarm.coordinator(bottega.client, subagents=limits)
    run_id = await swarm.start(bottega.client)
    await waiting(bottega, run_id)
    assert len(await children_of(bottega, run_id)) == 2
    gate.set()
    frames = await bottega.watch(run_id)
    swarm.assert_whole(frames)
    assert [frame["type"] for frame in frames].count("run.waiting") == 1
    assert (await run_of(bottega, run_id))["output"].count("found") == 6


@pytest.mark.deep
@pytest.mark.parametrize("ended_by", ["cancel", "deadline"])
async def test_a_waiting_parent_ends_and_takes_its_child_runs_along(
    bottega: Running, model: FakeModel, ended_by: str
) -> None:
    names = ["one", "two", "three"]
    never = {name: [swarm.never] for name in names}
    model.decide = swarm.plays({"root": [fans_out(*names), awaits_all], **never})
    limits = {"limits": {"spread_above": 0, "max_concurrent": 2}}
    await swarm.coordinator(bottega.client, subagents=limits)
    run_id = await swarm.start(bottega.client, timeout_s=600 if ended_by == "cancel" else 3)
    await waiting(bottega, run_id)
    children = await children_of(bottega, run_id)
    if ended_by == "cancel":
        await bottega.client.post(f"/v1/runs/{run_id}/cancel")
    expected = {"cancel": "cancelled", "deadline": "timeout"}[ended_by]
    frames = await bottega.watch(run_id)
    swarm.assert_whole(frames, f"run.{expected}")
    assert len(children) == 2
    open_ones = "SELECT count(*) = 0 FROM runs WHERE ended_at IS NULL"
    await until(lambda: bottega.owner.fetchval(open_ones))
    ends = {each["status"] for each in await children_of(bottega, run_id)}
    assert ends <= {"cancelled", expected}


async def test_a_task_that_a_client_cancels_wakes_the_waiting_parent(
    bottega: Running, model: FakeModel
) -> None:
    gate = asyncio.Event()
    model.decide = swarm.plays(
        {
            "root": [fans_out("one", "two"), awaits_all, swarm.reports],
            "one": [swarm.never],
            "two": [swarm.held(gate, text("TWO"))],
        }
    )
    await swarm.coordinator(bottega.client, subagents={"limits": {"spread_above": 0}})
    run_id = await swarm.start(bottega.client)
    await waiting(bottega, run_id)
    first = (await swarm.tasks_of(bottega.client, run_id))[0]["id"]
    await bottega.client.post(f"/v1/runs/{run_id}/tasks/{first}/cancel")
    gate.set()
    swarm.assert_whole(await bottega.watch(run_id))
    assert "TWO" in (await run_of(bottega, run_id))["output"]
