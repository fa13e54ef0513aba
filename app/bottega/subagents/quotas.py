"""Counts of tasks by state, updated with each change."""

from collections import Counter
from typing import Any, Protocol
from uuid import UUID

from bottega.errors import (
    SubagentCircuitOpenError,
    SubagentDepthExceededError,
    SubagentQueueFullError,
    SubagentQuotaExceededError,
)
from bottega.subagents.handle import (
    BreakerKey,
    Parent,
    SubagentHandle,
    SubagentOutcome,
    SubagentStatus,
)
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.telemetry import Telemetry

_ACTIVE = (SubagentStatus.RUNNING, SubagentStatus.STREAMING)

MOST_SPREAD = 10_000
"""Limit of one parent's unfinished tasks that are child runs."""


class TaskCounts:
    def __init__(self) -> None:
        self._by_status: Counter[SubagentStatus] = Counter()
        self._queued_of: Counter[UUID | None] = Counter()
        self._queued_of_run: Counter[UUID] = Counter()
        self._active_of: Counter[UUID | None] = Counter()
        self._priorities: dict[UUID | None, Counter[int]] = {}
        self._queued: dict[BreakerKey, dict[UUID, SubagentHandle]] = {}

    @property
    def active(self) -> int:
        return sum(self._by_status[status] for status in _ACTIVE)

    @property
    def queued(self) -> int:
        return self._by_status[SubagentStatus.QUEUED]

    @property
    def tenants_queued(self) -> int:
        return len(self._queued_of)

    def queued_of_tenant(self, tenant: UUID | None) -> int:
        return self._queued_of.get(tenant, 0)

    def queued_of_run(self, run: UUID) -> int:
        return self._queued_of_run.get(run, 0)

    def active_of_tenant(self, tenant: UUID | None) -> int:
        return self._active_of.get(tenant, 0)

    def tenants(self) -> set[UUID | None]:
        """Return the tenants that have queued or running tasks."""
        return {*self._active_of, *self._queued_of}

    def queued_by_priority(self, tenant: UUID | None) -> dict[int, int]:
        """Count a tenant's queued tasks by base priority."""
        return dict(self._priorities.get(tenant, {}))

    def queued_of(self, key: BreakerKey) -> list[SubagentHandle]:
        """Return the queued tasks that share a breaker, in the order of their dispatch."""
        return list(self._queued.get(key, {}).values())

    def enter(self, handle: SubagentHandle) -> None:
        """Count a task in its current state; a child run counts only in its parent's ``remote``."""
        if handle.spread:
            handle.parent.remote += not handle.status.is_final
            return
        handle.parent.here += not handle.status.is_final
        self._by_status[handle.status] += 1
        tenant = handle.tenant_id
        if handle.status is SubagentStatus.QUEUED:
            self._queued_of[tenant] += 1
            self._queued_of_run[handle.run_id] += 1
            if tenant not in self._priorities:
                self._priorities[tenant] = Counter()
            self._priorities[tenant][handle.priority] += 1
            if handle.breaker is not None:
                self._queued.setdefault(handle.breaker, {})[handle.task_id] = handle
            handle.parent.waiting[handle.agent] += 1
        elif handle.status in _ACTIVE:
            self._active_of[tenant] += 1

    def leave(self, handle: SubagentHandle) -> None:
        """Remove a task from the counts of its current state."""
        if handle.spread:
            handle.parent.remote -= not handle.status.is_final
            return
        handle.parent.here -= not handle.status.is_final
        self._by_status[handle.status] -= 1
        tenant = handle.tenant_id
        if handle.status is not SubagentStatus.QUEUED:
            if handle.status in _ACTIVE:
                _take_one(self._active_of, tenant)
            return
        _take_one(handle.parent.waiting, handle.agent)
        _take_one(self._queued_of, tenant)
        _take_one(self._queued_of_run, handle.run_id)
        _take_one(self._priorities[tenant], handle.priority)
        if not self._priorities[tenant]:
            del self._priorities[tenant]
        if handle.breaker is None:
            return
        alike = self._queued[handle.breaker]
        del alike[handle.task_id]
        if not alike:
            del self._queued[handle.breaker]


class TaskRegistry(Protocol):
    """The part of the registry that the scheduler needs."""

    limits: SubagentLimits
    counts: TaskCounts
    telemetry: Telemetry

    def transition(self, handle: SubagentHandle, status: SubagentStatus) -> None:
        """Move a task to another state."""

    def finish(self, handle: SubagentHandle, outcome: SubagentOutcome) -> bool:
        """End a task; return false if the task had ended already."""

    def cancel(self, task_id: UUID, reason: str) -> bool:
        """Cancel a task and all tasks below it."""


def _take_one(counter: Counter[Any], key: Any) -> None:
    """Decrement a count; delete the key at 0."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def check_dispatch(
    parent: Parent,
    limits: SubagentLimits,
    *,
    counts: TaskCounts,
    room: tuple[int, int],
    wait: float | None,
    spread: bool = False,
) -> None:
    """Check a dispatch against the limits. A task above ``max_concurrent`` passes, and waits.

    Args:
        limits: limits of all parents together; the parent's own limits are in ``parent``.
        counts: counts of the registry's tasks.
        room: (number of the parent's tasks that may start at once, number that wait already).
        wait: seconds until the breaker lets a task of this agent through; ``None``: now.
        spread: the task becomes a child run, which needs no slot and no queue here.

    Raises:
        SubagentRefusedError: a subclass for each limit; the text is for the model.
    """
    own = parent.limits
    if parent.is_over:
        raise SubagentQuotaExceededError("the dispatching agent has ended already")
    if parent.depth >= own.max_depth:
        raise SubagentDepthExceededError(
            f"tasks may be nested at most {own.max_depth} deep, and this task would be deeper: do "
            "it without a sub-agent",
            limit=own.max_depth,
        )
    if wait is not None:
        raise SubagentCircuitOpenError(
            "tasks for this agent failed repeatedly in this run, so it accepts no task for about "
            f"{wait:.0f} s: try later, or without this agent",
            retry_after_ms=round(wait * 1000),
        )
    for account in parent.accounts:
        if account.is_exhausted:
            spent, limit = account.spent, account.limit or 0
            raise SubagentQuotaExceededError(
                account.state, reason="budget", size=spent, limit=limit
            )
    if spread:
        if parent.remote >= MOST_SPREAD:
            raise SubagentQuotaExceededError(
                f"{parent.remote} of your tasks are runs of their own that are not over, which is "
                "the limit: await some before you dispatch others",
                size=parent.remote,
                limit=MOST_SPREAD,
            )
        return
    waiting = parent.queued - min(room)
    if parent.queued >= own.max_queued + room[0]:
        raise SubagentQuotaExceededError(
            f"{waiting} of your tasks wait already, which is the limit: await some before you "
            "dispatch others",
            size=waiting,
            limit=own.max_queued,
        )
    _check_queue(parent, limits, counts, *room)


def _check_queue(
    parent: Parent, limits: SubagentLimits, counts: TaskCounts, room: int, ready: int
) -> None:
    """Check that the queue has room for one more task.

    It always has room for a tenant without queued tasks. Beyond its limit, it accepts one extra
    task per tenant, from a run without queued tasks.
    """
    of_tenant = counts.queued_of_tenant(parent.tenant_id)
    if not of_tenant:
        return
    extra = 0 if counts.queued_of_run(parent.run_id) else 1
    sizes = [(counts.queued, limits.max_queue_size + extra * counts.tenants_queued)]
    if parent.tenant_id is not None:
        most = limits.tenant_max_queued or max(1, limits.max_queue_size // 2)
        sizes.append((of_tenant, most + extra))
    for size, limit in sizes:
        if size >= limit + room:
            waiting = size - min(room, ready)
            raise SubagentQueueFullError(
                f"the queue is full ({waiting} of {limit}): try again once some tasks are done",
                size=waiting,
                limit=limit,
            )
