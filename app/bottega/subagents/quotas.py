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

MOST_SPREAD = 10_000
"""Limit of one parent's unfinished tasks that are child runs."""


class TaskCounts:
    def __init__(self) -> None:
        self._by_status: Counter[SubagentStatus] = Counter()
        self._queued_of: Counter[UUID | None] = Counter()
        self._queued_of_run: Counter[UUID] = Counter()
        self._active_of: Counter[UUID | None] = Counter()

    @property
    def active(self) -> int:
        return self._by_status[SubagentStatus.RUNNING] + self._by_status[SubagentStatus.STREAMING]

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

    def enter(self, handle: SubagentHandle) -> None:
        """Count a task in its current state; a child run counts only in its parent's ``remote``."""
        self._count(handle, +1)

    def leave(self, handle: SubagentHandle) -> None:
        """Remove a task from the counts of its current state."""
        self._count(handle, -1)

    def _count(self, handle: SubagentHandle, by: int) -> None:
        parent, status = handle.parent, handle.status
        if handle.spread:
            parent.remote += 0 if status.is_final else by
            return
        parent.here += 0 if status.is_final else by
        _add(self._by_status, status, by)
        if status is SubagentStatus.QUEUED:
            _add(parent.waiting, handle.agent, by)
            _add(self._queued_of, parent.tenant_id, by)
            _add(self._queued_of_run, parent.run_id, by)
        elif status.is_active:
            _add(self._active_of, parent.tenant_id, by)


class TaskRegistry(Protocol):
    """The part of the registry that the scheduler needs."""

    limits: SubagentLimits
    counts: TaskCounts
    telemetry: Telemetry

    def queued_of(self, key: BreakerKey) -> list[SubagentHandle]:
        """Return the queued tasks that share a breaker, in the order of their dispatch."""

    def transition(self, handle: SubagentHandle, status: SubagentStatus) -> None:
        """Move a task to another state."""

    def finish(self, handle: SubagentHandle, outcome: SubagentOutcome) -> bool:
        """End a task; return false if the task had ended already."""

    def cancel(self, task_id: UUID, reason: str) -> bool:
        """Cancel a task and all tasks below it."""


def _add(counter: Counter[Any], key: Any, by: int) -> None:
    """Change a count; delete the key at 0."""
    counter[key] += by
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
