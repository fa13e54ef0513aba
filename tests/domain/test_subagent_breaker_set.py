"""Circuit breakers as models and events see them."""

import asyncio
from typing import Any

import pytest

from bottega.agents import ModelError
from bottega.errors import SubagentCircuitOpenError
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.states import SubagentStatus
from bottega.subagents.swarm import Swarm, SwarmOptions
from tests.domain.scripted import Notes
from tests.domain.subagents import (
    Heard,
    Model,
    await_all,
    by_hand,
    coordinator,
    dispatch,
    is_empty,
    job,
    passed,
    put,
    registry,
    results,
    settled,
    status,
    timers,
)
from tests.domain.virtual import run_virtual

S = SubagentStatus
WIDE = SubagentLimits(max_concurrent=100, max_queued=100, max_queue_size=200)
ERROR = ModelError("the model is gone")


def test_refused_dispatch_gives_the_reason_and_the_time_to_retry() -> None:
    async def run() -> None:
        model = Model(
            go=[
                [
                    dispatch("a", agent="helper"),
                    dispatch("b", agent="helper"),
                    dispatch("c", agent="helper"),
                ],
                await_all,
                [
                    dispatch("again", agent="helper"),
                    dispatch("another", agent="helper", instructions="Otherwise."),
                ],
                "stopped",
            ],
            a=[ERROR],
            b=[ERROR],
            c=[ERROR],
            another=["fine"],
        )
        async with registry() as where:
            recorder = Notes()
            recorder.swarm = Swarm(where, SwarmOptions(listener=(heard := Heard())))
            helper = coordinator(model, where, description="helps")
            helper.agent_name = "helper"
            lead = coordinator(model, where, helper)
            response = await lead.execute_query_async("go", recorder=recorder)
            assert response.content == "stopped"
            assert response.error is None
            *_, refused, accepted = results(lead.conversation_history)
            assert "failed repeatedly" in refused["error"]
            assert "try later" in refused["error"]
            assert refused["retry_after_ms"] == 30_000
            assert accepted["status"] == "queued"
            assert heard.of("circuit_opened") == ["c"]
            assert heard.data("circuit_opened") == [
                {"attempt": 1, "failures": 3, "retry_after_ms": 30_000}
            ]
            (told,) = heard.data("backpressure")
            assert told["code"] == "subagent_circuit_open"
            assert told["message"] == refused["error"]
            assert told["retry_after_ms"] == 30_000

    run_virtual(run())


async def opened(where: Any, heard: Heard, waiting: int) -> tuple[Any, list[Any]]:
    """Return a parent, and its tasks that wait behind a breaker which just opened."""
    parent = by_hand(where, heard)
    first = [put(where, parent, f"first{n}") for n in range(3)]
    await settled()
    rest = [put(where, parent, f"rest{n}") for n in range(waiting)]
    for handle in first:
        await job(handle).fail()
    return parent, rest


def test_fifty_queued_tasks_wait_and_one_probe_runs() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent, rest = await opened(where, heard := Heard(), 52)
            running = [handle for handle in rest if status(handle) == S.RUNNING]
            assert len(running) == 2  # they took the slots of the first two, before it opened
            for handle in running:
                where.cancel(handle.task_id, "out of the way")
            held = [handle for handle in rest if handle not in running]
            assert len(held) == 50
            await passed(29)
            assert {status(handle) for handle in held} == {S.QUEUED}
            assert heard.of("failed") == ["first0", "first1", "first2"]
            await passed(2)
            assert [status(handle) for handle in held] == [S.RUNNING] + [S.QUEUED] * 49
            await passed(200)
            assert [status(handle) for handle in held[1:]] == [S.QUEUED] * 49
            other = put(where, parent, "other kind", instructions="Otherwise.")
            await settled()
            assert status(other) == S.RUNNING  # of all waiting tasks, only this kind is held
            await job(held[0]).finish()
            assert [status(handle) for handle in held[1:4]] == [S.RUNNING, S.RUNNING, S.QUEUED]
            for handle in held[1:]:
                await job(handle).finish()
            assert {status(handle) for handle in held} == {S.COMPLETED}

    run_virtual(run())


def test_failed_probe_opens_the_breaker_again() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            _, rest = await opened(where, heard := Heard(), 4)
            for handle in rest[:2]:
                where.cancel(handle.task_id, "out of the way")
            await passed(30)
            assert [status(handle) for handle in rest[2:]] == [S.RUNNING, S.QUEUED]
            await job(rest[2]).fail()
            assert len(heard.of("circuit_opened")) == 2
            await passed(29)
            assert status(rest[3]) == S.QUEUED
            await passed(1)
            assert status(rest[3]) == S.RUNNING

    run_virtual(run())


def test_cancelled_probe_passes_its_role_on() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            _, rest = await opened(where, Heard(), 5)
            for handle in rest[:2]:
                where.cancel(handle.task_id, "out of the way")
            held = rest[2:]
            await passed(31)
            assert [status(handle) for handle in held] == [S.RUNNING, S.QUEUED, S.QUEUED]
            where.cancel(held[0].task_id, "enough")
            await settled()
            assert [status(handle) for handle in held[1:]] == [S.RUNNING, S.QUEUED]

    run_virtual(run())


def test_without_waiting_tasks_the_next_dispatch_is_the_probe() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent, _ = await opened(where, Heard(), 0)
            await passed(31)
            probe = put(where, parent, "probe")
            await settled()
            assert status(probe) == S.RUNNING
            with pytest.raises(Exception, match="failed repeatedly"):
                put(where, parent, "second")
            await job(probe).finish()
            put(where, parent, "third")

    run_virtual(run())


def test_failures_of_one_kind_or_tenant_do_not_block_another() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent, _ = await opened(where, Heard(), 0)
            other = by_hand(where, tenant_id=parent.parent_id)
            for theirs, about in (
                (parent, {"agent": "another"}),
                (parent, {"instructions": "Otherwise."}),
                (other, {}),
            ):
                handle = put(where, theirs, f"fine{about}", **about)
                await settled()
                assert status(handle) == S.RUNNING
                await job(handle).finish()

    run_virtual(run())


NOT_COUNTED = ("budget_exhausted", "max_iterations", "model_rate_limited", "model_bad_request")


@pytest.mark.parametrize("how", [*NOT_COUNTED, "cancel"])
def test_ends_that_neither_agent_nor_model_caused_do_not_count(how: str) -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent = by_hand(where, heard := Heard())
            for n in range(6):
                handle = put(where, parent, str(n))
                await settled()
                if how == "cancel":
                    where.cancel(handle.task_id, "enough")
                else:
                    await job(handle).fail(how)
            assert heard.of("circuit_opened") == []

    run_virtual(run())


@pytest.mark.parametrize(("code", "of_model"), [("task_failed", False), ("model_timeout", True)])
def test_only_model_failures_open_the_breaker_for_other_runs(code: str, of_model: bool) -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            tenant = by_hand(where).run_id
            parent = by_hand(where, heard := Heard(), tenant_id=tenant)
            for n in range(3):
                handle = put(where, parent, str(n), model="one")
                await settled()
                await job(handle).fail(code)
            assert heard.of("circuit_opened") == ["2"]
            other = by_hand(where, tenant_id=tenant)
            put(where, other, "another model", model="two")
            put(where, other, "anonymous", named=False, model="one")
            if of_model:
                put(where, parent, "another model", model="two")
                with pytest.raises(SubagentCircuitOpenError):
                    put(where, other, "the same", model="one")
            else:
                put(where, other, "the same", model="one")
                with pytest.raises(SubagentCircuitOpenError):
                    put(where, parent, "another model", model="two")

    run_virtual(run())


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
def test_probe_of_one_breaker_waits_for_the_probe_of_the_other(end: str) -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=9, max_workers=9, failure_threshold=1) as where:
            tenant, one_slot = by_hand(where).run_id, SubagentLimits(max_concurrent=1)
            other, parent = [by_hand(where, tenant_id=tenant, limits=one_slot) for _ in range(2)]
            first, theirs = [put(where, other, name, model="one") for name in ("0", "theirs")]
            failing, mine, last = [put(where, parent, str(n), model="one") for n in range(3)]
            await settled()
            await job(failing).fail("task_failed")  # the breaker of its run opens
            await passed(10)
            await job(first).fail("model_timeout")  # the breaker of the model opens

            def running() -> list[Any]:
                return [handle for handle in where.handles() if handle.status is S.RUNNING]

            await passed(25)
            assert running() == []  # mine is the probe of its run, and waits for the model
            assert len(mine.held_by) == 1
            await passed(6)
            assert running() == [theirs]
            if end == "completed":
                await job(theirs).finish()
            elif end == "cancelled":
                where.cancel(theirs.task_id, "enough")
                await settled()
            else:
                await job(theirs).fail("model_timeout")
                assert running() == []
                await passed(31)
            assert running() == [mine]
            await job(mine).finish()
            assert running() == [last]
            await job(last).finish()
            assert where.scheduler.circuits.open() == []

    run_virtual(run())


def test_anonymous_tasks_share_no_breaker() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent = by_hand(where, heard := Heard())
            for n in range(10):
                handle = put(where, parent, str(n), named=False)
                await settled()
                await job(handle).fail("model_timeout")
            assert heard.of("circuit_opened") == []

    run_virtual(run())


def test_neither_timeouts_nor_old_failures_count() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent = by_hand(where, heard := Heard())
            for n in range(4):  # 40 s apart: no three within a minute
                handle = put(where, parent, str(n))
                await settled()
                await job(handle).fail()
                await passed(40)
            assert heard.of("circuit_opened") == []
            for n in range(5):
                put(where, parent, f"slow{n}", timeout=5)
            await passed(12)
            assert len(heard.of("timeout")) == 5
            assert heard.of("circuit_opened") == []

    run_virtual(run())


def test_held_tasks_can_be_cancelled_and_leave_nothing() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent, _ = await opened(where, heard := Heard(), 10)
            where.end_parent(parent, "parent-ended")
            await settled()
            assert len(heard.of("cancelled")) == 10
            await passed(200)
            assert is_empty(where)
            assert where.scheduler.circuits.breakers._breakers == {}
            assert len(timers()) == 1

    run_virtual(run())


def test_wait_for_held_tasks_continues() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            _, rest = await opened(where, Heard(), 3)
            waiting = asyncio.create_task(where.wait_for_completion(rest[2:], timeout=100))
            for handle in rest[:2]:
                where.cancel(handle.task_id, "out of the way")
            await passed(31)
            await job(rest[2]).finish()
            assert await waiting
            assert where.scheduler.now() == 31

    run_virtual(run())
