"""Tests of tasks that become linked runs, which any worker takes."""

import asyncio
from typing import Any

import pytest

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


async def linked_of(bottega: Running, run_id: str) -> list[dict[str, Any]]:
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
    linked = {each["id"]: each for each in await linked_of(guest, run_id)}
    assert linked.keys() == {ids["two"], ids["three"]}
    assert {each["parent_run_id"] for each in linked.values()} == {run_id}
    assert linked[ids["two"]]["output"] == "TWO"
    listed = (await guest.client.get("/v1/runs")).json()["items"]
    assert [each["id"] for each in listed] == [run_id]
    tasks = {each["id"]: each for each in await swarm.tasks_of(guest.client, run_id)}
    assert {each["status"] for each in tasks.values()} == {"completed"}
    log = await guest.watch(ids["two"])
    assert [f["type"] for f in log if f["type"].startswith("tool.completed")] == [
        "tool.completed"
    ] * 2
    # The parent's usage has that of its linked runs; in all, nothing is counted twice.
    assert run["usage"]["model_calls"] == 4 + 1 + 3 + 1
    used = (await guest.client.get("/v1/usage?by=agent")).json()["items"]
    total = sum(each["input"] + each["output"] for each in used)
    assert total == run["usage"]["input"] + run["usage"]["output"]
    assert sum(each["runs"] for each in used) >= 1


async def test_the_ends_of_linked_runs_are_those_of_their_tasks(
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
    found = await until(lambda: linked_of(guest, run_id), lambda runs: len(runs) == 4)
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


async def test_cancelled_tasks_and_ended_parents_take_their_linked_runs_along(
    guest: Running, guest_model: FakeModel
) -> None:
    never = [swarm.never]
    script = {"root": [fans_out("here", "one", "two"), awaits_all]}
    guest_model.decide = swarm.plays(script | dict.fromkeys(("here", "one", "two"), never))
    await swarm.coordinator(guest.client, subagents=SPREAD)
    run_id = await swarm.start(guest.client)
    is_running = lambda runs: [each["status"] for each in runs] == ["running"] * 2  # noqa: E731
    one, two = await until(lambda: linked_of(guest, run_id), is_running)

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


async def test_what_a_cancelled_linked_run_used_counts_for_its_parent(
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
    (one,) = await until(lambda: linked_of(guest, run_id), bool)

    async def asked() -> int:
        events = (await guest.client.get(f"/v1/runs/{one['id']}/events")).json()["items"]
        return sum(each["type"] == "llm.started" for each in events)

    await until(asked, lambda number: number == 2)
    gate.set()
    frames = await guest.watch(run_id)
    swarm.assert_whole(frames)
    run, linked = [
        (await guest.client.get(f"/v1/runs/{each}")).json() for each in (run_id, one["id"])
    ]
    assert linked["status"] == "cancelled"
    assert linked["usage"]["model_calls"] == 1
    assert run["usage"]["model_calls"] == 3 + 1 + 1


async def test_a_linked_run_reads_a_message_of_its_parent(
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


async def test_odd_characters_and_many_messages_stop_no_linked_run(
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


async def test_a_retried_parent_keeps_what_its_linked_runs_found(
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
    linked = await linked_of(guest, failed)
    assert len(linked) == 2
    refused = await guest.client.post(f"/v1/runs/{linked[0]['id']}/retry", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "linked_run")

    is_broken = False
    body = {"from": "last_step"}
    run_id = (await guest.client.post(f"/v1/runs/{failed}/retry", json=body)).json()["id"]
    assert (await guest.watch(run_id))[-1]["type"] == "run.completed"
    assert (await guest.client.get(f"/v1/runs/{run_id}")).json()["output"] == "x"
    assert await linked_of(guest, run_id) == []
    said = (await guest.client.get("/v1/sessions/s/messages")).json()["items"]
    assert {each["run_id"] for each in said} <= {failed, run_id}
    await guest.client.delete("/v1/sessions/s")
    gone = [await guest.client.get(f"/v1/runs/{each['id']}") for each in linked]
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
    parts = sorted(each["token_budget"] for each in await linked_of(guest, run_id))
    assert parts[0] > 20_000
    assert parts[-1] - parts[0] < 3_000
    assert sum(parts) <= 90_000


async def test_a_worker_full_of_parents_has_room_for_linked_runs(
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
            assert len(await linked_of(bottega, run_id)) == 3


_LINKED = "SELECT count(*) = 3 FROM runs WHERE parent_run_id IS NOT NULL AND status = 'running'"


@pytest.mark.parametrize("killed", ["parent", "child"])
async def test_linked_runs_survive_the_death_of_either_worker(
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
            await swarm.until(database_url, "SELECT count(*) > 0 FROM runs WHERE links")
            async with command("worker", **with_model) as second:
                await swarm.until(database_url, _LINKED)
                dead = first if killed == "parent" else second
                dead.kill()
                await dead.process.wait()
                gate.set()
                frames = await watch(api.port, run_id)
        swarm.assert_whole(frames)
        run = (await client.get(f"/v1/runs/{run_id}")).json()
        assert run["output"] == "gold gold gold"
        linked = (await client.get(f"/v1/runs?parent_run_id={run_id}")).json()["items"]
        assert [each["status"] for each in linked] == ["completed"] * 3
        assert run["usage"]["model_calls"] == 4 + 3 * 2
