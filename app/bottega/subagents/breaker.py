"""Circuit breakers: hold back kinds of task that keep failing. Pure.

A breaker is closed (tasks start), open (no task starts until its reset time), or half-open (one
task starts, the probe; its end decides). It opens when at least half of the recent tasks failed,
if there are enough of them.
"""

import json
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal
from uuid import UUID

from bottega.subagents.limits import SchedulerOptions

_MOST_ENDS = 1000
"""Number of failures, and of successes, that a breaker remembers."""


@lru_cache(maxsize=128)  # most dispatches repeat a recent kind
def kind_of(agent: str | None, instructions: str | None) -> str:
    """Return a short hash of a task's agent and instructions: its kind."""
    return blake2b(json.dumps([agent, instructions]).encode(), digest_size=8).hexdigest()


BreakerKey = tuple[UUID | None, str, str]
"""(tenant, scope: a model or a run, kind of task)."""


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """A breaker that is not closed.

    Attributes:
        failures: number of recently failed tasks and probes.
        retry_after: seconds until a dispatch may be tried again; 0: now.
    """

    key: Any
    state: Literal["open", "half_open"]
    failures: int
    retry_after: float


@dataclass(slots=True, eq=False)
class _Breaker:
    """One breaker. Times are in seconds.

    Attributes:
        failures, successes: end times of recent tasks.
        retry_at: its reset time; ``None``: it is closed.
        probe: the task whose end decides.
        held: tasks held back, in order.
        idle_since: first time it was seen half-open without a probe.
    """

    failures: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))
    successes: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))
    retry_at: float | None = None
    probe: Hashable | None = None
    held: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    idle_since: float | None = None

    def next_probe(self) -> Hashable | None:
        """Make the first held task the probe and return it; ``None`` if none is held."""
        self.probe = self.held.popitem(last=False)[0] if self.held else None
        return self.probe


class Breakers:
    """A set of breakers by key.

    Any hashable value except ``None`` may stand for a task. Methods that take a key cost O(1).
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._breakers: dict[Hashable, _Breaker] = {}
        self._resting: OrderedDict[Hashable, float] = OrderedDict()  # reset times, ascending

    def refusal(self, key: Hashable, now: float) -> float | None:
        """Return the seconds until a dispatch may be tried again; ``None``: it may start now."""
        breaker = self._breakers.get(key)
        if breaker is None or breaker.retry_at is None:
            return None
        if breaker.probe is None:
            if now < breaker.retry_at:
                return breaker.retry_at - now
            if not breaker.held:
                return None
        return self._options.reset_timeout

    def admit(self, key: Hashable, task: Hashable, now: float) -> bool:
        """Return true if a queued task may start; otherwise hold it back, after the others.

        The first task after the reset time becomes the probe, unless others are held. Idempotent.
        """
        breaker = self._breakers.get(key)
        if breaker is None or breaker.retry_at is None or breaker.probe == task:
            return True
        if self.refusal(key, now) is None:
            breaker.probe = task
            breaker.idle_since = None
            self._resting.pop(key, None)
            return True
        breaker.held.setdefault(task)
        return False

    def failed(self, key: Hashable, task: Hashable, now: float) -> bool:
        """Record a task's failure; return true if the breaker opened now, for the first time or
        again.

        A breaker that opens for the first time holds no task yet: call :meth:`admit` for the queued
        tasks of the kind, in order. While it is open, only the probe's failure counts.
        """
        breaker = self._breakers.setdefault(key, _Breaker())
        breaker.held.pop(task, None)
        was_closed = breaker.retry_at is None
        if not was_closed and breaker.probe != task:
            return False
        breaker.failures.append(now)
        self._drop_old_ends(breaker, now)
        if was_closed:
            ended = len(breaker.failures) + len(breaker.successes)
            if ended < self._options.failure_threshold or 2 * len(breaker.failures) < ended:
                return False
            breaker.held.clear()
        breaker.probe = None
        breaker.retry_at = self._resting[key] = now + self._options.reset_timeout
        return True

    def succeeded(self, key: Hashable, task: Hashable, now: float) -> bool:
        """Record a task's success; return true if it was the probe: the breaker is closed now.

        All tasks in :meth:`held` may then start. They stay listed there until the breaker is
        forgotten or opens again.
        """
        breaker = self._breakers.setdefault(key, _Breaker())
        breaker.held.pop(task, None)
        if breaker.retry_at is None:
            breaker.successes.append(now)
            self._drop_old_ends(breaker, now)
        if breaker.probe is None or breaker.probe != task:
            return False
        breaker.probe = breaker.retry_at = None
        breaker.failures.clear()
        breaker.successes.clear()
        return True

    def dropped(self, key: Hashable, task: Hashable) -> Hashable | None:
        """Record a task's end that is neither success nor failure: cancelled, or out of budget.

        Returns:
            If it was the probe, the held task to start as the next probe. If no task is held, the
            next dispatch becomes the probe.
        """
        breaker = self._breakers.get(key)
        if breaker is None:
            return None
        breaker.held.pop(task, None)
        return breaker.next_probe() if breaker.probe == task else None

    def due(self, now: float) -> list[tuple[Any, Hashable]]:
        """Return the breakers whose reset time has come, each with the held task to start as probe.

        Leaves out breakers without held tasks: their next dispatch becomes the probe.
        """
        probes = []
        while self._resting and next(iter(self._resting.values())) <= now:
            key, _ = self._resting.popitem(last=False)
            if (probe := self._breakers[key].next_probe()) is not None:
                probes.append((key, probe))
        return probes

    def next_due(self) -> float | None:
        """Return the next reset time; ``None`` if no breaker waits for one."""
        return next(iter(self._resting.values()), None)

    def failures(self, key: Hashable) -> int:
        """Count the failures that a breaker remembers."""
        return len(self._breakers[key].failures) if key in self._breakers else 0

    def held(self, key: Hashable) -> list[Any]:
        """Return the tasks that a breaker holds back, in order."""
        return list(self._breakers[key].held) if key in self._breakers else []

    def open(self, now: float) -> list[OpenBreaker]:
        """Return the breakers that are not closed."""
        return [
            OpenBreaker(
                key,
                "open" if key in self._resting else "half_open",
                len(breaker.failures),
                self.refusal(key, now) or 0.0,
            )
            for key, breaker in self._breakers.items()
            if breaker.retry_at is not None
        ]

    def forget(self, now: float) -> None:
        """Forget closed breakers without recent ends.

        Forgets half-open breakers without a probe for ``monitor_window``, too: a kind that is never
        dispatched again would otherwise stay for ever.
        """
        for key, breaker in list(self._breakers.items()):
            if self._is_over(key, breaker, now):
                del self._breakers[key]

    def _is_over(self, key: Hashable, breaker: _Breaker, now: float) -> bool:
        if breaker.retry_at is None:
            self._drop_old_ends(breaker, now)
            return not breaker.failures and not breaker.successes
        if key in self._resting or breaker.probe is not None:
            return False
        if breaker.idle_since is None:
            breaker.idle_since = now
        return now - breaker.idle_since > self._options.monitor_window

    def _drop_old_ends(self, breaker: _Breaker, now: float) -> None:
        for ends in (breaker.failures, breaker.successes):
            while ends and now - ends[0] > self._options.monitor_window:
                ends.popleft()
