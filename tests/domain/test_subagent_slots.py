"""Slots of tasks with several concurrent parts, each of which waits and calls."""

import asyncio
from uuid import uuid4

from bottega.agents import Recorder
from bottega.subagents.handle import SubagentHandle, SubagentOutcome, SubagentStatus
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.swarm import Swarm, SwarmOptions
from tests.domain.subagents import (
    Model,
    after,
    await_all,
    by_hand,
    coordinator,
    dispatch,
    job,
    put,
    registry,
    settled,
    status,
)
from tests.domain.virtual import run_virtual


class Parts:
    """Work that only holds the task open while a test plays its parts."""

    def __init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()

    async def __call__(self, handle: SubagentHandle) -> SubagentOutcome:
        await self.over
        return SubagentOutcome(SubagentStatus.COMPLETED, output="done")


def one_slot() -> SubagentRegistry:
    return registry(min_workers=1, max_workers=1)


def test_part_that_is_cancelled_while_it_waits_for_a_slot_leaves_none_behind() -> None:
    async def run() -> None:
        async with one_slot() as where:
            scheduler = where.scheduler
            parent, parts = by_hand(where), Parts()
            outer = put(where, parent, "outer", parts)
            await settled()
            async with scheduler.parking(outer):
                other = put(where, parent, "other")
                await settled()
                assert status(other) is SubagentStatus.RUNNING

                calling = asyncio.ensure_future(scheduler.begin_call(outer))
                await settled()
                calling.cancel()
                await settled()
                child = put(where, by_hand(where, owner=outer), "child")
                await job(other).finish()
                assert status(child) is SubagentStatus.RUNNING
                await job(child).finish()
                assert scheduler.in_use == 0
            parts.over.set_result(None)
            await settled()
            assert status(outer) is SubagentStatus.COMPLETED

    run_virtual(run())


def test_part_that_stops_calling_does_not_keep_the_slot() -> None:
    async def run() -> None:
        async with one_slot() as where:
            scheduler = where.scheduler
            outer = put(where, by_hand(where), "outer", Parts())
            await settled()
            below = by_hand(where, owner=outer)
            first = put(where, below, "first")
            async with scheduler.parking(outer):
                await settled()
                await job(first).finish()
            async with scheduler.parking(outer):
                second = put(where, below, "second")
                await settled()
                assert status(second) is SubagentStatus.RUNNING
                await job(second).finish()

    run_virtual(run())


def test_awaiting_a_finished_task_costs_no_slot() -> None:
    async def run() -> None:
        model = Model(
            go=[dispatch("outer", agent="outer"), await_all, "end"],
            outer=[dispatch("leaf"), await_all, await_all, "outer done"],
            leaf=[after(1, "found")],
            elsewhere=[[dispatch(f"o{n}") for n in range(4)], await_all, "end"],
            **{f"o{n}": [after(100, "late")] for n in range(4)},
        )
        async with one_slot() as where:
            outer = coordinator(model, where, description="dispatches")
            outer.agent_name = "outer"
            first, second = coordinator(model, where, outer), coordinator(model, where)
            await asyncio.gather(
                first.execute_query_async("go", recorder=of_tenant(where)),
                second.execute_query_async("elsewhere", recorder=of_tenant(where)),
            )
            order = [name for name in model.asked if name in ("outer", "o2")]
            assert order == ["outer", "outer", "outer", "outer", "o2"]

    run_virtual(run())


def of_tenant(where: SubagentRegistry) -> Recorder:
    recorder = Recorder()
    recorder.swarm = Swarm(where, SwarmOptions(tenant_id=uuid4()))
    return recorder
