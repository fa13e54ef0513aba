"""The pool's size over time, and its sharing between tenants."""

from typing import Any

import pytest

from bottega.errors import SubagentQueueFullError, SubagentQuotaExceededError
from bottega.subagents.handle import SubagentOutcome, SubagentStatus
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.scheduler import SubagentScheduler
from bottega.subagents.telemetry import Totals
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
    timers,
)
from tests.domain.virtual import run_virtual

S = SubagentStatus
WIDE = SubagentLimits(max_concurrent=100, max_queued=100, max_queue_size=200)


class TestSize:
    def test_pool_grows_under_load_and_shrinks_back(self) -> None:
        async def run() -> None:
            where = registry(WIDE, min_workers=2, max_workers=10)
            parent = by_hand(where)
            handles = [put(where, parent, str(n), timeout=500) for n in range(40)]
            await settled()
            sizes = [where.scheduler.size]
            for _ in range(6):
                await passed(10)
                sizes.append(where.scheduler.size)
            assert sizes == [3, 5, 8, 10, 10, 10, 10]
            assert where.scheduler.in_use == where.active_count == 10
            for handle in handles:
                await job(handle).finish()
            sizes = [where.scheduler.size]
            for _ in range(7):
                await passed(10)
                sizes.append(where.scheduler.size)
            assert sizes == [7, 5, 3, 2, 2, 2, 2, 2]
            assert timers() == []

        run_virtual(run())

    def test_pool_does_not_shrink_when_all_running_tasks_end_at_once(self) -> None:
        async def run() -> None:
            async with registry(WIDE, min_workers=2, max_workers=8) as where:
                parent = by_hand(where)
                handles = [put(where, parent, str(n)) for n in range(60)]
                await passed(50)
                assert where.scheduler.size == 8
                for handle in handles[:8]:
                    job(handle).end.set_result(
                        SubagentOutcome(S.COMPLETED)
                    )  # all in one turn of the loop
                await settled()
                assert where.scheduler.size == 8
                assert where.scheduler.in_use == 8

        run_virtual(run())

    def test_pool_of_constant_size_needs_no_timer(self) -> None:
        async def run() -> None:
            where = registry(WIDE, min_workers=4, max_workers=4)
            handle = put(where, by_hand(where), timeout=50)
            await settled()
            assert timers() == [50]
            await job(handle).finish()
            assert timers() == []

        run_virtual(run())

    def test_held_slots_stay_below_the_global_limit(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(max_concurrent=5, max_concurrent_global=3)
            async with registry(limits, min_workers=10, max_workers=10) as where:
                parents = [by_hand(where), by_hand(where)]
                handles = [put(where, parents[n % 2], str(n)) for n in range(6)]
                await settled()
                assert where.scheduler.in_use == 3
                await job(handles[0]).finish()
                assert where.scheduler.in_use == 3

        run_virtual(run())

    def test_pool_is_measured(self) -> None:
        async def run() -> None:
            where = registry(WIDE, min_workers=2, max_workers=2)
            totals = where.telemetry = Totals()
            parent = by_hand(where)
            handles = [put(where, parent, str(n)) for n in range(3)]
            await settled()
            snapshot = totals.snapshot()
            assert snapshot["subagent.dispatch.count"] == 3
            assert snapshot["subagent.queue.depth"] == 1
            assert snapshot["subagent.active.count"] == 2
            assert snapshot["subagent.pool.size"] == 2
            assert snapshot["subagent.pool.utilization"] == 1
            await passed(2)
            for handle in handles:
                await job(handle).finish()
            snapshot = totals.snapshot()
            assert snapshot["subagent.status.completed"] == 3
            assert snapshot["subagent.completion.duration_ms.sum"] == 6000
            assert snapshot["subagent.pool.utilization"] == snapshot["subagent.queue.depth"] == 0
            for handle in handles:
                handle.received = True
            await passed(61)
            where.collect()
            assert totals.snapshot()["subagent.gc.collected"] == 3

        run_virtual(run())


class TestFairness:
    def tenants(self, where: Any, heard: Heard | None = None) -> list[Any]:
        return [by_hand(where, heard, tenant_id=by_hand(where).run_id) for _ in range(2)]

    def test_flooding_tenant_delays_anothers_first_task_by_one_slot(self) -> None:
        async def run() -> None:
            async with registry(WIDE, min_workers=2, max_workers=2) as where:
                loud, quiet = self.tenants(where)
                many = [put(where, loud, str(n), priority=1) for n in range(40)]
                await passed(60)
                one = put(where, quiet, "one", priority=10)
                await job(many[0]).finish()
                assert (
                    status(one) == S.QUEUED or where.scheduler._queue.holding(quiet.tenant_id) == 1
                )
                await job(many[1]).finish()
                assert status(one) == S.RUNNING

        run_virtual(run())

    def test_two_tenants_take_turns(self) -> None:
        async def run() -> None:
            async with registry(WIDE, min_workers=1, max_workers=1) as where:
                heard = Heard()
                first, second = self.tenants(where, heard)
                for n in range(6):
                    put(where, first, f"a{n}")
                for n in range(3):
                    put(where, second, f"b{n}")
                await settled()
                while running := [h for h in where.handles() if h.status is S.RUNNING]:
                    await job(running[0]).finish()
                order = "a0 b0 a1 b1 a2 b2 a3 a4 a5"
                assert heard.of("dequeued") == order.split()

        run_virtual(run())

    def test_runs_of_one_tenant_take_turns(self) -> None:
        async def run() -> None:
            async with registry(WIDE, min_workers=1, max_workers=1) as where:
                tenant, heard = by_hand(where).run_id, Heard()
                loud, quiet = [by_hand(where, heard, tenant_id=tenant) for _ in range(2)]
                for n in range(6):
                    put(where, loud, f"a{n}", priority=1)
                positions = [put(where, quiet, f"b{n}", priority=10).queue_position for n in "01"]
                assert positions == [1, 3]  # behind the same number of the other run's
                await settled()
                while running := [h for h in where.handles() if h.status is S.RUNNING]:
                    await job(running[0]).finish()
                assert heard.of("dequeued") == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]

        run_virtual(run())

    def test_run_has_a_place_in_a_queue_that_another_run_of_its_tenant_filled(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(max_queued=100, max_queue_size=10, max_concurrent=100)
            async with registry(limits, min_workers=1, max_workers=1) as where:
                loud, other = self.tenants(where)
                quiet, third = [by_hand(where, tenant_id=loud.tenant_id) for _ in range(2)]
                running = put(where, loud, "runs")
                await settled()
                for n in range(5):
                    put(where, loud, str(n))
                    put(where, other, str(n))
                assert where.queued_count == 10
                theirs = put(where, quiet, "the place that is kept for its tenant")
                for late, limit in ((quiet, 10), (third, 6)):
                    with pytest.raises(SubagentQueueFullError) as refused:
                        put(where, late, "one more")
                    assert refused.value.about["limit"] == limit
                for turn in ("loud", "other", "quiet"):
                    assert status(theirs) == S.QUEUED, turn
                    await job(running).finish()
                    (running,) = [h for h in where.handles() if h.status is S.RUNNING]
                assert running is theirs
                put(where, third, "the place is free again")

        run_virtual(run())

    def test_tenant_fills_half_the_queue_at_most(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(max_queued=100, max_queue_size=10, max_concurrent=100)
            async with registry(limits, min_workers=1, max_workers=1) as where:
                loud, quiet = self.tenants(where, heard := Heard())
                for n in range(6):  # one of them has a slot, or will
                    put(where, loud, str(n))
                with pytest.raises(SubagentQueueFullError) as refused:
                    put(where, loud, "one more")
                assert refused.value.about == {"size": 5, "limit": 5}
                await settled()
                assert where.queued_count == 5
                assert heard.data("backpressure")[0]["size"] == 5
                put(where, quiet, "theirs")

        run_virtual(run())

    def test_each_tenant_has_a_place_in_a_queue_that_others_filled(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(max_queued=100, max_queue_size=10, max_concurrent=100)
            async with registry(limits, min_workers=1, max_workers=1) as where:
                one, two = self.tenants(where, Heard())
                three, four = self.tenants(where, Heard())
                running = put(where, one, "runs")
                await settled()
                for n in range(5):
                    put(where, one, str(n))
                    put(where, two, str(n))
                for late in (three, four):
                    put(where, late, "the place that is kept for it")
                    with pytest.raises(SubagentQueueFullError) as refused:
                        put(where, late, "one more")
                    assert refused.value.about["limit"] == 10
                assert where.queued_count == 12
                await job(running).finish()
                await settled()
                assert where.queued_count == 11

        run_virtual(run())

    def test_tenant_holds_no_more_slots_than_its_limit(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(tenant_max_concurrent=2, tenant_max_queued=3, max_concurrent=9)
            async with registry(limits, min_workers=9, max_workers=9) as where:
                loud, quiet = self.tenants(where)
                taken = [put(where, loud, str(n)) for n in range(5)]
                with pytest.raises(SubagentQueueFullError):
                    put(where, loud, "one more")
                await settled()
                assert (where.scheduler.in_use, where.queued_count) == (2, 3)
                theirs = put(where, quiet, "theirs")
                await settled()
                assert status(theirs) == S.RUNNING
                await job(taken[0]).finish()
                assert status(taken[2]) == S.RUNNING

        run_virtual(run())

    def test_parent_queues_no_more_than_its_limit(self) -> None:
        async def run() -> None:
            limits = SubagentLimits(max_queued=2, max_concurrent=1)
            async with registry(limits, min_workers=9, max_workers=9) as where:
                parent = by_hand(where, heard := Heard())
                first = [put(where, parent, str(n)) for n in range(3)]
                with pytest.raises(SubagentQuotaExceededError, match="await some"):
                    put(where, parent, "one more")
                assert heard.of("backpressure") == ["by hand"]
                (told,) = heard.data("backpressure")
                assert (told["code"], told["size"], told["limit"]) == (
                    "subagent_quota_exceeded", 2, 2,
                )  # fmt: skip
                await settled()
                where.cancel(first[2].task_id, "enough")
                put(where, parent, "one more")

        run_virtual(run())

    def test_the_first_estimates_need_data(self) -> None:
        async def run() -> None:
            async with registry(WIDE, min_workers=1, max_workers=1) as where:
                parent, estimate = by_hand(where), where.scheduler.estimated_start_ms
                for name in ("first", "second", "third"):
                    known = put(where, parent, name)
                    assert estimate(known) is None
                    await passed(4)
                    await job(known).finish()
                fourth = put(where, parent, "fourth")
                assert estimate(fourth) == 0
                await passed(1)
                fifth, sixth = put(where, parent, "fifth"), put(where, parent, "sixth")
                assert [estimate(each) for each in (fourth, fifth, sixth)] == [None, 3000, 7000]
                await passed(4)  # the fourth takes longer than those before
                assert estimate(sixth) is None

        run_virtual(run())


def test_registry_has_a_default_scheduler() -> None:
    async def run() -> None:
        async with SubagentRegistry() as where:
            assert isinstance(where.scheduler, SubagentScheduler)
            assert where.scheduler.size == 2
            assert is_empty(where)

    run_virtual(run())
