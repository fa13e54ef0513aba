"""Circuit breakers, which hold back the tasks of an agent that failed repeatedly in a run.

A breaker is closed (all tasks start), open (no task starts until the reset time), or half-open
(only one task starts, the probe). The probe's result closes the breaker or opens it again. The
scheduler asks the breaker before each start of a task. :class:`FailureRates` decides when a breaker
opens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
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
from bottega.subagents.telemetry import Totals

_NOT_ITS_OWN = frozenset(
    {
        *("budget_exhausted", "egress_forbidden", "model_bad_request", "model_context_too_long"),
        *("model_forbidden", "model_not_found", "model_quota_exhausted", "model_rate_limited"),
        "model_unauthorized",
    }
)
"""Codes of failures that the agent did not cause: a budget, or a refusal by a model server."""


def breaker_key(parent: Parent, params: DispatchParams) -> BreakerKey | None:
    """Return the key of a task's breaker.

    Anonymous tasks have no breaker, because no two anonymous tasks have the same agent.
    """
    if params.agent is None:
        return None
    return BreakerKey(parent.tenant_id, parent.run_id, params.agent)


def is_own_fault(handle: SubagentHandle) -> bool:
    """Return true if a task has failed, and its breaker counts the failure.

    Breakers do not count cancellations, timeouts, exhausted budgets, rate limits of the model's
    server, and requests that the server refuses. Breakers count all other failures, for example
    ``max_iterations`` and refused content.
    """
    return (
        handle.status is SubagentStatus.FAILED
        and not handle.suspended
        and not handle.was_limited
        and handle.error_code not in _NOT_ITS_OWN
    )


@dataclass(slots=True, eq=False)
class _Breaker:
    """State of a breaker that is open or half-open.

    Attributes:
        failures: number of recent failures when the breaker opened, plus failed probes since then.
        retry_at: earliest time of the next probe, in seconds.
        probe: the task whose result closes or opens the breaker; ``None``: no probe runs.
        held: the tasks that the breaker holds back; the first task starts first.
    """

    failures: int
    retry_at: float = 0.0
    probe: SubagentHandle | None = None
    held: dict[SubagentHandle, None] = field(default_factory=dict)


class Breakers:
    """The breakers of all agents and runs. Times are seconds.

    Args:
        call_at: function that calls a function at a given time, like asyncio's ``call_at``.
        release: function that puts a held task back into the queue.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        telemetry: Totals,
        *,
        call_at: Callable[..., object],
        release: Callable[[SubagentHandle], None],
    ) -> None:
        self._options = options
        self._telemetry = telemetry
        self._call_at = call_at
        self._release = release
        self._rates = FailureRates(options.failure_threshold, options.monitor_window)
        self._breakers: dict[BreakerKey, _Breaker] = {}

    def refusal(self, key: BreakerKey | None, now: float) -> float | None:
        """Return the seconds until a new task may start; ``None``: a new task may start now."""
        breaker = None if key is None else self._breakers.get(key)
        if breaker is None:
            return None
        if breaker.probe is None:
            if now < breaker.retry_at:
                return breaker.retry_at - now
            if not breaker.held:
                return None
        return self._options.reset_timeout

    def admit(self, handle: SubagentHandle, now: float) -> bool:
        """Return true if a task may start; otherwise hold the task back. Idempotent.

        The first task after the reset time becomes the probe, unless the breaker holds other tasks.
        """
        breaker = None if handle.breaker is None else self._breakers.get(handle.breaker)
        if breaker is None or breaker.probe is handle:
            return True
        if self.refusal(handle.breaker, now) is None:
            breaker.probe = handle
            return True
        breaker.held.setdefault(handle)
        return False

    def ended(self, handle: SubagentHandle, now: float) -> None:
        """Record a task's end or suspension; release the held tasks that may start now.

        While a breaker is not closed, only the end of its probe counts. If the probe was cancelled,
        or failed in a way that breakers do not count, the next task becomes the probe.
        """
        if (key := handle.breaker) is None:
            return
        is_success, is_failure = handle.status is SubagentStatus.COMPLETED, is_own_fault(handle)
        if (breaker := self._breakers.get(key)) is None:
            if is_success:
                self._rates.succeeded(key, now)
            elif is_failure and self._rates.failed(key, now):
                breaker = self._breakers[key] = _Breaker(self._rates.failures(key))
                self._rates.forget(key)
                self._open(breaker, handle, now)
            return
        breaker.held.pop(handle, None)
        if breaker.probe is not handle:
            return
        breaker.probe = None
        if is_success:
            del self._breakers[key]
            for held in breaker.held:
                self._release(held)
        elif is_failure:
            breaker.failures += 1
            self._open(breaker, handle, now)
        else:
            breaker.retry_at = now
            self._start_probe(breaker, now)

    def open(self, now: float) -> list[tuple[UUID | None, dict[str, Any]]]:
        """Return a pair (tenant, JSON description) for each breaker that is not closed."""
        return [
            (
                key.tenant_id,
                {
                    "run_id": str(key.run_id),
                    "agent": key.agent,
                    "state": "half_open" if breaker.probe or now >= breaker.retry_at else "open",
                    "failures": breaker.failures,
                    "retry_after_ms": round((self.refusal(key, now) or 0.0) * 1000),
                },
            )
            for key, breaker in self._breakers.items()
        ]

    def forget(self, now: float) -> None:
        """Delete old results of tasks, and breakers unused for ``monitor_window`` seconds."""
        self._rates.tidy(now)
        for key, breaker in list(self._breakers.items()):
            is_idle = breaker.probe is None and not breaker.held
            if is_idle and now - breaker.retry_at > self._options.monitor_window:
                del self._breakers[key]

    def _open(self, breaker: _Breaker, handle: SubagentHandle, now: float) -> None:
        breaker.retry_at = now + self._options.reset_timeout
        data = {
            "attempt": handle.attempt,
            "failures": breaker.failures,
            "retry_after_ms": round(self._options.reset_timeout * 1000),
        }
        self._telemetry.count("subagent.circuit_breaker.open")
        handle.parent.listener.on_event(handle, "circuit_opened", data)
        self._call_at(breaker.retry_at, self._start_probe, breaker, breaker.retry_at)

    def _start_probe(self, breaker: _Breaker, now: float) -> None:
        if breaker.probe is None and breaker.held and now >= breaker.retry_at:
            breaker.probe = next(iter(breaker.held))
            del breaker.held[breaker.probe]
            self._release(breaker.probe)
