"""Circuit breakers: kinds of task that keep failing are held back a while (spec page 3, S8). Pure.

A breaker is closed (tasks go through), open (none does until its reset time), or half-open (one
does, the probe, whose end decides). It opens when at least half of enough tasks failed lately.
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
"""Ends of tasks that a breaker remembers, of either sort."""


@lru_cache(maxsize=128)  # most dispatches are of a kind that was dispatched a moment ago
def kind_of(agent: str | None, instructions: str | None) -> str:
    """What tasks of the same agent with the same instructions have in common: a short hash."""
    return blake2b(json.dumps([agent, instructions]).encode(), digest_size=8).hexdigest()


BreakerKey = tuple[UUID | None, str, str]
"""Tenant, what its tasks have in common (a model, or a run), and their kind."""


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """A breaker that is not closed.

    Attributes:
        failures: failed tasks and probes lately.
        retry_after: seconds until a dispatch may be tried again; 0: now.
    """

    key: Any
    state: Literal["open", "half_open"]
    failures: int
    retry_after: float


@dataclass(slots=True, eq=False)
class _Breaker:
    """
    Attributes:
        failures, successes: of the latest tasks that ended, when, in seconds.
        retry_at: its reset time; ``None``: it is closed.
        probe: the task whose end decides.
        held: tasks that are held back, in order.
        idle_since: when it was first seen to wait for a probe that did not come.
    """

    failures: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))
    successes: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))
    retry_at: float | None = None
    probe: Hashable | None = None
    held: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)
    idle_since: float | None = None

    def next_probe(self) -> Hashable | None:
        """Make the first of those held back the probe, if there is one."""
        self.probe = self.held.popitem(last=False)[0] if self.held else None
        return self.probe


class Breakers:
    """Breakers, each under a key.

    A task is told of by any hashable value but ``None``. What does not look at all keys costs
    O(1).
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._breakers: dict[Hashable, _Breaker] = {}
        self._resting: OrderedDict[Hashable, float] = OrderedDict()  # until when; first come first

    def refusal(self, key: Hashable, now: float) -> float | None:
        """Seconds until a dispatch may be tried again; ``None``: it is let in."""
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
        """Whether a task that is enqueued is ready; else it is held back, behind the others.

        The first after the reset time becomes the probe, unless others are held back. To ask again
        changes nothing.
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
        """A task failed or timed out. ``True``: its breaker opened just now, or again.

        When it opens first, nobody is held back yet: the queued tasks of the kind are to be
        admitted anew, in order. While it is open, only the probe's failure counts.
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
        """A task completed. ``True``: it was the probe, and its breaker is closed.

        All that :meth:`held` names then may go; it names them until the breaker is forgotten or
        opens again.
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
        """A task was cancelled, or had no budget left: it says nothing of its kind.

        Returns:
            The task to release in its place, as the probe, if it was the probe and others are held
            back. If none is, the next dispatch is the probe.
        """
        breaker = self._breakers.get(key)
        if breaker is None:
            return None
        breaker.held.pop(task, None)
        return breaker.next_probe() if breaker.probe == task else None

    def due(self, now: float) -> list[tuple[Any, Hashable]]:
        """Breakers whose reset time has come and the task to release for each, as its probe.

        Those that hold none back are not named: their next dispatch is the probe.
        """
        probes = []
        while self._resting and next(iter(self._resting.values())) <= now:
            key, _ = self._resting.popitem(last=False)
            if (probe := self._breakers[key].next_probe()) is not None:
                probes.append((key, probe))
        return probes

    def next_due(self) -> float | None:
        """When :meth:`due` will have something to do; ``None``: not as things are."""
        return next(iter(self._resting.values()), None)

    def failures(self, key: Hashable) -> int:
        """Count the failures that it remembers."""
        return len(self._breakers[key].failures) if key in self._breakers else 0

    def held(self, key: Hashable) -> list[Any]:
        """The tasks that are held back, in order."""
        return list(self._breakers[key].held) if key in self._breakers else []

    def open(self, now: float) -> list[OpenBreaker]:
        """All that are not closed."""
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
        """Forget the breakers that are closed and clean.

        Those as well that have waited for a probe for as long as failures count: a kind that nobody
        asks for any more would be remembered for ever.
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
