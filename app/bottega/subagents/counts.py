"""Counts of tasks by state, updated with each change."""

from collections import Counter
from typing import Any
from uuid import UUID

from bottega.subagents.handle import SubagentHandle
from bottega.subagents.states import SubagentStatus

Kind = tuple[UUID | None, str]
"""(tenant, kind of task)."""


class Counts:
    """Counts of all tasks of a registry."""

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
        """Number of tenants with queued tasks."""
        return len(self._queued_of)

    def queued_of_tenant(self, tenant: UUID | None) -> int:
        return self._queued_of.get(tenant, 0)

    def queued_of_run(self, run: UUID) -> int:
        return self._queued_of_run.get(run, 0)

    def active_of_tenant(self, tenant: UUID | None) -> int:
        return self._active_of.get(tenant, 0)

    def tenants(self) -> set[UUID | None]:
        """Return the tenants that have unfinished tasks."""
        return {*self._active_of, *self._queued_of}

    def queued_by_priority(self, tenant: UUID | None) -> dict[int, int]:
        """Count a tenant's queued tasks by base priority."""
        return dict(self._priorities.get(tenant, {}))

    def queued_of_kind(self, kind: Kind) -> list[SubagentHandle]:
        """Return the queued tasks of a kind, in the order of their dispatch."""
        return list(self._queued.get(kind, {}).values())

    def enter(self, handle: SubagentHandle) -> None:
        """Count a task in its current state."""
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
        """Remove a task from the counts of its current state."""
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
    """Decrement a count; delete the key at 0."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
