"""Circuit breakers: a key that fails repeatedly is blocked, then tried with one probe task."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from bottega.subagents.breaker import Breakers as RealBreakers
from bottega.subagents.handle import BreakerKey, SubagentHandle, SubagentStatus
from bottega.subagents.limits import SchedulerOptions
from bottega.subagents.telemetry import Totals
from tests.examples import examples

OPTIONS = SchedulerOptions(failure_threshold=3, monitor_window=60.0, reset_timeout=30.0)
RUN = UUID(int=1)


class OpenBreaker(NamedTuple):
    """A breaker that is not closed: agent, state, failures, and seconds until the next try."""

    key: str
    state: str
    failures: int
    retry_after: float


@dataclass(eq=False)
class Task:
    """The part of a task that breakers need."""

    name: Hashable
    breaker: BreakerKey
    parent: Any
    status: SubagentStatus = SubagentStatus.QUEUED
    error_code: str | None = None
    suspended: bool = False
    was_limited: bool = False
    attempt: int = 1


class Breakers:
    """Breakers of agents ``key`` in one run, with any values as their tasks."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.released: list[Any] = []
        self.opened = 0
        self.tasks: dict[tuple[Hashable, Hashable], Any] = {}
        self.breakers = RealBreakers(
            options, Totals(), call_at=lambda *about: None, release=self.released.append
        )

    def on_event(self, handle: SubagentHandle, event: str, data: dict[str, Any]) -> None:
        self.opened += event == "circuit_opened"

    def task(self, key: Hashable, task: Hashable) -> Any:
        breaker, parent = BreakerKey(None, RUN, str(key)), SimpleNamespace(listener=self)
        made = Task(task, breaker, parent)
        return self.tasks.setdefault((key, task), made)

    def refusal(self, key: Hashable, now: float) -> float | None:
        return self.breakers.refusal(BreakerKey(None, RUN, str(key)), now)

    def admit(self, key: Hashable, task: Hashable, now: float) -> bool:
        return self.breakers.admit(self.task(key, task), now)

    def end(self, key: Hashable, task: Hashable, now: float, status: SubagentStatus) -> list[Any]:
        """End a task; return the tasks that this releases."""
        ended = self.task(key, task)
        ended.status = status
        self.released.clear()
        self.breakers.ended(ended, now)
        return [handle.name for handle in self.released]

    def failed(self, key: Hashable, task: Hashable, now: float) -> bool:
        """Return whether a breaker opened."""
        before = self.opened
        assert not self.end(key, task, now, SubagentStatus.FAILED)
        return self.opened > before

    def succeeded(self, key: Hashable, task: Hashable, now: float) -> list[Any]:
        return self.end(key, task, now, SubagentStatus.COMPLETED)

    def dropped(self, key: Hashable, task: Hashable, now: float) -> Any:
        return next(iter(self.end(key, task, now, SubagentStatus.CANCELLED)), None)

    def next_probe(self, key: Hashable, now: float) -> Any:
        """Return the probe that a timer starts."""
        self.released.clear()
        if breaker := self.breakers._breakers.get(BreakerKey(None, RUN, str(key))):
            self.breakers._start_probe(breaker, now)
        return next((handle.name for handle in self.released), None)

    def open(self, now: float) -> list[OpenBreaker]:
        shown = [about for _, about in self.breakers.open(now)]
        return [
            OpenBreaker(
                each["agent"], each["state"], each["failures"], each["retry_after_ms"] / 1000
            )
            for each in shown
        ]

    def forget(self, now: float) -> None:
        self.breakers.forget(now)


def opened(*queued: str, key: Hashable = "k") -> Breakers:
    """Return breakers of which one opened at second 0, while some tasks were queued."""
    breakers = Breakers(OPTIONS)
    for task in queued:
        assert breakers.admit(key, task, 0.0)
    assert [breakers.failed(key, f"bad {n}", 0.0) for n in range(3)] == [False, False, True]
    assert not any(breakers.admit(key, task, 0.0) for task in queued)
    return breakers


def test_third_failure_opens_and_refuses_dispatch_until_the_reset_time() -> None:
    breakers = Breakers(OPTIONS)
    assert breakers.refusal("k", 0.0) is None
    assert [breakers.failed("k", n, float(n)) for n in range(3)] == [False, False, True]
    assert breakers.refusal("k", 2.0) == 30.0
    assert breakers.refusal("k", 31.5) == 0.5
    assert breakers.next_probe("k", 31.5) is None
    assert breakers.refusal("k", 32.0) is None


@pytest.mark.parametrize(("third", "opens"), [(60.0, True), (60.125, False)])
def test_failures_older_than_the_window_do_not_count(third: float, opens: bool) -> None:
    breakers = Breakers(OPTIONS)
    assert not breakers.failed("k", 1, 0.0)
    assert not breakers.failed("k", 2, 30.0)
    assert breakers.failed("k", 3, third) is opens


def test_success_between_failures_does_not_undo_them() -> None:
    breakers = Breakers(OPTIONS)
    breakers.failed("k", 1, 0.0)
    breakers.failed("k", 2, 1.0)
    assert not breakers.succeeded("k", 3, 0.0)
    assert breakers.failed("k", 4, 2.0)


@pytest.mark.parametrize(("well", "opens"), [(3, True), (4, False)])
def test_breaker_opens_when_half_of_the_recent_tasks_failed(well: int, opens: bool) -> None:
    breakers = Breakers(OPTIONS)
    breakers.succeeded("k", "long ago", -100.0)
    for number in range(well):
        assert not breakers.succeeded("k", f"good {number}", 0.0)
    assert not breakers.failed("k", 1, 0.0)
    assert not breakers.failed("k", 2, 0.0)
    assert breakers.failed("k", 3, 0.0) is opens


def test_dispatch_before_the_timer_ran_does_not_overtake() -> None:
    breakers = opened("q0")
    assert breakers.refusal("k", 30.0) == 30.0
    assert not breakers.admit("k", "late", 30.0)
    assert breakers.next_probe("k", 30.0) == "q0"


def test_tasks_that_ran_when_it_opened_do_not_change_it() -> None:
    breakers = opened("q0")
    assert not breakers.succeeded("k", "ran", 0.0)
    assert not breakers.failed("k", "ran too", 10.0)
    assert breakers.next_probe("k", 29.5) is None
    breakers.next_probe("k", 30.0)
    assert not breakers.succeeded("k", "ran long", 0.0)
    assert not breakers.failed("k", "ran longer", 31.0)
    assert breakers.refusal("k", 31.0) == 30.0
    assert breakers.succeeded("k", "q0", 0.0) == []
    assert breakers.refusal("k", 31.0) is None


def test_held_task_that_ended_is_never_the_probe() -> None:
    breakers = opened("q0", "q1", "q2")
    assert not breakers.failed("k", "q0", 1.0)
    assert not breakers.succeeded("k", "q1", 0.0)
    assert breakers.next_probe("k", 30.0) == "q2"


def test_three_failures_after_closing_open_again_and_hold_waiting_tasks() -> None:
    breakers = opened("q0", "q1")
    breakers.next_probe("k", 30.0)
    assert breakers.succeeded("k", "q0", 0.0) == ["q1"]
    assert [breakers.failed("k", n, 31.0) for n in range(3)] == [False, False, True]
    assert not breakers.admit("k", "q2", 31.0)
    assert breakers.next_probe("k", 61.0) == "q2"


def test_open_breakers_are_listed() -> None:
    breakers = opened("q0", key="with")
    for number in range(3):
        breakers.failed("without", number, 10.0)
    breakers.failed("closed", 1, 10.0)
    assert breakers.open(12.0) == [
        OpenBreaker("with", "open", 3, 18.0),
        OpenBreaker("without", "open", 3, 28.0),
    ]
    assert breakers.next_probe("with", 40.0) == "q0"
    assert breakers.open(40.0) == [
        OpenBreaker("with", "half_open", 3, 30.0),
        OpenBreaker("without", "half_open", 3, 0.0),
    ]


def is_known(breakers: Breakers, key: Hashable) -> bool:
    """Return whether a breaker has any state, from the number of failures that open it."""
    return breakers.failed(key, "one", 0.0) or breakers.failed(key, "two", 0.0)


def test_closed_breakers_without_failures_are_forgotten() -> None:
    breakers = Breakers(replace(OPTIONS, monitor_window=1e9))
    breakers.failed("k", 1, 0.0)
    breakers.forget(0.0)
    assert is_known(breakers, "k")
    breakers = Breakers(OPTIONS)
    breakers.failed("k", 1, -61.0)
    breakers.forget(0.0)
    assert not is_known(breakers, "k")


def test_unused_open_breaker_is_forgotten_but_not_while_it_has_tasks() -> None:
    breakers = opened("q0")
    breakers.forget(1000.0)  # the reset time has passed, but no call noticed yet
    assert breakers.next_probe("k", 1000.0) == "q0"
    for now in (3000.0, 5000.0):  # a long probe
        breakers.forget(now)
        assert breakers.refusal("k", now) == 30.0
    breakers.dropped("k", "q0", 5000.0)
    breakers.forget(5000.0)
    assert breakers.admit("k", "another", 5000.0)
    breakers.dropped("k", "another", 6000.0)
    breakers.forget(6060.0)
    assert [one.state for one in breakers.open(6060.0)] == ["half_open"]
    breakers.forget(6060.5)
    assert breakers.open(6060.5) == []


KEYS = "xy"
keys = st.sampled_from(KEYS)


class Tasks(RuleBasedStateMachine):
    """Tasks of two keys and everything that may happen to them, reported to the breakers.

    ``ready`` are the tasks that were let through, ``held`` the others.
    """

    @initialize(failing=st.booleans(), queued=st.integers(0, 6))
    def start(self, failing: bool, queued: int) -> None:
        self.breakers = Breakers(OPTIONS)
        self.now = 0.0
        self.made = 0
        self.ready: dict[str, list[int]] = {key: [] for key in KEYS}
        self.held: dict[str, list[int]] = {key: [] for key in KEYS}
        self.probe: dict[str, int | None] = dict.fromkeys(KEYS)
        self.opened_at: dict[str, float | None] = dict.fromkeys(KEYS)
        self.failures: dict[str, list[float]] = {key: [] for key in KEYS}
        self.successes: dict[str, list[float]] = {key: [] for key in KEYS}
        for _ in range(3 + queued if failing else 0):
            self.dispatch("x", restored=False)
        for task in self.ready["x"][:3]:
            self.ready["x"].remove(task)
            self.has_failed("x", task, was_probe=False)

    def let_go(self, key: str, task: Any) -> None:
        """Let one held task go, as the probe."""
        opened_at = self.opened_at[key]
        assert opened_at is not None
        assert self.now >= opened_at + OPTIONS.reset_timeout
        assert self.probe[key] is None
        assert self.held[key].pop(0) == task
        self.ready[key].append(task)
        self.probe[key] = task

    @rule(seconds=st.sampled_from([0.5, 7.0, 15.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def timer(self) -> None:
        for key in KEYS:
            if (task := self.breakers.next_probe(key, self.now)) is not None:
                self.let_go(key, task)
            opened_at = self.opened_at[key]
            if opened_at is not None and self.now >= opened_at + OPTIONS.reset_timeout:
                assert self.probe[key] is not None or not self.held[key]

    @rule(key=keys, restored=st.booleans())
    def dispatch(self, key: str, restored: bool) -> None:
        refusal = self.breakers.refusal(key, self.now)
        opened_at = self.opened_at[key]
        if opened_at is None:
            assert refusal is None
        elif self.now < opened_at + OPTIONS.reset_timeout:
            assert refusal == opened_at + OPTIONS.reset_timeout - self.now
        else:
            busy = self.probe[key] is not None or self.held[key]
            assert refusal == (OPTIONS.reset_timeout if busy else None)
        if refusal is not None and not restored:
            return
        self.made += 1
        assert self.breakers.admit(key, self.made, self.now) is (refusal is None)
        if refusal is not None:
            self.held[key].append(self.made)
            return
        self.ready[key].append(self.made)
        if opened_at is not None:
            self.probe[key] = self.made

    @precondition(lambda self: any(self.ready.values()))
    @rule(data=st.data(), ending=st.sampled_from(["failed", "failed", "succeeded", "dropped"]))
    def end(self, data: st.DataObject, ending: str) -> None:
        key = data.draw(st.sampled_from([key for key in KEYS if self.ready[key]]))
        task = data.draw(st.sampled_from(self.ready[key]))
        self.ready[key].remove(task)
        was_probe = self.probe[key] == task
        if was_probe:
            self.probe[key] = None
        getattr(self, f"has_{ending}")(key, task, was_probe)

    def has_failed(self, key: str, task: int, was_probe: bool) -> None:
        closed = self.opened_at[key] is None
        if closed:
            self.failures[key].append(self.now)
        recent = [at for at in self.failures[key] if self.now - at <= OPTIONS.monitor_window]
        well = [at for at in self.successes[key] if self.now - at <= OPTIONS.monitor_window]
        ended = len(recent) + len(well)
        enough = ended >= OPTIONS.failure_threshold and 2 * len(recent) >= ended
        opens = was_probe or (closed and enough)
        assert self.breakers.failed(key, task, self.now) is opens
        if opens:
            self.opened_at[key] = self.now
            self.failures[key], self.successes[key] = [], []
        if opens and closed:  # some of those let through have not run yet
            queued = self.ready[key][::2]
            for one in queued:
                assert not self.breakers.admit(key, one, self.now)
                self.ready[key].remove(one)
            self.held[key] = queued

    def has_succeeded(self, key: str, task: int, was_probe: bool) -> None:
        held = self.held[key] if was_probe else []
        assert self.breakers.succeeded(key, task, self.now) == held
        if self.opened_at[key] is None:
            self.successes[key].append(self.now)
        if was_probe:
            self.opened_at[key] = None
            self.ready[key] += held
            self.held[key] = []

    def has_dropped(self, key: str, task: int, was_probe: bool) -> None:
        after = self.breakers.dropped(key, task, self.now)
        if after is not None:
            assert was_probe
            self.let_go(key, after)
        elif was_probe:
            assert not self.held[key]

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def cancel_one_that_is_held(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key in KEYS if self.held[key]]))
        task = data.draw(st.sampled_from(self.held[key]))
        assert self.breakers.dropped(key, task, self.now) is None
        self.held[key].remove(task)

    @precondition(lambda self: any(self.held.values()))
    @rule(key=keys)
    def asking_again_changes_nothing(self, key: str) -> None:
        for task in self.held[key]:
            assert not self.breakers.admit(key, task, self.now)
        if (probe := self.probe[key]) is not None:
            assert self.breakers.admit(key, probe, self.now)

    @rule()
    def tidy(self) -> None:
        self.breakers.forget(self.now)
        shown = {one.key for one in self.breakers.open(self.now)}
        for key in KEYS:
            if self.opened_at[key] is not None and key not in shown:
                assert self.probe[key] is None
                assert not self.held[key]
                self.opened_at[key] = None  # no task asked for it

    @invariant()
    def what_is_held_back_is_known_and_what_is_open_is_shown(self) -> None:
        for key in KEYS:
            assert self.opened_at[key] is not None or not self.held[key]
        shown = {one.key for one in self.breakers.open(self.now)}
        assert shown == {key for key in KEYS if self.opened_at[key] is not None}

    def teardown(self) -> None:
        """Check that in the end every held task goes: probe after probe fails."""
        for _ in range(self.made + 1):
            self.now += OPTIONS.reset_timeout
            self.timer()
            for key in KEYS:
                if (probe := self.probe[key]) is not None:
                    self.ready[key].remove(probe)
                    self.probe[key] = None
                    self.has_failed(key, probe, was_probe=True)
        assert not any(self.held.values())


Tasks.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=50, deadline=None
)
TestTasks = Tasks.TestCase
