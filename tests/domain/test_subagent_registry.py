"""The registry of tasks: state moves, collection, endings."""

import itertools
from typing import Any

import pytest

from bottega.agents.messages import AgentUsage, Usage
from bottega.errors import IllegalTransition
from bottega.subagents.handle import (
    DispatchParams,
    RestoredTask,
    SubagentHandle,
    SubagentOutcome,
    SubagentStatus,
    check_move,
)
from bottega.subagents.limits import SubagentLimits
from tests.domain.subagents import (
    Heard,
    Job,
    by_hand,
    id_of,
    is_empty,
    job,
    passed,
    put,
    registry,
    settled,
    status,
    timers,
)
from tests.domain.virtual import run_virtual

S = SubagentStatus
FINAL = {S.COMPLETED, S.FAILED, S.TIMEOUT, S.CANCELLED}
LEGAL = {
    S.QUEUED: {S.RUNNING, S.CANCELLED},
    S.RUNNING: {S.STREAMING, S.WAITING, *FINAL},
    S.STREAMING: {S.WAITING, *FINAL},
    S.WAITING: {S.QUEUED, *FINAL},
}
PAIRS = list(itertools.product(S, S))


class TestMoves:
    @pytest.mark.parametrize(("old", "new"), PAIRS)
    def test_allowed_moves_are_those_of_the_table(
        self, old: SubagentStatus, new: SubagentStatus
    ) -> None:
        assert old.is_final == (old in FINAL)
        if new in LEGAL.get(old, set()):
            check_move(old, new)
        else:
            with pytest.raises(IllegalTransition):
                check_move(old, new)

    @pytest.mark.parametrize(("old", "new"), PAIRS)
    def test_task_moves_once_or_not_at_all(self, old: SubagentStatus, new: SubagentStatus) -> None:
        async def run() -> None:
            heard = Heard()
            async with registry() as where:
                handle = put(where, by_hand(where, heard))
                if old is not S.QUEUED and old is not S.CANCELLED:
                    await settled()
                if handle.status is not old:
                    where.transition(handle, old)
                heard.events.clear()
                before = (handle.status, where.active_count, where.queued_count, where.total_count)
                if new in LEGAL.get(old, set()):
                    where.transition(handle, new)
                    assert handle.status is new
                    assert heard.data("status_changed") == [{"attempt": 1, "from": old, "to": new}]
                    assert where.active_count == (new in (S.RUNNING, S.STREAMING))
                    assert heard.of(str(new)) == (["task"] if new in FINAL else [])
                else:
                    with pytest.raises(IllegalTransition):
                        where.transition(handle, new)
                    assert heard.events == []
                    assert before == (
                        handle.status, where.active_count, where.queued_count, where.total_count,
                    )  # fmt: skip
                if handle.status in (S.RUNNING, S.WAITING) and not handle.holds_slot:
                    where.scheduler._queue.discard(handle)  # it was moved by hand, without a slot

        run_virtual(run())


class TestCommonMistakes:
    """Details that simple schedulers get wrong."""

    def test_task_over_the_limit_of_its_parent_is_queued(self) -> None:
        async def run() -> None:
            async with registry(
                SubagentLimits(max_concurrent=2), min_workers=5, max_workers=5
            ) as w:
                parent = by_hand(w)
                tasks = [put(w, parent, str(n)) for n in range(5)]
                await settled()
                assert [t.status for t in tasks] == [S.RUNNING] * 2 + [S.QUEUED] * 3
                await job(tasks[0]).finish()
                assert [t.status for t in tasks[1:4]] == [S.RUNNING] * 2 + [S.QUEUED]

        run_virtual(run())

    def test_wait_that_times_out_says_so_and_the_task_continues(self) -> None:
        async def run() -> None:
            async with registry() as where:
                handle = put(where, by_hand(where))
                assert not await where.wait_for_completion([handle], timeout=7)
                assert where.scheduler.now() == 7
                assert status(handle) == S.RUNNING
                assert handle.waiters is None
                await job(handle).finish()
                assert await where.wait_for_completion([handle], timeout=7)
                assert where.scheduler.now() == 7

        run_virtual(run())

    def test_cancelled_entries_leave_the_queue_at_once_and_do_not_count(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(max_queued=2, max_queue_size=2)
            async with registry(limits, min_workers=1, max_workers=1) as where:
                parent = by_hand(where)
                running = put(where, parent, "first")
                await settled()
                waiting = [put(where, parent, name) for name in ("a", "b")]
                assert where.queued_count == 2
                assert where.cancel(waiting[0].task_id, "no need")
                assert where.queued_count == 1
                assert where.scheduler.position(waiting[1], where.scheduler.now()) == 0
                third = put(where, parent, "c")  # there is room again
                assert where.scheduler.position(third, where.scheduler.now()) == 1
                await job(running).finish()
                assert waiting[1].status is S.RUNNING
                assert not job(waiting[0]).started

        run_virtual(run())

    @pytest.mark.parametrize("how", ["finish", "fail", "cancel"])
    def test_no_timer_of_a_finished_task_is_left(self, how: str) -> None:
        async def run() -> None:
            where = registry()
            handle = put(where, by_hand(where), timeout=50)
            await settled()
            assert timers() == [50]
            if how == "cancel":
                where.cancel(handle.task_id, "enough")
            else:
                await getattr(job(handle), how)()
            assert timers() == []
            assert handle.timer is None
            await where.shutdown()

        run_virtual(run())

    def test_position_is_the_number_of_tasks_ahead(self) -> None:
        async def run() -> None:
            async with registry(min_workers=1, max_workers=1) as where:
                parent = by_hand(where)
                put(where, parent, "runs")
                await settled()
                low = put(where, parent, "low", priority=9)
                same = put(where, parent, "same", priority=9)
                high = put(where, parent, "high", priority=1)
                scheduler = where.scheduler
                now = scheduler.now()
                assert [scheduler.position(each, now) for each in (low, same, high)] == [1, 2, 0]
                other = put(where, by_hand(where, tenant_id=id_of(parent, "another")), priority=10)
                assert scheduler.position(other, now) == 0  # within its own tenant

        run_virtual(run())

    @pytest.mark.parametrize("how", ["finish", "fail", "cancel"])
    def test_duration_is_fixed_at_the_end(self, how: str) -> None:
        async def run() -> None:
            async with registry() as where:
                handle = put(where, by_hand(where))
                await passed(3)
                if how == "cancel":
                    where.cancel(handle.task_id, "enough")
                else:
                    await getattr(job(handle), how)()
                await passed(100)
                assert handle.duration_ms(where.scheduler.now()) == 3000

        run_virtual(run())

    def test_watchdog_ends_a_task_whose_timer_was_lost(self) -> None:
        async def run() -> None:
            heard = Heard()
            async with registry(min_workers=1, max_workers=1) as where:
                parent = by_hand(where, heard)
                first = put(where, parent, "first", timeout=400)
                queued = put(where, parent, "queued", timeout=100)
                await passed(350)  # time in the queue does not count
                await job(first).finish()
                assert queued.timer is not None
                queued.timer.cancel()
                await passed(199)
                assert status(queued) == S.RUNNING
                await passed(32)
                assert status(queued) == S.TIMEOUT
                assert heard.of("timeout") == ["queued"]
                assert job(queued).cancelled
                assert where.scheduler.in_use == 0

        run_virtual(run())

    def test_state_of_breakers_and_parents_shrinks(self) -> None:
        async def run() -> None:
            async with registry(min_workers=9, max_workers=9) as where:
                for n in range(20):
                    parent = by_hand(where)
                    for name in "abc":
                        put(where, parent, name, agent=f"agent {n}")
                    await settled()
                    for child in list(parent.children.values()):
                        await job(child).fail()
                    where.end_parent(parent, "parent-ended")
                await passed(500)
                assert where.total_count == 0
                assert is_empty(where)
                assert where.scheduler.circuits._breakers == {}
                assert len(timers()) == 1  # the next collection

        run_virtual(run())


class TestCollection:
    def test_unread_result_is_never_collected(self) -> None:
        async def run() -> None:
            async with registry() as where:
                parent = by_hand(where)
                handle = put(where, parent)
                await settled()
                await job(handle).finish("the result")
                await passed(100_000)
                assert where.get(handle.task_id, parent) is handle
                handle.received = True
                await passed(31)
                assert where.get(handle.task_id, parent) is None
                assert where._parents == {parent.parent_id: parent} or not where._parents

        run_virtual(run())

    def test_read_result_is_kept_for_its_time(self) -> None:
        async def run() -> None:
            async with registry(SubagentLimits(gc_ttl=60, gc_interval=30)) as where:
                handle = put(where, by_hand(where))
                await settled()
                await job(handle).finish()
                handle.received = True
                await passed(59)
                assert where.total_count == 1
                await passed(2)
                assert where.total_count == 0

        run_virtual(run())

    def test_unread_result_of_an_ended_parent_is_collected_after_its_time(self) -> None:
        async def run() -> None:
            async with registry() as where:
                parent = by_hand(where)
                handle = put(where, parent)
                await settled()
                await job(handle).finish()
                where.end_parent(parent, "parent-ended")
                await passed(59)
                assert where.total_count == 1
                await passed(2)
                assert is_empty(where)

        run_virtual(run())

    def test_received_results_are_collected_first_when_there_are_too_many(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(max_concurrent_global=1)
            async with registry(limits) as where:
                parent = by_hand(where)
                handles = []
                for n in range(12):
                    handles.append(put(where, parent, str(n)))
                    await settled()
                    await job(handles[-1]).finish()
                for handle in handles[:6]:
                    handle.received = True
                assert where.collect() == 6
                assert where.total_count == 6
                assert (
                    where.collect() == 0
                )  # below ten times the limit no task is collected before its time

        run_virtual(run())

    def test_tasks_of_a_vanished_parent_are_cancelled(self) -> None:
        async def run() -> None:
            async with registry(min_workers=2, max_workers=2) as where:
                owner = put(where, top := by_hand(where))
                await settled()
                parent = by_hand(where, heard := Heard(), owner=owner)
                running, queued = put(where, parent, "a"), put(where, parent, "b")
                await passed(31)
                assert running.status is S.RUNNING
                owner.scopes.clear()  # as if its end had not reached them
                where.end_parent(top, "enough")
                assert running.status is S.RUNNING
                await passed(30)
                assert [running.status, queued.status] == [S.CANCELLED] * 2
                assert {each.error for each in (running, queued)} == {"orphan-cleanup"}
                assert len(heard.of("cancelled")) == 2
                assert job(running).cancelled
                await passed(91)
                assert is_empty(where)

        run_virtual(run())

    def test_late_result_is_dropped_and_counted(self) -> None:
        async def run() -> None:
            async with registry() as where:
                handle = put(where, by_hand(where, heard := Heard()))
                await settled()
                where.cancel(handle.task_id, "enough")
                assert not where.finish(handle, SubagentOutcome(S.COMPLETED, output="late"))
                assert where.late_results == 1
                assert status(handle) == S.CANCELLED
                assert handle.final_output is None
                assert heard.of("completed") == []

        run_virtual(run())

    def test_work_that_resists_cancellation_ends_late(self) -> None:
        async def run() -> None:
            async def stubborn(handle: Any) -> SubagentOutcome:
                try:
                    await passed(100)
                except BaseException:
                    await passed(1)
                return SubagentOutcome(S.COMPLETED, output="late")

            async with registry() as where:
                handle = put(where, by_hand(where), work=stubborn)
                await settled()
                where.cancel(handle.task_id, "enough")
                await passed(2)
                assert where.late_results == 1
                assert handle.error == "enough"

        run_virtual(run())


class TestEndings:
    def test_shutdown_cancels_and_leaves_nothing(self) -> None:
        async def run() -> None:
            where = registry(min_workers=1, max_workers=1)
            async with where:
                parent = by_hand(where, heard := Heard())
                running, queued = put(where, parent, "a"), put(where, parent, "b")
                await settled()
                below = by_hand(where, heard, owner=running)
                grandchild = put(where, below, "c")
            assert [h.error for h in (running, queued)] == ["registry-shutdown"] * 2
            assert grandchild.status is S.CANCELLED
            assert len(heard.of("cancelled")) == 3
            assert job(running).cancelled
            assert is_empty(where)
            assert timers() == []

        run_virtual(run())

    def test_after_shutdown_no_call_waits_for_ever(self) -> None:
        async def run() -> None:
            where = registry()
            async with where:
                put(where, by_hand(where))
                await settled()
            late = put(where, by_hand(where), "late")
            await settled()
            await job(late).finish()
            assert late.status is S.COMPLETED
            await where.shutdown()
            assert is_empty(where)
            assert timers() == []

        run_virtual(run())

    def test_second_start_does_not_collect_twice(self) -> None:
        async def run() -> None:
            where = registry()
            where.start()
            where.start()
            assert len(timers()) == 1
            await where.shutdown()
            assert timers() == []

        run_virtual(run())

    def test_discarded_tasks_are_suspended_without_an_end(self) -> None:
        async def run() -> None:
            async with registry(min_workers=1, max_workers=1) as where:
                parent = by_hand(where, heard := Heard())
                running, queued = put(where, parent, "a"), put(where, parent, "b")
                await settled()
                heard.events.clear()
                where.discard([parent])
                await settled()
                assert heard.events == []
                assert [running.status, queued.status] == [S.RUNNING, S.QUEUED]
                assert job(running).cancelled
                assert not job(queued).started
                assert is_empty(where)
                assert len(timers()) == 1

        run_virtual(run())


class TestRestoring:
    def past(self, **about: Any) -> RestoredTask:
        params = DispatchParams(prompt="task", agent=about.pop("agent", "helper"))
        return RestoredTask(**{"params": params, "attempt": 2, "waited": 10.0, **about})

    def test_unfinished_task_is_queued_again_with_its_age_and_deadline(self) -> None:
        async def run() -> None:
            async with registry(min_workers=1, max_workers=1) as where:
                parent = by_hand(where, heard := Heard())
                job_ = Job()
                past = self.past(remaining=5.0)
                task = id_of(parent, "task")
                handle = where.restore(parent, past, job_, task_id=task, place=(1, 0))
                assert where.restore(parent, past, Job(), task_id=task, place=(1, 0)) is handle
                assert put(where, parent, "task") is handle
                assert heard.events == []
                assert status(handle) == S.QUEUED
                await passed(6)
                assert heard.data("dequeued") == [
                    {"attempt": 2, "waited_ms": 10_000, "timeout_ms": 5000}
                ]
                assert status(handle) == S.TIMEOUT
                assert handle.duration_ms(0) == 15_000

        run_virtual(run())

    def test_unfinished_task_is_awaited_again(self) -> None:
        async def run() -> None:
            async with registry() as where:
                above = {"designer": frozenset(("requirements",))}
                parent = by_hand(where, ancestors=lambda name: above.get(name, frozenset()))
                handles: list[SubagentHandle] = []
                for name in ("designer", "requirements"):
                    past, task_id = self.past(agent=name), id_of(parent, name)
                    place = (1, len(handles))
                    handles.append(where.restore(parent, past, Job(), task_id=task_id, place=place))
                await settled()
                assert [each.status for each in handles] == [S.QUEUED, S.RUNNING]
                await job(handles[1]).finish()
                assert status(handles[0]) == S.RUNNING

        run_virtual(run())

    def test_tokens_of_a_finished_task_are_charged_to_all_its_accounts(self) -> None:
        async def run() -> None:
            async with registry() as where:
                root = by_hand(where)
                top = put(where, root, "top")
                below = by_hand(where, owner=top)
                usage = AgentUsage(input=70, output=30, model_calls=2)
                past = self.past(
                    outcome=SubagentOutcome(S.COMPLETED, output="R"),
                    duration_ms=1234,
                    spent=Usage(input=40),
                    usage=usage,
                )
                handle = where.restore(below, past, Job(), task_id=id_of(below, "r"), place=(1, 0))
                accounts = (handle.account, below.account, top.account, root.account)
                assert [account.spent for account in accounts] == [100] * 4
                assert handle.token_usage == Usage(input=40)
                assert (handle.final_output, handle.duration_ms(99)) == ("R", 1234)
                assert where.active_count + where.queued_count == 1
                assert await where.wait_for_completion([handle], timeout=9)

        run_virtual(run())

    def test_restored_finished_task_does_not_hold_others(self) -> None:
        async def run() -> None:
            async with registry() as where:
                above = {"designer": frozenset(("requirements",))}
                parent = by_hand(where, ancestors=lambda name: above.get(name, frozenset()))
                design = put(where, parent, "design", agent="designer")
                done = self.past(
                    agent="requirements", outcome=SubagentOutcome(S.COMPLETED, output="R")
                )
                where.restore(parent, done, Job(), task_id=id_of(parent, "r"), place=(1, 1))
                await settled()
                assert design.status is S.RUNNING

        run_virtual(run())
