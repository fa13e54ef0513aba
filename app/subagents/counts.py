"""How many tasks are in which state; kept up to date, never counted anew (spec page 3, S5)."""

from collections import Counter
from uuid import UUID

from app.subagents.handle import SubagentHandle
from app.subagents.states import SubagentStatus

Kind = tuple[UUID | None, str]
"""Tenant, and kind of task: what shares a breaker."""


class Counts:
    """Of all tasks there are."""

    def __init__(self) -> None:
        self._by_status: Counter[SubagentStatus] = Counter()
        self._queued_of: Counter[UUID | None] = Counter()
        self._queued: dict[Kind, dict[UUID, SubagentHandle]] = {}

    @property
    def active(self) -> int:
        return self._by_status[SubagentStatus.RUNNING] + self._by_status[SubagentStatus.STREAMING]

    @property
    def queued(self) -> int:
        return self._by_status[SubagentStatus.QUEUED]

    def queued_of_tenant(self, tenant: UUID | None) -> int:
        return self._queued_of.get(tenant, 0)

    def queued_of_kind(self, kind: Kind) -> list[SubagentHandle]:
        """In the order of their dispatch."""
        return list(self._queued.get(kind, {}).values())

    def enter(self, handle: SubagentHandle) -> None:
        """A task is in its state now."""
        self._by_status[handle.status] += 1
        if handle.status is SubagentStatus.QUEUED:
            self._queued_of[handle.tenant_id] += 1
            kind = (handle.tenant_id, handle.kind)
            self._queued.setdefault(kind, {})[handle.task_id] = handle
            handle.parent.queued += 1

    def leave(self, handle: SubagentHandle) -> None:
        """A task leaves its state."""
        self._by_status[handle.status] -= 1
        if handle.status is not SubagentStatus.QUEUED:
            return
        tenant = handle.tenant_id
        handle.parent.queued -= 1
        self._queued_of[tenant] -= 1
        if not self._queued_of[tenant]:
            del self._queued_of[tenant]
        of_kind = self._queued[tenant, handle.kind]
        del of_kind[handle.task_id]
        if not of_kind:
            del self._queued[tenant, handle.kind]
