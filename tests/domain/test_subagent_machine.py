"""Tasks under random operations in any order, compared with a simple model."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bottega.errors import IllegalTransition, SubagentRefusedError
from bottega.subagents.handle import (
    DispatchParams,
    Parent,
    RestoredTask,
    SubagentHandle,
    SubagentOutcome,
    SubagentStatus,
    missing,
)
from bottega.subagents.limits import SchedulerOptions, SubagentLimits
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.scheduler import SubagentScheduler
from tests.domain.subagents import Heard, by_hand, id_of, is_empty, passed, put, settled, timers
from tests.domain.virtual import VirtualLoop
from tests.examples import examples

S = SubagentStatus
ACTIVE = (S.RUNNING, S.STREAMING)
TENANTS = [UUID(int=1), UUID(int=2)]
LIMITS = SubagentLimits(
    max_concurrent=2,
    max_queued=3,
    max_concurrent_global=4,
    max_queue_size=7,
    max_depth=2,
    default_timeout=60.0,
    max_timeout=80.0,
    tenant_max_concurrent=3,
    tenant_max_queued=5,
)
OPTIONS = SchedulerOptions(min_workers=3, max_workers=3, failure_threshold=2)
ENDS = {
    "completed": SubagentOutcome(S.COMPLETED, output="done"),
    "failed": SubagentOutcome(S.FAILED, error="no", error_code="agent_failed"),
    "budget": SubagentOutcome(S.FAILED, error="no", error_code="budget_exhausted"),
}


PARAMS = st.fixed_dictionaries(
    {"priority": st.integers(1, 10), "instructions": st.sampled_from("xy")}
)


class Work:
    """Work that obeys the test: parks, calls a model, continues or ends."""

    def __init__(self, where: SubagentRegistry) -> None:
        self.where = where
        self.told: asyncio.Future[Any] | None = None
        self.parked = self.inside = self.slotless = False

    def tell(self, what: Any) -> None:
        assert self.told is not None
        self.told.set_result(what)

    @property
    def listens(self) -> bool:
        return self.told is not None and not self.told.done()

    async def next(self) -> Any:
        self.told = asyncio.get_running_loop().create_future()
        return await self.told

    async def __call__(self, handle: SubagentHandle) -> SubagentOutcome:
        while not isinstance(said := await self.next(), SubagentOutcome):
            if said == "park":
                async with self.where.scheduler.parking(handle):
                    self.inside = self.parked = self.slotless = True
                    await self.next()
                    self.parked = False
                self.inside = False
            elif said == "call":
                self.inside, self.slotless = True, False  # a parked part asks for a slot only now
                await self.where.scheduler.begin_call(handle)
                try:
                    await self.next()
                finally:
                    self.where.scheduler.end_call(handle)
                self.inside = False
            else:
                raise said
        return said


class Watched(Heard):
    """NotifyListener that checks at each first slot that no old task was passed over."""

    def __init__(self, tasks: dict[UUID, SubagentHandle]) -> None:
        super().__init__()
        self.tasks = tasks
        self.last: dict[UUID, str] = {}
        self.ends: Counter[UUID] = Counter()

    def on_event(self, handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
        if event == "dequeued":
            now = asyncio.get_running_loop().time()
            for other in self.tasks.values():
                if other.run_id == handle.run_id and self.could_go(other, handle):
                    assert now - other.created_at < 45 or handle.created_at <= other.created_at
        if event == "status_changed":
            self.last[handle.task_id] = data["to"]
        if event in ("completed", "failed", "timeout", "cancelled"):
            self.ends[handle.task_id] += 1
            assert self.ends[handle.task_id] == 1

    def could_go(self, other: SubagentHandle, taken: SubagentHandle) -> bool:
        if other.place is None or other.status is not S.QUEUED:
            return False
        held = sum(h.holds_slot for h in other.parent.children.values() if h is not taken)
        return held < LIMITS.max_concurrent


class Tasks(RuleBasedStateMachine):
    """Machine that drives the loop by hand; between steps everything waits for a timer or step."""

    @initialize()
    def begin(self) -> None:
        self.loop = VirtualLoop()
        self.where = SubagentRegistry(LIMITS, SubagentScheduler(OPTIONS))
        self.tasks: dict[UUID, SubagentHandle] = {}
        self.expected: dict[UUID, SubagentStatus] = {}
        self.heard = Watched(self.tasks)
        self.roots = [self.parent(tenant_id=TENANTS[n // 2]) for n in range(3)]
        self.below: list[Parent] = []
        self.waits: list[tuple[asyncio.Task[bool], list[SubagentHandle], int]] = []
        self.names = 0

    def parent(self, **about: Any) -> Parent:
        return by_hand(self.where, self.heard, **about)

    def do(self, action: Callable[[], Any]) -> Any:
        async def acted() -> Any:
            try:
                return action()
            finally:
                await settled()

        return self.loop.run_until_complete(acted())

    def now(self) -> float:
        return self.loop.time()

    def some(self, data: st.DataObject, *states: SubagentStatus) -> SubagentHandle | None:
        fit = [h for h in self.tasks.values() if not states or h.status in states]
        return data.draw(st.sampled_from(fit)) if fit else None

    # Operations

    @rule(data=st.data(), count=st.integers(1, 4), about=PARAMS)
    def dispatch(self, data: st.DataObject, count: int, about: dict[str, Any]) -> None:
        self.below = [parent for parent in self.below if not parent.ended]
        self.put(data.draw(st.sampled_from(self.below + self.roots)), count, about)

    @rule(data=st.data(), count=st.integers(1, 3), about=PARAMS)
    def nest(self, data: st.DataObject, count: int, about: dict[str, Any]) -> None:
        fit = [
            h for h in self.tasks.values() if h.status in ACTIVE and not h.scopes and not h.depth
        ]
        if fit:
            self.below.append(self.parent(owner=data.draw(st.sampled_from(fit))))
            self.put(self.below[-1], count, about)

    def put(self, parent: Parent, count: int, about: dict[str, Any]) -> None:
        def several() -> None:
            for _ in range(count):
                self.names += 1
                before = self.where.total_count, self.where.queued_count
                try:
                    handle = put(self.where, parent, str(self.names), Work(self.where), **about)
                except SubagentRefusedError as error:
                    assert before == (self.where.total_count, self.where.queued_count)
                    self.check_refused(parent, error)
                    continue
                assert put(self.where, parent, str(self.names), Work(self.where)) is handle
                self.tasks[handle.task_id] = handle
                self.expected[handle.task_id] = S.QUEUED

        self.do(several)

    def check_refused(self, parent: Parent, error: SubagentRefusedError) -> None:
        of_tenant = self.where.counts.queued_of[parent.tenant_id]
        match error.code:
            case "subagent_queue_full":
                assert of_tenant > 0
                of_run = sum(
                    h.run_id == parent.run_id and h.status is S.QUEUED for h in self.tasks.values()
                )
                extra = 0 if of_run else 1
                assert self.where.queued_count >= LIMITS.max_queue_size + extra or of_tenant >= (
                    (LIMITS.tenant_max_queued or 0) + extra
                )
            case "subagent_quota_exceeded":
                assert parent.queued >= LIMITS.max_queued
            case "subagent_circuit_open":
                assert self.where.scheduler.circuits.open(self.now())
                assert error.about["retry_after_ms"] > 0
            case "subagent_depth_exceeded":
                assert parent.depth >= LIMITS.max_depth

    @rule(data=st.data())
    def chunk(self, data: st.DataObject) -> None:
        handle = self.some(data)
        if handle is None or handle.status.is_final:
            return
        legal = handle.status is S.RUNNING

        def heard() -> None:
            try:
                self.where.transition(handle, S.STREAMING)
                assert legal
            except IllegalTransition:
                assert not legal

        self.do(heard)
        if legal:
            self.expected[handle.task_id] = S.STREAMING

    @rule(data=st.data(), how=st.sampled_from([*ENDS, "raises"]))
    def finish(self, data: st.DataObject, how: str) -> None:
        handle = self.some(data, *ACTIVE)
        if handle is None or not handle.work.listens or handle.work.inside:  # type: ignore[attr-defined]
            return
        self.do(lambda: handle.work.tell(ENDS.get(how) or ValueError("no")))  # type: ignore[attr-defined]
        self.expect_end(handle, S.COMPLETED if how == "completed" else S.FAILED)

    def expect_end(self, handle: SubagentHandle, end: SubagentStatus) -> None:
        self.expected[handle.task_id] = end
        for scope in handle.scopes:
            self.expect_cancelled(scope)

    def expect_cancelled(self, parent: Parent) -> None:
        for child in parent.children.values():
            if not self.expected[child.task_id].is_final:
                self.expect_end(child, S.CANCELLED)

    @rule(data=st.data(), what=st.sampled_from(["park", "call"]))
    def park_or_call_or_go_on(self, data: st.DataObject, what: str) -> None:
        handle = self.some(data, *ACTIVE)
        if handle is not None and handle.work.listens:  # type: ignore[attr-defined]
            self.do(lambda: handle.work.tell(what))  # type: ignore[attr-defined]

    @rule(seconds=st.sampled_from([0.5, 5, 20, 31, 50]))
    def time_passes(self, seconds: float) -> None:
        until = self.now() + seconds

        async def pass_() -> None:
            await passed(seconds)
            await settled()

        self.loop.run_until_complete(pass_())
        assert self.now() >= until
        late = [
            handle
            for handle in self.tasks.values()
            if handle.status is S.TIMEOUT and not self.expected[handle.task_id].is_final
        ]
        for handle in late:  # all of them first: a task may be due together with one below it
            assert handle.deadline is not None
            assert handle.status_changed_at >= handle.deadline - 1e-6
            self.expected[handle.task_id] = S.TIMEOUT
        for handle in late:
            self.expect_end(handle, S.TIMEOUT)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = self.some(data)
        if handle is None:
            return
        under_way = not handle.status.is_final
        assert self.do(lambda: self.where.cancel(handle.task_id, "enough")) == under_way
        if under_way:
            self.expect_end(handle, S.CANCELLED)

    @rule(data=st.data(), gone=st.booleans())
    def a_root_cancels_all(self, data: st.DataObject, gone: bool) -> None:
        parent = data.draw(st.sampled_from(self.roots))
        under_way = sum(not child.status.is_final for child in parent.children.values())
        assert self.do(lambda: self.where.cancel_all(parent.parent_id)) == under_way
        self.expect_cancelled(parent)
        if gone:
            self.do(lambda: self.where.end_parent(parent, "parent-ended"))
            self.roots[self.roots.index(parent)] = self.parent(tenant_id=parent.tenant_id)

    @rule(
        data=st.data(), mode=st.sampled_from(["all", "any", "quorum"]), timeout=st.integers(1, 60)
    )
    def wait(self, data: st.DataObject, mode: Any, timeout: int) -> None:
        if not self.tasks:
            return
        some = st.lists(st.sampled_from(list(self.tasks.values())), min_size=1, unique_by=id)
        handles = data.draw(some)
        count = missing([S.QUEUED] * len(handles), mode, 2)

        def begin() -> None:
            waiting = self.where.wait_for_completion(handles, mode=mode, quorum=2, timeout=timeout)
            self.waits.append((self.loop.create_task(waiting), handles, count))

        self.do(begin)

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        if (handle := self.some(data, S.COMPLETED, S.FAILED, S.TIMEOUT)) is not None:
            handle.received = True

    @rule()
    def collect(self) -> None:
        gone = {
            task_id
            for task_id, handle in self.tasks.items()
            if handle.status.is_final
            and (handle.received or handle.parent.ended)
            and self.now() - handle.status_changed_at >= LIMITS.gc_ttl
        }
        assert self.do(self.where.collect) == len(gone)
        for task_id in gone:
            del self.tasks[task_id]

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Abandon a run and resume it: finished tasks are restored, others queued again."""
        old = data.draw(st.sampled_from(self.roots))
        below = [p for p in self.below if p.owner and p.owner.parent is old]
        new = self.parent(tenant_id=old.tenant_id, parent_id=old.parent_id, run_id=old.run_id)
        self.below = [p for p in self.below if p not in below]
        self.roots[self.roots.index(old)] = new
        lost = [child for parent in below for child in parent.children]
        kept = list(old.children.values())
        self.do(lambda: self.where.discard([old, *below]))
        for task_id in lost:
            self.tasks.pop(task_id, None)
        for waiting, handles, _ in self.waits:
            if any(h.suspended or h.task_id not in self.tasks for h in handles):
                waiting.cancel()

        def restored() -> None:
            for handle in kept:
                self.restore(new, handle)

        self.do(restored)

    def restore(self, parent: Parent, old: SubagentHandle) -> None:
        ended = (
            SubagentOutcome(old.status, output=old.final_output) if old.status.is_final else None
        )
        params = DispatchParams(old.prompt, old.instructions, "helper")
        past = RestoredTask(params, old.attempt + 1, self.now() - old.created_at, outcome=ended)
        handle = self.where.restore(
            parent, past, Work(self.where), task_id=old.task_id, place=old.path[-1]
        )
        assert handle.task_id == id_of(parent, old.prompt)
        self.tasks[handle.task_id] = handle
        self.expected[handle.task_id] = old.status if ended else S.QUEUED

    # Invariants

    @invariant()
    def states_are_as_expected(self) -> None:
        for task_id, handle in self.tasks.items():
            assert self.where.get(task_id) is handle
            if handle.status is S.RUNNING and self.expected[task_id] is S.QUEUED:
                self.expected[task_id] = S.RUNNING
            assert handle.status is self.expected[task_id]
            assert self.heard.last.get(task_id, "queued") == handle.status or handle.attempt > 1

    @invariant()
    def counts_equal_the_states(self) -> None:
        tasks = self.tasks.values()
        states = Counter(handle.status for handle in tasks)
        assert self.where.total_count == len(tasks)
        assert self.where.queued_count == states[S.QUEUED]
        assert self.where.active_count == states[S.RUNNING] + states[S.STREAMING]
        queued = [handle for handle in tasks if handle.status is S.QUEUED]
        for parent in self.roots + self.below:
            assert parent.queued == sum(handle.parent is parent for handle in queued)
        for tenant in TENANTS:
            of_tenant = sum(handle.tenant_id == tenant for handle in queued)
            assert self.where.counts.queued_of[tenant] == of_tenant

    @invariant()
    def no_slot_leaks_and_none_lies_idle(self) -> None:
        scheduler, tasks = self.where.scheduler, self.tasks.values()
        holders = [handle for handle in tasks if handle.holds_slot]
        assert scheduler.in_use == len(holders) <= scheduler.capacity
        assert all(handle.status in ACTIVE for handle in holders)
        assert max(Counter(h.parent.parent_id for h in holders).values(), default=0) <= 2
        assert max(Counter(h.tenant_id for h in holders).values(), default=0) <= 3
        for handle in tasks:
            if handle.status in ACTIVE:
                waits = handle.slot is not None
                assert handle.holds_slot == (not handle.work.slotless and not waits)  # type: ignore[attr-defined]
                assert waits == (handle.place is not None or handle.polling)
                assert not handle.polling or handle.waiting_below
        if scheduler.in_use < scheduler.capacity:
            assert not scheduler._queue.ready

    @invariant()
    def waiting_tasks_below_are_counted(self) -> None:
        for handle in self.tasks.values():
            if handle.status in ACTIVE:
                assert handle.waiting_below == sum(parent.ready for parent in handle.scopes)

    @invariant()
    def quotas_hold(self) -> None:
        restored = any(handle.attempt > 1 for handle in self.tasks.values())
        if restored:
            return  # limits are not applied to those again
        assert self.where.queued_count <= LIMITS.max_queue_size + len(TENANTS)
        for parent in self.roots + self.below:
            assert parent.queued <= LIMITS.max_queued
        for tenant in TENANTS:
            most = (LIMITS.tenant_max_queued or 0) + 1
            assert self.where.counts.queued_of[tenant] <= most

    @invariant()
    def no_timer_outlives_its_task(self) -> None:
        due = [h.deadline for h in self.tasks.values() if h.status in ACTIVE]
        waiting = sum(not task.done() for task, _, _ in self.waits)
        found = self.do(timers)
        assert len(found) == len(due) + waiting
        assert set(due) <= set(found)
        assert all(h.timer is None for h in self.tasks.values() if h.status not in ACTIVE)

    @invariant()
    def waits_end_and_leave_nothing(self) -> None:
        under_way = []
        for task, handles, count in self.waits:
            over = sum(handle.status.is_final for handle in handles)
            if task.done():
                assert task.cancelled() or not task.result() or over >= count
            else:
                assert over < count
                under_way.append((task, handles, count))
        self.waits = under_way
        for handle in self.tasks.values():
            listeners = sum(handle in handles for _, handles, _ in under_way)
            if not handle.status.is_final:
                assert len(handle.waiters or ()) == listeners

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.loop.run_until_complete(self.where.shutdown())
        self.do(lambda: None)
        assert is_empty(self.where)
        for task, _, _ in self.waits:
            task.cancel()
        self.do(lambda: None)
        assert self.do(timers) == []
        self.loop.close()


TestTasks = Tasks.TestCase
TestTasks.settings = settings(max_examples=examples(50), stateful_step_count=50, deadline=None)
