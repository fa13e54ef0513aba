"""Asynchronous sub-agents of several tenants, and of several runs, on one worker."""

import asyncio
from typing import Any

import pytest

from bottega.settings import Settings
from tests import swarm
from tests.fake_model import FakeModel, Reply, calls, gated, text
from tests.service import Running, running, watch
from tests.tenants import holder
from tests.waiting import until

FLOOD = [f"flood-{number}" for number in range(20)]


class Gates:
    """Each task's model call ends when its gate opens; the task ``mine`` is the other run's."""

    def __init__(self) -> None:
        self.gates = [asyncio.Event() for _ in range(40)]
        self.asked: list[str] = []

    def decide(self, request: dict[str, Any]) -> Reply:
        prompt = swarm.prompt_of(request)
        if prompt in ("mine", *FLOOD):
            self.asked.append(prompt)
            return gated(self.gates[len(self.asked) - 1], text("done"))
        dispatched = FLOOD if prompt == "many" else ["mine"]
        steps = [swarm.dispatches(*dispatched), swarm.awaits(), text("done")]
        return swarm.plays({prompt: steps})(request)

    async def open(self) -> None:
        """Open the first two gates one after the other, then all."""
        for number in (0, 1):
            self.gates[number].set()
            await self._asked(3 + number)
        for gate in self.gates:
            gate.set()

    async def _asked(self, count: int) -> None:
        await until(lambda: len(self.asked) >= count)


def with_two_slots(settings: Settings, model: FakeModel) -> Settings:
    return settings.model_copy(
        update={
            "openai_base_url": model.base_url,
            "drain_grace_s": 0.0,
            "subagent_min_workers": 2,
            "subagent_max_workers": 2,
        }
    )


async def completed(client: Any, run_id: str) -> None:
    answer = await until(
        lambda: client.get(f"/v1/runs/{run_id}"),
        lambda answer: answer.json()["status"] in swarm.FINAL,
    )
    assert answer.json()["status"] == "completed"


@pytest.mark.deep
async def test_a_full_queue_delays_another_tenant_s_first_task_by_one_slot(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gates = Gates()
    model.decide = gates.decide
    limited = with_two_slots(settings, model)
    one, other = [await holder(database_url, name) for name in ("one", "other")]
    async with (
        running(limited, database_url, worker=True) as bottega,
        one.client(bottega) as flooding,
        other.client(bottega) as waiting,
    ):
        for client in (flooding, waiting):
            await swarm.coordinator(client)
        first = await swarm.start(flooding, "many")
        await swarm.until(database_url, "SELECT count(*) = 18 FROM tasks WHERE status = 'queued'")
        second = await swarm.start(waiting, "few")
        await swarm.until(database_url, "SELECT count(*) = 19 FROM tasks WHERE status = 'queued'")
        await shown(waiting, 1)
        ours, theirs = await shown(flooding, 18), await shown(waiting, 1)
        await gates.open()
        await completed(flooding, first)
        await completed(waiting, second)
    assert "mine" in gates.asked[2:4], gates.asked
    # Each sees its own part, and only the sum of the others.
    assert ours["pool"] == theirs["pool"] | {"runs": ours["pool"]["runs"]}
    pool = ours["pool"]
    assert (pool["busy"], pool["queued"], pool["queue"]) == (2, 19, {"5": 19})
    assert (ours["tenant"]["running"], ours["tenant"]["queue"]) == (2, {"5": 18})
    assert (theirs["tenant"]["running"], theirs["tenant"]["queue"]) == (0, {"5": 1})


async def test_a_run_that_fills_the_queue_delays_another_run_s_first_task_by_one_slot(
    settings: Settings, database_url: str, model: FakeModel
) -> None:
    gates = Gates()
    model.decide = gates.decide
    async with running(with_two_slots(settings, model), database_url, worker=True) as bottega:
        await swarm.coordinator(bottega.client)
        first = await swarm.start(bottega.client, "many")
        await swarm.until(database_url, "SELECT count(*) = 18 FROM tasks WHERE status = 'queued'")
        second = await swarm.start(bottega.client, "few")
        await swarm.until(database_url, "SELECT count(*) = 19 FROM tasks WHERE status = 'queued'")
        await gates.open()
        await completed(bottega.client, first)
        await completed(bottega.client, second)
    assert "mine" in gates.asked[2:4], gates.asked


async def shown(client: Any, queued: int) -> Any:
    """Return the one worker, once this many tasks of the tenant, and 19 of all, wait."""

    async def look() -> Any:
        (worker,) = (await client.get("/v1/scheduler")).json()["workers"]
        return worker

    return await until(
        look,
        lambda seen: seen["tenant"].get("queued") == queued and seen["pool"]["queued"] == 19,
    )


async def test_tasks_of_another_run_are_not_found(bottega: Running, model: FakeModel) -> None:
    """Check also a sibling's tasks: ids are valid only below their dispatcher."""
    gate = asyncio.Event()
    seen: dict[str, str] = {}
    ready = asyncio.Event()
    await swarm.coordinator(bottega.client, "lead")
    await swarm.coordinator(bottega.client, subagents={"names": ["lead"]})

    def asks(request: dict[str, Any]) -> Reply:
        ids = [*seen.values(), "no-id", "00000000-0000-0000-0000-000000000000"]
        return calls(
            ("poll_subagent", {"task_ids": ids}),
            ("await_subagent", {"task_ids": ids, "timeout_ms": 600_000}),
            *[("read_file", {"path": f"/subagent/{each}/output/x"}) for each in seen.values()],
        )

    script: dict[str, list[swarm.Step]] = {
        "first": [
            calls(
                ("dispatch_subagent", {"prompt": "lead", "agent": "lead"}),
                ("dispatch_subagent", {"prompt": "sibling", "agent": "lead"}),
            ),
            swarm.awaits(),
            text("done"),
        ],
        "lead": [swarm.dispatches("leaf"), swarm.held(gate, text("done"))],
        "sibling": [swarm.after(ready.wait, asks), text("done")],
        "second": [asks, text("done")],
    }
    play = swarm.plays(script)

    def decide(request: dict[str, Any]) -> Reply:
        prompt, step = swarm.prompt_of(request), swarm.step_of(request)
        if (prompt, step) == ("lead", 1):
            (seen["leaf"],) = swarm.ids_in(request)
        if (prompt, step) == ("first", 1):
            seen["lead"] = swarm.ids_in(request)[0]
        if len(seen) == 2:
            ready.set()
        return play(request)

    model.decide = decide
    first = await swarm.start(bottega.client, "first")
    await ready.wait()
    second = await watch(bottega.port, await swarm.start(bottega.client, "second"))
    await until(
        lambda: [(swarm.prompt_of(each), swarm.step_of(each)) for each in model.requests],
        lambda asked: ("sibling", 1) in asked,
    )
    gate.set()
    swarm.assert_whole(await watch(bottega.port, first))
    assert second[-1]["type"] == "run.completed"
    for prompt in ("second", "sibling"):
        asked = [r for r in model.requests if swarm.prompt_of(r) == prompt]
        polled, awaited, *files = swarm.results_in(asked[-1])
        assert polled["summary"]["not_found"] == len(polled["tasks"]) == 4
        assert {task["status"] for task in awaited["tasks"]} == {"not_found"}
        assert ["there is no file" in each["error"] for each in files] == [True, True], files
