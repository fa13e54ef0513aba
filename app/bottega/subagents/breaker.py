"""Circuit breakers, which hold back an agent's tasks in a run while such tasks keep failing.

A breaker is closed (tasks start), open (no task starts until its reset time), or half-open (one
task, the probe, starts, and its end closes or opens the breaker). :class:`FailureRates` decides
when a breaker opens. :class:`Breakers` decides which tasks may start, and is pure.
:class:`BreakerSet` reports the ends of tasks to ``Breakers``, and starts the tasks that it
releases.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from bottega.failure_rates import FailureRates
from bottega.subagents.handle import (
    BreakerKey,
    DispatchParams,
    Parent,
    SubagentHandle,
    SubagentStatus,
)
from bottega.subagents.limits import SchedulerOptions
from bottega.subagents.telemetry import Telemetry


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
    """A breaker that is not closed.

    Attributes:
        retry_at: time in seconds from which a probe may start; later: the time from which the
            breaker has had no probe.
        probe: the task whose end closes or opens the breaker.
        held: tasks that are held back, in order.
    """

    failures: int
    retry_at: float = 0.0
    probe: Hashable | None = None
    held: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)


class Breakers:
    """A set of breakers by key.

    Any hashable value except ``None`` may stand for a task. Methods that take a key cost O(1).
    """

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._rates = FailureRates(options.failure_threshold, options.monitor_window)
        self._breakers: dict[Hashable, _Breaker] = {}

    def refusal(self, key: Hashable, now: float) -> float | None:
        """Return the seconds until a dispatch may be tried again; ``None``: tasks may start now."""
        breaker = self._breakers.get(key)
        if breaker is None:
            return None
        if breaker.probe is None:
            if now < breaker.retry_at:
                return breaker.retry_at - now
            if not breaker.held:
                return None
        return self._options.reset_timeout

    def admit(self, key: Hashable, task: Hashable, now: float) -> bool:
        """Return true if a queued task may start; otherwise hold it back behind other held tasks.

        The first task after the reset time becomes the probe, unless tasks are held. Idempotent.
        """
        breaker = self._breakers.get(key)
        if breaker is None or breaker.probe == task:
            return True
        if self.refusal(key, now) is None:
            breaker.probe = task
            return True
        breaker.held.setdefault(task)
        return False

    def failed(self, key: Hashable, task: Hashable, now: float) -> bool:
        """Record a task's failure; return true if the breaker has opened or reopened now.

        A breaker that opens for the first time holds no task yet, so call :meth:`admit` for the
        agent's queued tasks, in order. While a breaker is open, only the probe's failure counts.
        """
        breaker = self._breakers.get(key)
        if breaker is None:
            if not self._rates.failed(key, now):
                return False
            breaker = self._breakers[key] = _Breaker(self._rates.failures(key))
            self._rates.forget(key)
        else:
            breaker.held.pop(task, None)
            if breaker.probe != task:
                return False
            breaker.failures += 1
        breaker.probe = None
        breaker.retry_at = now + self._options.reset_timeout
        return True

    def succeeded(self, key: Hashable, task: Hashable, now: float) -> list[Any]:
        """Record a task's success; return the held tasks that may start, in order.

        If the task was the probe, the breaker is closed now and holds no tasks any more.
        """
        breaker = self._breakers.get(key)
        if breaker is None:
            self._rates.succeeded(key, now)
            return []
        breaker.held.pop(task, None)
        if breaker.probe != task:
            return []
        del self._breakers[key]
        return list(breaker.held)

    def dropped(self, key: Hashable, task: Hashable, now: float) -> Any | None:
        """Record a task's end that is neither success nor failure: cancelled, or out of budget.

        Returns:
            The held task to start as the next probe, if the ended task was the probe. If no task is
            held, the next dispatch becomes the probe.
        """
        breaker = self._breakers.get(key)
        if breaker is None:
            return None
        breaker.held.pop(task, None)
        if breaker.probe != task:
            return None
        breaker.probe, breaker.retry_at = None, now
        return self.next_probe(key, now)

    def next_probe(self, key: Hashable, now: float) -> Any | None:
        """Return the held task to start as probe, if the breaker's reset time has come."""
        breaker = self._breakers.get(key)
        if breaker is None or breaker.probe is not None or now < breaker.retry_at:
            return None
        breaker.probe = breaker.held.popitem(last=False)[0] if breaker.held else None
        return breaker.probe

    def failures(self, key: Hashable) -> int:
        """Count the failures of a breaker that is not closed."""
        return self._breakers[key].failures if key in self._breakers else 0

    def open(self, now: float) -> list[OpenBreaker]:
        """Return the breakers that are not closed."""
        return [
            OpenBreaker(
                key,
                "open" if breaker.probe is None and now < breaker.retry_at else "half_open",
                breaker.failures,
                self.refusal(key, now) or 0.0,
            )
            for key, breaker in self._breakers.items()
        ]

    def forget(self, now: float) -> None:
        """Forget old ends of tasks, and breakers that nobody has asked for ``monitor_window``.

        Otherwise the breaker of an agent that is never dispatched again would stay for ever.
        """
        self._rates.tidy(now)
        for key, breaker in list(self._breakers.items()):
            is_idle = breaker.probe is None and not breaker.held
            if is_idle and now - breaker.retry_at > self._options.monitor_window:
                del self._breakers[key]


Move = Callable[[SubagentHandle], None]

_NOT_ITS_OWN = frozenset(
    {
        *("budget_exhausted", "egress_forbidden", "model_bad_request", "model_context_too_long"),
        *("model_forbidden", "model_not_found", "model_quota_exhausted", "model_rate_limited"),
        "model_unauthorized",
    }
)
"""Codes of failures that a budget, or a model server's refusal of a request, caused."""


def breaker_key(parent: Parent, params: DispatchParams) -> BreakerKey | None:
    """Return the key of a task's breaker.

    Anonymous tasks have no breaker, because they have no agent in common.
    """
    if not params.named:
        return None
    return BreakerKey(parent.tenant_id, parent.run_id, params.agent)


def is_own_fault(handle: SubagentHandle) -> bool:
    """Check if the end of a task is a failure that its breaker counts.

    A breaker does not count cancellations, timeouts, exhausted budgets, limits of the model's
    server and requests that the server refuses. It counts all other failures, also
    ``max_iterations`` and refused content.
    """
    return (
        handle.status is SubagentStatus.FAILED
        and not handle.suspended
        and not handle.was_limited
        and handle.error_code not in _NOT_ITS_OWN
    )


class BreakerSet:
    """Reports tasks' ends to the breakers, and released tasks to the scheduler.

    Args:
        queued_of: returns the queued tasks that share a breaker, in the order of their dispatch.
        hold: takes a queued task out of the queue.
        release: queues a task again.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        queued_of: Callable[[BreakerKey], Iterable[SubagentHandle]],
        telemetry: Telemetry,
        *,
        hold: Move,
        release: Move,
    ) -> None:
        self.breakers = Breakers(options)
        self._options = options
        self._queued_of = queued_of
        self._telemetry = telemetry
        self._hold = hold
        self._release = release

    def refusal(self, key: BreakerKey | None) -> float | None:
        """Return the seconds until the breaker lets a dispatch through; ``None``: now."""
        return self.breakers.refusal(key, _now())

    def enqueued(self, handle: SubagentHandle) -> None:
        """Ask the breaker about a newly queued task; the breaker may hold the task back."""
        if handle.breaker is not None:
            handle.is_held = not self.breakers.admit(handle.breaker, handle, _now())

    def ended(self, handle: SubagentHandle) -> None:
        """Report a finished or suspended task to its breaker; start tasks that this releases."""
        if (key := handle.breaker) is None:
            return
        if handle.status is SubagentStatus.COMPLETED:
            self._let_go(self.breakers.succeeded(key, handle, _now()))
        elif not is_own_fault(handle):
            if (probe := self.breakers.dropped(key, handle, _now())) is not None:
                self._let_go([probe])
        elif self.breakers.failed(key, handle, now := _now()):
            self._opened(key, handle, now + self._options.reset_timeout)

    def open(self) -> list[tuple[UUID | None, dict[str, Any]]]:
        """Return the breakers that are not closed, as (tenant, JSON description)."""
        return [
            (
                breaker.key.tenant_id,
                {
                    "run_id": str(breaker.key.run_id),
                    "agent": breaker.key.agent,
                    "state": breaker.state,
                    "failures": breaker.failures,
                    "retry_after_ms": round(breaker.retry_after * 1000),
                },
            )
            for breaker in self.breakers.open(_now())
        ]

    def forget(self) -> None:
        self.breakers.forget(_now())

    def _opened(self, key: BreakerKey, handle: SubagentHandle, retry_at: float) -> None:
        """Hold back the agent's queued tasks; they stay in the state ``queued``."""
        data = {
            "attempt": handle.attempt,
            "failures": self.breakers.failures(key),
            "retry_after_ms": round(self._options.reset_timeout * 1000),
        }
        self._telemetry.count("subagent.circuit_breaker.open")
        handle.parent.listener.on_event(handle, "circuit_opened", data)
        for other in self._queued_of(key):
            if not self.breakers.admit(key, other, _now()):
                other.is_held = True
                self._hold(other)
        asyncio.get_running_loop().call_at(retry_at, self._due, key, retry_at)

    def _due(self, key: BreakerKey, retry_at: float) -> None:
        """Start a probe at the reset time, unless the breaker has closed or opened meanwhile."""
        if (probe := self.breakers.next_probe(key, retry_at)) is not None:
            self._let_go([probe])

    def _let_go(self, handles: Iterable[Any]) -> None:
        for handle in handles:
            handle.is_held = False
            self._release(handle)


def _now() -> float:
    return asyncio.get_running_loop().time()
