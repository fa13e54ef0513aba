"""Tasks that wait for people: their slots, and their times, which stand still."""

import asyncio
from typing import Any

import pytest

from bottega.engine.waiting import hold_slot_again, pause, resume
from bottega.subagents.handle import SubagentStatus as S
from bottega.subagents.handle import stands_still
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from tests.domain.subagents import (
    Heard,
    by_hand,
    is_empty,
    job,
    passed,
    put,
    registry,
    settled,
    status,
)
from tests.domain.virtual import run_virtual


def one_slot(limits: SubagentLimits | None = None) -> SubagentRegistry:
    return registry(limits, min_workers=1, max_workers=1)


def test_a_task_that_waits_leaves_its_slot_to_others_and_gets_one_again() -> None:
    async def run() -> None:
        async with one_slot() as where:
            heard = Heard()
            parent = by_hand(where, heard)
            asks, other = put(where, parent, "asks"), put(where, parent, "other")
            await settled()
            assert (status(asks), status(other)) == (S.RUNNING, S.QUEUED)
            pause(where, asks)
            await settled()
            assert (status(asks), status(other)) == (S.WAITING, S.RUNNING)
            assert (where.active_count, where.scheduler.in_use) == (1, 1)
            going_on = asyncio.ensure_future(hold_slot_again(where, asks))
            await settled()
            assert status(asks) is S.QUEUED
            assert not going_on.done()
            await job(other).finish()
            await going_on
            assert status(asks) is S.RUNNING
            assert asks.holds_slot
            await job(asks).finish()
            assert heard.moves("asks") == ["running", "waiting", "queued", "running", "completed"]
        assert is_empty(where)

    run_virtual(run())


def test_a_task_that_goes_on_comes_before_new_ones() -> None:
    async def run() -> None:
        async with one_slot() as where:
            parent = by_hand(where)
            asks = put(where, parent, "asks")
            await settled()
            other = put(where, parent, "other", priority=1)
            pause(where, asks)
            await settled()
            new = put(where, parent, "new", priority=1)
            going_on = asyncio.ensure_future(hold_slot_again(where, asks))
            await settled()
            await job(other).finish()
            assert (going_on.done(), status(new)) == (True, S.QUEUED)

    run_virtual(run())


def test_the_timeout_of_a_task_that_waits_stands_still() -> None:
    async def run() -> None:
        async with one_slot(SubagentLimits(default_timeout=10)) as where:
            asks = put(where, by_hand(where), "asks")
            await passed(4)
            pause(where, asks)
            await passed(1000)
            where.collect()
            assert status(asks) is S.WAITING
            await hold_slot_again(where, asks)
            await passed(5)
            assert status(asks) is S.RUNNING
            await passed(2)
            assert status(asks) is S.TIMEOUT

    run_virtual(run())


def test_the_watchdog_does_not_count_the_time_in_which_a_task_waited() -> None:
    async def run() -> None:
        async with one_slot(SubagentLimits(default_timeout=10)) as where:
            asks = put(where, by_hand(where), "asks")
            await settled()
            pause(where, asks)
            await passed(1000)
            await hold_slot_again(where, asks)
            asks.stop_timer()
            where.collect()
            assert status(asks) is S.RUNNING
            await passed(21)
            where.collect()
            assert status(asks) is S.TIMEOUT

    run_virtual(run())


def test_time_in_the_queue_after_a_decision_does_not_count() -> None:
    async def run() -> None:
        async with one_slot(SubagentLimits(default_timeout=10)) as where:
            parent = by_hand(where)
            asks, other = put(where, parent, "asks"), put(where, parent, "other", timeout=500)
            await settled()
            pause(where, asks)
            await settled()
            going_on = asyncio.ensure_future(hold_slot_again(where, asks))
            await passed(100)
            assert status(asks) is S.QUEUED
            await job(other).finish()
            await going_on
            assert status(asks) is S.RUNNING

    run_virtual(run())


def test_an_ancestor_s_timeout_stands_still_and_that_of_a_new_task_below_it_too() -> None:
    async def run() -> None:
        async with registry(SubagentLimits(default_timeout=10)) as where:
            lead = put(where, by_hand(where), "lead")
            await passed(4)
            parent = by_hand(where, owner=lead, remaining=lambda: lead.left(where.scheduler.now()))
            asks = put(where, parent, "asks")
            await settled()
            pause(where, asks)
            pause(where, lead)
            await passed(996)
            late = put(where, parent, "late")
            await settled()
            assert late.deadline == 1006
            resume(where, lead)
            assert lead.deadline == 1006
            assert (status(lead), lead.holds_slot) == (S.RUNNING, False)

    run_virtual(run())


@pytest.mark.parametrize(
    ("mode", "quorum", "ends_at"),
    [("all", None, 115), ("any", None, None), ("quorum", 2, 115), ("quorum", 1, None)],
)
def test_an_await_s_timeout_stands_still_while_it_needs_people(
    mode: Any, quorum: int | None, ends_at: float | None
) -> None:
    async def run() -> None:
        async with registry() as where:
            parent = by_hand(where)
            asks, other = put(where, parent, "asks"), put(where, parent, "other")
            await settled()
            waiting = asyncio.ensure_future(
                where.wait_for_completion([asks, other], mode=mode, quorum=quorum, timeout=15)
            )
            await passed(5)
            pause(where, asks)
            await passed(100)
            await hold_slot_again(where, asks)
            assert waiting.done() == (ends_at is None)
            assert not await waiting
            assert where.scheduler.now() == (ends_at or 105)

    run_virtual(run())


def test_an_await_goes_on_when_what_it_needs_is_over() -> None:
    """End the task that waits: those left need nobody."""

    async def run() -> None:
        async with registry() as where:
            parent = by_hand(where)
            asks, other = put(where, parent, "asks"), put(where, parent, "other")
            await settled()
            pause(where, asks)
            waiting = asyncio.ensure_future(where.wait_for_completion([asks, other], timeout=15))
            await passed(100)
            assert not waiting.done()
            where.cancel(asks.task_id, "no more")
            assert not await waiting
            assert where.scheduler.now() == 115

    run_virtual(run())


def test_a_task_that_waits_can_be_cancelled_and_nothing_is_left() -> None:
    async def run() -> None:
        async with one_slot() as where:
            parent = by_hand(where)
            asks, other = put(where, parent, "asks"), put(where, parent, "other")
            await settled()
            pause(where, asks)
            await settled()
            going_on = asyncio.ensure_future(hold_slot_again(where, asks))
            await settled()
            where.cancel(asks.task_id, "no more")
            with pytest.raises(asyncio.CancelledError):
                await going_on
            await job(other).finish()
        assert is_empty(where)

    run_virtual(run())


def test_only_a_running_task_waits() -> None:
    async def run() -> None:
        async with one_slot() as where:
            parent = by_hand(where)
            over, queued = put(where, parent, "over"), put(where, parent, "queued")
            await settled()
            pause(where, queued)
            await job(over).finish()
            pause(where, over)
            resume(where, queued)
            await hold_slot_again(where, over)
            await hold_slot_again(where, queued)
            assert (status(over), status(queued)) == (S.COMPLETED, S.RUNNING)

    run_virtual(run())


@pytest.mark.parametrize(
    ("statuses", "missing", "expected"),
    [
        ([S.WAITING, S.RUNNING], 2, True),
        ([S.WAITING, S.RUNNING], 1, False),
        ([S.WAITING, S.COMPLETED], 1, True),
        ([S.QUEUED, S.STREAMING], 2, False),
        ([S.COMPLETED], 0, False),
    ],
)
def test_a_wait_stands_still_if_too_few_go_on_without_people(
    statuses: list[S], missing: int, expected: bool
) -> None:
    assert stands_still(statuses, missing) == expected
