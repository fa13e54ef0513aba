"""Circuit breakers as models and events see them."""

import asyncio
from typing import Any

import pytest

from bottega.agents import ModelError
from bottega.errors import SubagentCircuitOpenError
from bottega.subagents.handle import SubagentStatus
from bottega.subagents.limits import SubagentLimits
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
                    dispatch("again", agent="helper", instructions="Otherwise."),
                    dispatch("another"),
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
            other = put(where, parent, "of another agent", agent="another")
            await settled()
            assert status(other) == S.RUNNING  # of all waiting tasks, only this agent's are held
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


def test_failures_of_one_agent_or_run_do_not_block_another() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent, _ = await opened(where, Heard(), 0)
            below = by_hand(where, run_id=parent.run_id)
            with pytest.raises(SubagentCircuitOpenError):
                put(where, below, "elsewhere in the run", instructions="Otherwise.")
            for theirs, about in ((parent, {"agent": "another"}), (by_hand(where), {})):
                handle = put(where, theirs, f"fine{about}", **about)
                await settled()
                assert status(handle) == S.RUNNING
                await job(handle).finish()

    run_virtual(run())


REFUSED = ("model_bad_request", "model_unauthorized", "model_not_found", "model_context_too_long")


@pytest.mark.parametrize(
    "how", ["budget_exhausted", "model_rate_limited", "was_limited", "cancel", *REFUSED]
)
def test_ends_that_are_no_fault_of_the_task_do_not_count(how: str) -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent = by_hand(where, heard := Heard())
            for n in range(6):
                handle = put(where, parent, str(n))
                await settled()
                if how == "cancel":
                    where.cancel(handle.task_id, "enough")
                    continue
                handle.was_limited = how == "was_limited"
                await job(handle).fail("model_unavailable" if handle.was_limited else how)
            assert heard.of("circuit_opened") == []

    run_virtual(run())


OWN = ("max_iterations", "model_empty", "model_refused", "model_filtered", "output_invalid")


@pytest.mark.parametrize("code", ["task_failed", "model_unavailable", "model_timeout", *OWN])
def test_every_failure_of_the_task_itself_counts(code: str) -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent = by_hand(where, heard := Heard())
            for n in range(3):
                handle = put(where, parent, str(n))
                await settled()
                await job(handle).fail(code)
            assert heard.of("circuit_opened") == ["2"]
            put(where, parent, "anonymous", agent=None)

    run_virtual(run())


def test_anonymous_tasks_share_no_breaker() -> None:
    async def run() -> None:
        async with registry(WIDE, min_workers=3, max_workers=3) as where:
            parent = by_hand(where, heard := Heard())
            for n in range(10):
                handle = put(where, parent, str(n), agent=None)
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
            assert where.scheduler.circuits._breakers == {}
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
