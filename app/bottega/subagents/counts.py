"""How many tasks are in which state; kept up to date, never counted anew (spec page 3, S5)."""

from collections import Counter
from typing import Any
from uuid import UUID

from bottega.subagents.handle import SubagentHandle
from bottega.subagents.states import SubagentStatus

Kind = tuple[UUID | None, str]
"""Tenant, and kind of task: what shares a breaker."""


class Counts:
    """Of all tasks there are."""

    def __init__(self) -> None:
        self._by_status: Counter[SubagentStatus] = Counter()
        self._queued_of: Counter[UUID | None] = Counter()
        self._queued_of_run: Counter[UUID] = Counter()
        self._active_of: Counter[UUID | None] = Counter()
        self._priorities: dict[UUID | None, Counter[int]] = {}
        self._queued: dict[Kind, dict[UUID, SubagentHandle]] = {}

    @property
    def active(self) -> int:
        return self._by_status[SubagentStatus.RUNNING] + self._by_status[SubagentStatus.STREAMING]

    @property
    def queued(self) -> int:
        return self._by_status[SubagentStatus.QUEUED]

    @property
    def tenants_queued(self) -> int:
        """Count the tenants that have waiting tasks."""
        return len(self._queued_of)

    def queued_of_tenant(self, tenant: UUID | None) -> int:
        return self._queued_of.get(tenant, 0)

    def queued_of_run(self, run: UUID) -> int:
        return self._queued_of_run.get(run, 0)

    def active_of_tenant(self, tenant: UUID | None) -> int:
        return self._active_of.get(tenant, 0)

    def tenants(self) -> set[UUID | None]:
        """Those that have tasks which are not over."""
        return {*self._active_of, *self._queued_of}

    def queued_by_priority(self, tenant: UUID | None) -> dict[int, int]:
        """How many of a tenant's tasks wait, by the priority that they were given."""
        return dict(self._priorities.get(tenant, {}))

    def queued_of_kind(self, kind: Kind) -> list[SubagentHandle]:
        """In the order of their dispatch."""
        return list(self._queued.get(kind, {}).values())

    def enter(self, handle: SubagentHandle) -> None:
        """A task is in its state now."""
        self._by_status[handle.status] += 1
        tenant = handle.tenant_id
        if handle.status is SubagentStatus.QUEUED:
            self._queued_of[tenant] += 1
            self._queued_of_run[handle.run_id] += 1
            if tenant not in self._priorities:
                self._priorities[tenant] = Counter()
            self._priorities[tenant][handle.priority] += 1
            kind = (tenant, handle.kind)
            self._queued.setdefault(kind, {})[handle.task_id] = handle
            handle.parent.queued += 1
        elif not handle.status.is_final:
            self._active_of[tenant] += 1

    def leave(self, handle: SubagentHandle) -> None:
        """A task leaves its state."""
        self._by_status[handle.status] -= 1
        tenant = handle.tenant_id
        if handle.status is not SubagentStatus.QUEUED:
            if not handle.status.is_final:
                _take_one(self._active_of, tenant)
            return
        handle.parent.queued -= 1
        _take_one(self._queued_of, tenant)
        _take_one(self._queued_of_run, handle.run_id)
        _take_one(self._priorities[tenant], handle.priority)
        if not self._priorities[tenant]:
            del self._priorities[tenant]
        of_kind = self._queued[tenant, handle.kind]
        del of_kind[handle.task_id]
        if not of_kind:
            del self._queued[tenant, handle.kind]


def _take_one(counter: Counter[Any], key: Any) -> None:
    """Count down; what has none left is not kept."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
