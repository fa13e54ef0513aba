"""The queue of asynchronous tasks, compared with a list that is searched at every take."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import floor
from types import FrameType
from typing import Any, cast
from weakref import WeakValueDictionary

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from bottega.subagents.limits import SubagentLimits
from bottega.subagents.scheduler import WAKE, TakeQueue
from tests.examples import examples

TENANTS = "ab"
PARENTS = {"ax1": 1, "ax2": 2, "ax3": 0, "ay1": 2, "az1": 3, "bx1": 1, "bx2": 3, "by1": 2}
"""Limits of parents, by tenant, run, and a number."""
INTERVAL = 5.0

priorities = st.integers(1, 10)
parents = st.sampled_from(sorted(PARENTS))


@dataclass(slots=True, eq=False, weakref_slot=True)
class Parent:
    """The part of a parent that the queue needs."""

    tenant_id: Hashable
    run_id: Hashable
    key: Hashable
    limits: SubagentLimits
    lines: dict[int, Any] = field(default_factory=dict)
    in_line: int = 0
    ready: int = 0
    holders: "dict[Entry, float]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Entry:
    """The part of a task that the queue needs, and how the test pushes it."""

    tenant: Hashable
    run: Hashable
    key: Hashable
    limit: int
    priority: int
    enqueued_at: float
    parent: Any = None
    place: tuple[float, int] | None = None
    line: int = 0

    @property
    def order(self) -> int:
        return 0 if self.place is None else self.place[1]


class Queue:
    """A queue whose parents have names; a push may change its parent's limit."""

    def __init__(
        self,
        interval: float = INTERVAL,
        tenant_limit: int | None = None,
        on_ready: Callable[[Any, int], None] | None = None,
    ) -> None:
        self.queue = TakeQueue(interval, tenant_limit, on_ready)
        self.parents: WeakValueDictionary[Hashable, Parent] = WeakValueDictionary()
        self.take: Callable[[float], Any] = self.queue.take
        self.position: Callable[[Any, float], int] = self.queue.position
        self.kept: set[Entry] = set()  # as the registry keeps tasks
        self.in_line_of, self.holding = self.queue.in_line_of, self.queue.holding

    def __len__(self) -> int:
        return len(self.queue)

    def is_ready(self) -> bool:
        return self.queue.ready

    def push(self, one: Entry) -> None:
        limits = SubagentLimits(max_concurrent=one.limit)
        one.parent = self.parents.setdefault(one.key, Parent(one.tenant, one.run, one.key, limits))
        one.parent.limits = limits
        self.queue.push(cast(Any, one), one.priority, one.enqueued_at)
        self.kept.add(one)

    def discard(self, one: Entry) -> bool:
        if one.place is not None:
            self.kept.discard(one)
        return self.queue.discard(cast(Any, one))

    def release(self, key: Hashable) -> None:
        """Release a slot of a parent."""
        one = next(iter(self.parents[key].holders))
        self.queue.release(cast(Any, one))
        self.kept.discard(one)

    def ready(self, key: Hashable) -> int:
        return self.parents[key].ready if key in self.parents else 0

    def holding_of(self, key: Hashable) -> int:
        return len(self.parents[key].holders) if key in self.parents else 0


def entry(parent: str = "ax1", priority: int = 5, at: float = 0.0, limit: int = 1000) -> Entry:
    return Entry(parent[0], parent[:2], parent, limit, priority, at)


class Naive:
    """Reference queue: one list, searched at every call."""

    def __init__(self, tenant_limit: int | None) -> None:
        self.entries: list[Entry] = []
        self.taken: list[tuple[Hashable, Hashable]] = []
        self.turns: list[Hashable] = []
        self.turns_of: dict[Hashable, list[Hashable]] = {tenant: [] for tenant in TENANTS}
        self.tenant_limit = tenant_limit

    def has_room(self, parent: Hashable) -> bool:
        limits = [PARENTS[str(parent)]]
        return sum(holder == parent for _, holder in self.taken) < limits[0]

    def rank(self, waiting: Entry, now: float) -> tuple[int, float, int]:
        steps = floor((now - waiting.enqueued_at) / INTERVAL)
        aged = max(1, waiting.priority - steps) if waiting.priority else WAKE
        return aged, waiting.enqueued_at, waiting.order

    def ready(self, tenant: Hashable) -> list[Entry]:
        return [one for one in self.entries if one.tenant == tenant and self.has_room(one.key)]

    def keep_turns(self) -> None:
        """Update the turns after a change: tenants with a takeable entry, newcomers last."""
        held = Counter(tenant for tenant, _ in self.taken)
        may = [
            tenant
            for tenant in TENANTS
            if self.ready(tenant)
            and (self.tenant_limit is None or held[tenant] < self.tenant_limit)
        ]
        self.turns = [tenant for tenant in self.turns if tenant in may]
        self.turns += [tenant for tenant in may if tenant not in self.turns]
        for tenant in TENANTS:
            runs = list(dict.fromkeys(one.run for one in self.ready(tenant)))
            turns = [run for run in self.turns_of[tenant] if run in runs]
            self.turns_of[tenant] = turns + [run for run in runs if run not in turns]

    def take(self, now: float) -> Entry | None:
        if not self.turns:
            return None
        tenant = self.turns.pop(0)
        run = self.turns_of[tenant].pop(0)
        ready = [one for one in self.ready(tenant) if one.run == run]
        best = min(ready, key=lambda waiting: self.rank(waiting, now))
        self.entries.remove(best)
        self.taken.append((best.tenant, best.key))
        self.turns.append(tenant)
        self.turns_of[tenant].append(run)
        self.keep_turns()
        return best

    def ahead(self, waiting: Entry, now: float) -> int:
        """Count its siblings, and its tenant's ready entries, that go before an entry."""
        ready = Counter(one.run for one in self.ready(waiting.tenant))
        own = self.rank(waiting, now)
        siblings = [one for one in self.entries if one.key == waiting.key]
        mine = {*siblings, *(one for one in self.ready(waiting.tenant) if one.run == waiting.run)}
        better = sum(self.rank(one, now) < own for one in mine)
        ready[waiting.run] = len(mine)
        taken: list[Hashable] = []
        turns = [run for run in self.turns_of[waiting.tenant] if run != waiting.run]
        place = self.turns_of[waiting.tenant]
        before = place.index(waiting.run) if waiting.run in place else len(place)
        turns.insert(before, waiting.run)
        while True:
            for run in turns:
                if run == waiting.run and taken.count(run) == better:
                    return len(taken)
                if taken.count(run) < ready[run]:
                    taken.append(run)


class Queues(RuleBasedStateMachine):
    """Machine that sends the same calls to queue and list, and compares the answers."""

    @initialize(tenant_limit=st.sampled_from([None, 1, 3]))
    def start(self, tenant_limit: int | None) -> None:
        self.told: Counter[Hashable] = Counter()
        self.queue = Queue(INTERVAL, tenant_limit, self.tell)
        self.naive = Naive(tenant_limit)
        self.now = 100.0
        self.before: list[Entry] = []

    def tell(self, parent: Parent, by: int) -> None:
        assert by
        self.told[parent.key] += by

    def push(self, waiting: Entry) -> None:
        self.queue.push(waiting)
        self.naive.entries.append(waiting)
        self.naive.keep_turns()

    # An eighth of a second adds up exactly, so the very end of an interval is tested too.
    @rule(eighths=st.integers(0, 120))
    def time_passes(self, eighths: int) -> None:
        self.now += eighths / 8

    @rule(parent=parents, priority=priorities)
    def dispatch(self, parent: str, priority: int) -> None:
        self.push(entry(parent, priority, self.now, PARENTS[parent]))

    @rule(parent=parents, priority=priorities, eighths=st.integers(0, 480))
    def restore(self, parent: str, priority: int, eighths: int) -> None:
        self.push(entry(parent, priority, self.now - eighths / 8, PARENTS[parent]))

    @rule(parent=parents)
    def wake(self, parent: str) -> None:
        self.push(entry(parent, WAKE, self.now, PARENTS[parent]))

    @precondition(lambda self: self.before)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        again = self.before.pop(data.draw(st.integers(0, len(self.before) - 1)))
        self.push(again)

    @precondition(lambda self: self.naive.entries)
    @rule(data=st.data(), keep=st.booleans())
    def discard(self, data: st.DataObject, keep: bool) -> None:
        gone = data.draw(st.sampled_from(self.naive.entries))
        assert self.queue.discard(gone)
        assert not self.queue.discard(gone)
        self.naive.entries.remove(gone)
        self.naive.keep_turns()
        if keep:
            self.before.append(gone)

    @rule(times=st.integers(1, 4))
    def take(self, times: int) -> None:
        for _ in range(times):
            assert self.queue.take(self.now) is self.naive.take(self.now)

    @precondition(lambda self: self.naive.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        done = self.naive.taken.pop(data.draw(st.integers(0, len(self.naive.taken) - 1)))
        self.queue.release(done[1])
        self.naive.keep_turns()

    @invariant()
    def counts_are_right(self) -> None:
        queue, naive = self.queue, self.naive
        assert len(queue) == len(naive.entries)
        assert queue.is_ready() == bool(naive.turns)
        assert queue.holding() == len(naive.taken)
        for tenant in TENANTS:
            own = [one.priority for one in naive.entries if one.tenant == tenant]
            assert queue.in_line_of(tenant) == len(own)
            assert queue.holding(tenant) == sum(holder == tenant for holder, _ in naive.taken)
        for parent in PARENTS:
            waiting = sum(one.key == parent for one in naive.entries)
            expected = waiting if naive.has_room(parent) else 0
            assert queue.ready(parent) == self.told[parent] == expected
            assert queue.holding_of(parent) == sum(held == parent for _, held in naive.taken)

    @invariant()
    def positions_are_what_is_ready_and_comes_first(self) -> None:
        for one in self.naive.entries[:5]:
            assert self.queue.position(one, self.now) == self.naive.ahead(one, self.now)


Queues.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
TestQueues = Queues.TestCase


@given(
    st.lists(st.tuples(st.floats(0, 1e7), priorities), min_size=1, max_size=30), st.floats(0, 200)
)
def test_ageing_equals_the_formula_exactly(pushed: list[tuple[float, int]], later: float) -> None:
    queue, naive = Queue(INTERVAL), Naive(None)
    for at, priority in pushed:
        queue.push(one := entry("bx2", priority, at))
        naive.entries.append(one)
    now = max(at for at, _ in pushed) + later
    by_rank = sorted(naive.entries, key=lambda waiting: naive.rank(waiting, now))
    assert [queue.take(now) for _ in pushed] == by_rank


@pytest.mark.parametrize(
    ("priority", "waited", "others"), [(10, 45.0, 1), (10, 44.875, 2), (6, 25.0, 1), (6, 24.875, 2)]
)
def test_priority_reaches_one_after_enough_ageing_steps(
    priority: int, waited: float, others: int
) -> None:
    queue = Queue(INTERVAL)
    old = entry(priority=priority, at=0.0)
    rivals = [entry(priority=1, at=at) for at in (-1.0, waited)][-others:]
    for one in (old, *rivals):
        queue.push(one)
    if others == 1:  # only earlier entries would still go first
        assert queue.take(waited) is old
    else:
        assert [queue.take(waited) for _ in range(3)] == [*rivals, old]


@given(
    st.lists(st.tuples(st.floats(-50, 100), priorities), max_size=60),
    st.integers(1, 10),
)
def test_after_45_s_only_tasks_enqueued_earlier_go_first(
    others: list[tuple[float, int]], priority: int
) -> None:
    queue = Queue(INTERVAL)
    queue.push(mine := entry(priority=priority, at=0.0))
    for at, other in others:
        if at < 45.0:
            queue.push(entry("ax2", other, at))
    now, ahead = 45.0, 0
    late = iter([(at, other) for at, other in others if at >= 45.0])
    while (taken := queue.take(now)) is not mine:
        assert taken is not None
        assert taken.enqueued_at <= 0.0
        ahead += 1
        if (newcomer := next(late, None)) is not None:
            queue.push(entry("ax2", newcomer[1], now))
        now += 1.0
    assert ahead <= sum(at <= 0.0 for at, _ in others)


def test_tenant_that_fills_the_queue_delays_another_by_one_take() -> None:
    for before in range(4):
        queue = Queue()
        for _ in range(100):
            queue.push(entry("ax1", priority=1))
        for _ in range(before):
            queue.take(0.0)
        queue.push(first := entry("bx1", priority=10))
        assert first in (queue.take(0.0), queue.take(0.0))


def test_tenants_take_turns_at_any_priorities() -> None:
    queue = Queue()
    for tenant in "aabbcc":
        queue.push(entry(f"{tenant}x1", priority=10 if tenant == "b" else 1))
    taken = [queue.take(0.0) for _ in range(6)]
    assert [one.tenant for one in taken if one] == list("abcabc")


def test_runs_of_a_tenant_take_turns_at_any_priorities() -> None:
    queue = Queue()
    for _ in range(100):
        queue.push(entry("ax1", priority=1, at=-60.0))
    queue.push(first := entry("ay1", priority=10))
    queue.push(urgent := entry("ay2", priority=1))
    queue.push(other := entry("bx1", priority=10))
    taken = [queue.take(0.0) for _ in range(6)]
    assert [one.run for one in taken if one] == ["ax", "bx", "ay", "ax", "ay", "ax"]
    assert (taken[1], taken[2], taken[4]) == (other, urgent, first)


def test_run_whose_parents_are_at_their_limits_has_no_turn() -> None:
    queue = Queue()
    for _ in range(3):
        queue.push(entry("ax1", limit=1))
        queue.push(entry("ay1"))
    taken = [queue.take(0.0) for _ in range(4)]
    assert [one.run for one in taken if one] == ["ax", "ay", "ay", "ay"]
    assert queue.take(0.0) is None
    queue.release("ax1")
    assert queue.take(0.0)


def test_woken_task_goes_first_but_not_over_its_parents_limit() -> None:
    queue = Queue()
    queue.push(entry("ax1", priority=1, limit=1))
    assert queue.take(0.0)
    old, woken = entry("ax2", 1, at=-1000.0), entry("ax2", WAKE, at=3.0)
    blocked = entry("ax1", WAKE, at=2.0, limit=1)
    for one in (old, woken, blocked):
        queue.push(one)
    assert queue.position(old, 3.0) == 1
    assert [queue.take(3.0) for _ in range(3)] == [woken, old, None]
    queue.release("ax1")
    assert queue.take(3.0) is blocked


def test_next_push_may_change_a_parents_limit() -> None:
    queue = Queue()
    for _ in range(3):
        queue.push(entry("ax1", limit=1))
    assert queue.take(0.0)
    assert not queue.is_ready()
    queue.push(entry("ax1", limit=2))
    assert queue.ready("ax1") == 3
    assert queue.take(0.0)
    assert queue.ready("ax1") == 0
    assert len(queue) == 2


def test_listener_may_change_the_queue() -> None:
    """Act like a polling parent: it wants its slot again once none of its tasks waits."""
    woken = entry("bx1", WAKE, limit=1)

    def tell(parent: Parent, by: int) -> None:
        if parent.key == "ax1" and not queue.ready("ax1"):
            queue.push(woken)

    queue = Queue(on_ready=tell)
    queue.push(first := entry("ax1", limit=1))
    queue.push(second := entry("ax1", limit=1))
    assert queue.take(0.0) is first
    assert queue.ready("ax1") == 0
    assert queue.ready("bx1") == 1
    assert queue.take(0.0) is woken
    queue.release("bx1")
    queue.release("ax1")
    assert queue.discard(second)
    assert queue.take(0.0) is woken


def test_misuse_is_refused_and_changes_nothing() -> None:
    queue = Queue()
    queue.push(one := entry())
    with pytest.raises(ValueError, match="only once"):
        queue.push(one)
    with pytest.raises(KeyError):
        queue.queue.release(cast(Any, one))
    assert queue.take(0.0) is one
    assert not queue.discard(one)
    assert queue.holding() == 1


class Key:
    """Key that can be looked for in memory."""


def test_no_state_is_kept_for_finished_tenants_runs_and_parents() -> None:
    queue = Queue()
    kept = []
    for _ in range(20):
        tenant, run, parent = Key(), Key(), Key()
        kept += [weakref.ref(key) for key in (tenant, run, parent)]
        entries = [Entry(tenant, run, parent, 1, priority, 0.0) for priority in (3, WAKE, 3)]
        for one in entries:
            queue.push(one)
        queue.discard(entries[0])
        for _ in range(2):
            assert queue.take(0.0)
            queue.release(parent)
        del tenant, run, parent, entries, one
    gc.collect()
    assert not any(key() for key in kept)
    assert (len(queue), queue.holding()) == (0, 0)


def lines_run(work: Callable[[], Any]) -> int:
    """Count the lines of Python that a piece of work executes: its cost on any machine."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def most_lines(blocked: int, each: int, free: int, tenants: int, runs: int = 3) -> dict[str, int]:
    """Return the most expensive of several takes, pushes and discards in a queue of this size."""
    queue = Queue()
    for parent in range(blocked):
        for number in range(each + 1):
            queue.push(Entry("a", "r", parent, 1, 1 + number % 10, 0.0))
        queue.take(0.0)
    for parent in range(blocked, blocked + free):
        queue.push(Entry("a", "r", parent, 5, 1 + parent % 10, 1.0))
    for tenant in range(tenants):
        queue.push(Entry(tenant, "r", f"of {tenant}", 1, 5, 0.0))
    for run in range(runs):
        queue.push(Entry("a", run, f"of {run}", 1, 5, 0.0))
    new = [Entry("a", "r", 0, 1, 5, 2.0) for _ in range(20)]
    room = [Entry("a", "r", "new", 20, 5, 2.0) for _ in range(20)]
    return {
        "push": max(lines_run(lambda one=one: queue.push(one)) for one in [*new, *room]),  # type: ignore[misc]
        "position": lines_run(lambda: queue.position(room[-1], 2.0)),
        "discard": max(lines_run(lambda one=one: queue.discard(one)) for one in [*new, *room]),  # type: ignore[misc]
        "block": max(lines_run(lambda: queue.take(30.0)) for _ in range(20)),
        "release": lines_run(lambda: queue.release(0)),
    }


@pytest.mark.parametrize(
    "full",
    [
        {"blocked": 200, "each": 20, "free": 50, "tenants": 5},
        {"blocked": 5, "each": 3000, "free": 50, "tenants": 5},
        {"blocked": 5, "each": 20, "free": 50, "tenants": 2000},
        {"blocked": 5, "each": 20, "free": 50, "tenants": 5, "runs": 2000},
    ],
)
def test_cost_does_not_grow_with_blocked_or_foreign_entries(full: dict[str, int]) -> None:
    few = most_lines(blocked=5, each=20, free=50, tenants=5)
    many = most_lines(**full)
    if "runs" in full:
        del many["position"]  # scans the runs that take turns
    for what, lines in many.items():
        assert lines <= few[what] + 120, what  # a split of a sorted list's chunk, at most
