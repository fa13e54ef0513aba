"""Connection between the circuit breakers and the scheduler."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from bottega.subagents.breaker import BreakerKey, Breakers
from bottega.subagents.handle import DispatchParams, Parent, SubagentHandle
from bottega.subagents.limits import SchedulerOptions
from bottega.subagents.quotas import TaskCounts
from bottega.subagents.states import SubagentStatus
from bottega.subagents.telemetry import Telemetry

Move = Callable[[SubagentHandle], None]

_OF_MODEL = frozenset(
    {
        *("model_unavailable", "model_timeout", "model_stream_broken", "model_bad_response"),
        *("model_error", "provider_failed"),
    }
)
"""Codes of failures of a model's server; other codes are the caller's fault or about content."""
_NEVER = frozenset({"budget_exhausted", "max_iterations"})


def breaker_keys(parent: Parent, params: DispatchParams) -> tuple[BreakerKey, ...]:
    """Return the keys of a task's two breakers: for failures of its model, and for all others.

    Anonymous tasks have no breakers: they have nothing in common.
    """
    if not params.named:
        return ()
    kind, tenant = params.kind, parent.tenant_id
    return (tenant, f"model {params.model}", kind), (tenant, f"run {parent.run_id}", kind)


def blamed(handle: SubagentHandle) -> BreakerKey | None:
    """Return the key of the breaker that counts a task's end as a failure; ``None``: no breaker.

    Cancellations, timeouts, budgets, ``max_iterations``, rate limits and a model's refusals do not
    count.
    """
    code = handle.error_code or ""
    if not handle.breakers or handle.suspended or handle.status is not SubagentStatus.FAILED:
        return None
    of_model, of_run = handle.breakers
    if code in _OF_MODEL:
        return None if handle.rate_limited else of_model
    return None if code in _NEVER or code.startswith("model_") else of_run


def may_pass(code: str | None) -> bool:
    """Return true if a failure with this code may not happen again: another try makes sense."""
    if code is None or code in _OF_MODEL or code == "model_rate_limited":
        return True
    return code not in _NEVER and not code.startswith("model_")


class BreakerSet:
    """Reports tasks' ends to the breakers, and released tasks to the scheduler.

    Args:
        counts: of all tasks; they know the queued tasks of a kind.
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
        self._agents: dict[BreakerKey, str] = {}

    def refusal(self, keys: Sequence[BreakerKey]) -> float | None:
        """Return the seconds until these breakers let a dispatch through; ``None``: now."""
        now = _now()
        waits = [self.breakers.refusal(key, now) for key in keys]
        return max((wait for wait in waits if wait is not None), default=None)

    def enqueued(self, handle: SubagentHandle) -> None:
        """Ask the breakers about a newly queued task; they may hold it back."""
        now = _now()
        for key in handle.breakers:
            if not self.breakers.admit(key, handle, now):
                handle.held_by.add(key)
        self._keep_time()

    def ended(self, handle: SubagentHandle) -> None:
        """Report a finished or suspended task to its breakers, and start the tasks they release."""
        now, failed = _now(), blamed(handle)
        for key in handle.breakers:
            if handle.status is SubagentStatus.COMPLETED:
                held = self.breakers.held(key)
                if self.breakers.succeeded(key, handle, now):
                    self._let_go(key, held)
            elif key != failed:
                if (probe := self.breakers.dropped(key, handle)) is not None:
                    self._let_go(key, [probe])
            elif self.breakers.failed(key, handle, now):
                self._opened(key, handle)
        self._keep_time()

    def open(self) -> list[tuple[UUID | None, dict[str, Any]]]:
        """Return the breakers that are not closed, as (tenant, JSON description)."""
        return [
            (
                breaker.key[0],
                {
                    "kind": breaker.key[2],
                    "agent": self._agents.get(breaker.key),
                    "state": breaker.state,
                    "failures": breaker.failures,
                    "retry_after_ms": round(breaker.retry_after * 1000),
                },
            )
            for breaker in self.breakers.open(_now())
        ]

    def forget(self) -> None:
        """Forget breakers that are closed and without recent ends, or idle."""
        now = _now()
        self.breakers.forget(now)
        kept = {breaker.key for breaker in self.breakers.open(now)}
        self._agents = {key: agent for key, agent in self._agents.items() if key in kept}

    def _opened(self, key: BreakerKey, handle: SubagentHandle) -> None:
        """Hold back the queued tasks of the kind; they stay in the state ``queued``."""
        data = {
            "attempt": handle.attempt,
            "failures": self.breakers.failures(key),
            "retry_after_ms": round(self._options.reset_timeout * 1000),
        }
        self._telemetry.count("subagent.circuit_breaker.open")
        handle.parent.listener.on_event(handle, "circuit_opened", data)
        self._agents[key] = handle.agent
        for other in self._counts.queued_of_kind((handle.tenant_id, handle.kind)):
            if key in other.breakers and not self.breakers.admit(key, other, _now()):
                other.held_by.add(key)
                self._hold(other)

    def _let_go(self, key: BreakerKey, handles: Iterable[Any]) -> None:
        for handle in handles:
            handle.held_by.discard(key)
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
        for key, probe in self.breakers.due(_now()):
            self._let_go(key, [probe])
        self._keep_time()


def _now() -> float:
    return asyncio.get_running_loop().time()
