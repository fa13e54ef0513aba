"""Connection between the circuit breakers and the scheduler."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from bottega.subagents.breaker import BreakerKey, Breakers
from bottega.subagents.handle import DispatchParams, Parent, SubagentHandle
from bottega.subagents.limits import SchedulerOptions
from bottega.subagents.quotas import TaskCounts
from bottega.subagents.states import SubagentStatus
from bottega.subagents.telemetry import Telemetry

Move = Callable[[SubagentHandle], None]

_NOT_ITS_OWN = frozenset(
    {
        *("budget_exhausted", "egress_forbidden", "model_bad_request", "model_context_too_long"),
        *("model_forbidden", "model_not_found", "model_quota_exhausted", "model_rate_limited"),
        "model_unauthorized",
    }
)
"""Codes of failures that a budget, or a request which the model's server refuses, caused."""


def breaker_key(parent: Parent, params: DispatchParams) -> BreakerKey | None:
    """Return the key of a task's breaker.

    Anonymous tasks have no breaker: they have nothing in common.
    """
    if not params.named:
        return None
    return BreakerKey(parent.tenant_id, parent.run_id, params.agent)


def is_own_fault(handle: SubagentHandle) -> bool:
    """Check if the end of a task is a failure of its own.

    Cancellations, timeouts, budgets, limits of the model's server and requests that it refuses are
    none; all other failures are, ``max_iterations`` and refused content too.
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
        counts: of all tasks; they know the queued tasks of an agent in a run.
        hold: takes a queued task out of the queue.
        release: queues a task again.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        counts: TaskCounts,
        telemetry: Telemetry,
        *,
        hold: Move,
        release: Move,
    ) -> None:
        self.breakers = Breakers(options)
        self.timer: asyncio.TimerHandle | None = None
        self._options = options
        self._counts = counts
        self._telemetry = telemetry
        self._hold = hold
        self._release = release

    def refusal(self, key: BreakerKey | None) -> float | None:
        """Return the seconds until the breaker lets a dispatch through; ``None``: now."""
        return self.breakers.refusal(key, _now())

    def enqueued(self, handle: SubagentHandle) -> None:
        """Ask the breaker about a newly queued task; it may hold the task back."""
        if handle.breaker is not None:
            handle.is_held = not self.breakers.admit(handle.breaker, handle, _now())
            self._keep_time()

    def ended(self, handle: SubagentHandle) -> None:
        """Report a finished or suspended task to its breaker, and start the tasks it releases."""
        if (key := handle.breaker) is None:
            return
        if handle.status is SubagentStatus.COMPLETED:
            self._let_go(self.breakers.succeeded(key, handle, _now()))
        elif not is_own_fault(handle):
            if (probe := self.breakers.dropped(key, handle)) is not None:
                self._let_go([probe])
        elif self.breakers.failed(key, handle, _now()):
            self._opened(key, handle)
        self._keep_time()

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
        """Forget idle breakers and old ends."""
        self.breakers.forget(_now())

    def _opened(self, key: BreakerKey, handle: SubagentHandle) -> None:
        """Hold back the agent's queued tasks; they stay in the state ``queued``."""
        data = {
            "attempt": handle.attempt,
            "failures": self.breakers.failures(key),
            "retry_after_ms": round(self._options.reset_timeout * 1000),
        }
        self._telemetry.count("subagent.circuit_breaker.open")
        handle.parent.listener.on_event(handle, "circuit_opened", data)
        for other in self._counts.queued_of(key):
            if not self.breakers.admit(key, other, _now()):
                other.is_held = True
                self._hold(other)

    def _let_go(self, handles: Iterable[Any]) -> None:
        for handle in handles:
            handle.is_held = False
            self._release(handle)

    def _keep_time(self) -> None:
        """Set the timer to the next reset time."""
        due = self.breakers.next_due()
        if self.timer is not None:
            if due is not None and self.timer.when() == due:
                return
            self.timer.cancel()
            self.timer = None
        if due is not None:
            self.timer = asyncio.get_running_loop().call_at(due, self._due)

    def _due(self) -> None:
        self.timer = None
        self._let_go(probe for _, probe in self.breakers.due(_now()))
        self._keep_time()


def _now() -> float:
    return asyncio.get_running_loop().time()
