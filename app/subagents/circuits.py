"""The circuit breakers at work: what they hold back, and when they try again (spec page 3, S8)."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from app.subagents.breaker import Breakers
from app.subagents.counts import Kind
from app.subagents.handle import SubagentHandle
from app.subagents.states import SubagentStatus

if TYPE_CHECKING:
    from app.subagents.scheduler import SubagentScheduler

_NO_TOKENS = "budget_exhausted"
"""To fail for want of tokens says nothing of a kind of task."""


class Circuits:
    """Tells the breakers how tasks end, and the scheduler which tasks may go."""

    def __init__(self, scheduler: "SubagentScheduler") -> None:
        self.breakers = Breakers(scheduler.options)
        self.timer: asyncio.TimerHandle | None = None
        self._scheduler = scheduler
        self._agents: dict[Kind, str] = {}

    def enqueued(self, handle: SubagentHandle) -> None:
        """A task is about to wait; its kind's breaker may hold it back."""
        now = self._scheduler.now()
        handle.held_by_breaker = not self.breakers.admit(_kind(handle), handle, now)
        self._keep_time()

    def ended(self, handle: SubagentHandle) -> None:
        """A task is over, or suspended."""
        kind = _kind(handle)
        if handle.status is SubagentStatus.COMPLETED:
            held = self.breakers.held(kind)
            if self.breakers.succeeded(kind, handle):
                self._let_go(held)
        elif (
            handle.suspended
            or handle.status is SubagentStatus.CANCELLED
            or handle.error_code == _NO_TOKENS
        ):
            if (probe := self.breakers.dropped(kind, handle)) is not None:
                self._let_go([probe])
        elif self.breakers.failed(kind, handle, self._scheduler.now()):
            self._opened(kind, handle)
        self._keep_time()

    def open(self) -> list[tuple[UUID | None, dict[str, Any]]]:
        """The breakers that are not closed: each with its tenant, and what to show of it."""
        return [
            (
                breaker.key[0],
                {
                    "kind": breaker.key[1],
                    "agent": self._agents.get(breaker.key),
                    "state": breaker.state,
                    "failures": breaker.failures,
                    "retry_after_ms": round(breaker.retry_after * 1000),
                },
            )
            for breaker in self.breakers.open(self._scheduler.now())
        ]

    def forget(self) -> None:
        """Forget those that are closed and clean."""
        now = self._scheduler.now()
        self.breakers.forget(now)
        kept = {breaker.key for breaker in self.breakers.open(now)}
        self._agents = {kind: agent for kind, agent in self._agents.items() if kind in kept}

    def _opened(self, kind: Kind, handle: SubagentHandle) -> None:
        """Tasks of the kind that wait stay queued, not ready."""
        options = self._scheduler.options
        data = {
            "attempt": handle.attempt,
            "failures": options.failure_threshold,
            "retry_after_ms": round(options.reset_timeout * 1000),
        }
        registry = self._scheduler.registry
        registry.telemetry.count("subagent.circuit_breaker.open")
        handle.parent.listener.happened(handle, "circuit_opened", data)
        self._agents[kind] = handle.agent
        for other in registry.counts.queued_of_kind(kind):
            if not other.held_by_breaker:
                admitted = self.breakers.admit(kind, other, self._scheduler.now())
                other.held_by_breaker = not admitted
                self._scheduler.hold(other)

    def _let_go(self, handles: Iterable[Any]) -> None:
        for handle in handles:
            handle.held_by_breaker = False
            self._scheduler.push(handle)

    def _keep_time(self) -> None:
        """Look again when a breaker is due."""
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
        self._let_go([probe for _, probe in self.breakers.due(self._scheduler.now())])
        self._keep_time()


def _kind(handle: SubagentHandle) -> Kind:
    return handle.tenant_id, handle.kind
