"""Registry of tasks: it checks limits, changes statuses and removes tasks that have ended."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any
from uuid import UUID

from bottega.errors import (
    SubagentCircuitOpenError,
    SubagentDepthExceededError,
    SubagentQueueFullError,
    SubagentQuotaExceededError,
    SubagentRefusedError,
)
from bottega.subagents.breaker import breaker_key
from bottega.subagents.budget import Account
from bottega.subagents.handle import (
    DispatchParams,
    Mode,
    Parent,
    RestoredTask,
    SubagentHandle,
    SubagentOutcome,
    SubagentStatus,
    TaskCounts,
    check_move,
    wait_for,
)
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.scheduler import SubagentScheduler
from bottega.subagents.telemetry import Totals

logger = logging.getLogger(__name__)

ORPHANED = "orphan-cleanup"
MOST_SPREAD = 10_000
"""Maximum number of one parent's unfinished tasks that are child runs."""


SHUTDOWN = "registry-shutdown"
_PARENT_CANCELLED = "parent-cancelled"
_ASKED = tuple(each.name for each in fields(DispatchParams))
Work = Callable[[SubagentHandle], Awaitable[SubagentOutcome]]


class SubagentRegistry:
    """Registry of all tasks of this process.

    Args:
        limits: limits for every parent; a parent's own limits may be lower.
        scheduler: executes the tasks; by default a scheduler with default options.

    Attributes:
        late_results: number of outcomes that arrived after the end of their task.
    """

    def __init__(
        self,
        limits: SubagentLimits | None = None,
        scheduler: SubagentScheduler | None = None,
        telemetry: Totals | None = None,
    ) -> None:
        self.limits = limits or SubagentLimits()
        self.telemetry = telemetry or Totals()
        self.counts = TaskCounts()
        self.scheduler = scheduler or SubagentScheduler()
        self.scheduler.serve(self)
        self.late_results = 0
        self._handles: dict[UUID, SubagentHandle] = {}
        self._parents: dict[UUID, Parent] = {}
        self._collecting: asyncio.TimerHandle | None = None
        self._collected_at = float("-inf")

    # Lookup

    @property
    def active_count(self) -> int:
        return self.counts.active

    @property
    def queued_count(self) -> int:
        return self.counts.queued

    @property
    def total_count(self) -> int:
        return len(self._handles)

    def get(self, task_id: UUID, within: Parent | None = None) -> SubagentHandle | None:
        """Return a task, or ``None`` if it is unknown or is not a descendant of ``within``."""
        handle = self._handles.get(task_id)
        if handle is None or within is None:
            return handle
        ours = handle.run_id == within.run_id and handle.path[: within.depth] == within.path
        return handle if ours and len(handle.path) > within.depth else None

    def handles(self) -> list[SubagentHandle]:
        return list(self._handles.values())

    def parents(self) -> list[Parent]:
        """Return all parents that have tasks, each parent before its descendants."""
        return list(self._parents.values())

    def get_by_parent(self, parent_id: UUID) -> list[SubagentHandle]:
        parent = self._parents.get(parent_id)
        return list(parent.children.values()) if parent else []

    # Dispatching

    def dispatch(
        self, parent: Parent, params: DispatchParams, work: Work, *, task_id: UUID, place: Any
    ) -> SubagentHandle:
        """Register and queue a task, or return the existing task with this id.

        Args:
            place: position of the dispatch: (number of the model call, index of the tool call).

        Raises:
            SubagentRefusedError: the task is refused; the subclass shows which limit, budget or
                breaker refused it.
        """
        if (known := self.get(task_id, parent)) is not None:
            return known
        now = self.scheduler.now()
        try:
            self._check(parent, params, now)
        except SubagentRefusedError as refusal:
            self.telemetry.count("subagent.dispatch.rejected", reason=refusal.reason)
            data = {"code": refusal.code, "message": refusal.detail, **refusal.about}
            parent.listener.refused(parent, data)
            raise
        handle = self._add(parent, params, work, task_id, place, now)
        self._hold_back(handle)
        self.telemetry.count("subagent.dispatch.count")
        self.scheduler.enqueue(handle, now)
        handle.queue_position = position = self.scheduler.position(handle, now)
        handle.parent.listener.on_event(handle, "dispatched", {"queue_position": position})
        return handle

    def restore(
        self, parent: Parent, restored: RestoredTask, work: Work, *, task_id: UUID, place: Any
    ) -> SubagentHandle:
        """Register a task from before a crash, without checks of limits and without events."""
        if (known := self.get(task_id, parent)) is not None:
            return known
        now = self.scheduler.now()
        handle = self._add(parent, restored.params, work, task_id, place, now)
        handle.attempt, handle.mailbox = restored.attempt, restored.mailbox
        handle.created_at = now - restored.waited
        if restored.remaining is not None:
            handle.deadline = now + restored.remaining
            handle.timeout = restored.params.timeout or handle.timeout
        if restored.outcome is None:
            self._hold_back(handle)
            self.scheduler.enqueue(handle, now)
            return handle
        handle.token_usage = restored.spent
        handle.spend(restored.usage)
        handle.fixed_duration_ms, handle.received = restored.duration_ms, restored.received
        self._set(handle, restored.outcome.status)
        self._take_over(handle, restored.outcome)
        return handle

    def _check(self, parent: Parent, params: DispatchParams, now: float) -> None:
        """Raise SubagentRefusedError if a limit, a budget or a breaker forbids a dispatch."""
        own = parent.limits
        if parent.is_over:
            raise SubagentQuotaExceededError("the dispatching agent has ended already")
        if parent.depth >= own.max_depth:
            raise SubagentDepthExceededError(
                f"tasks may be nested at most {own.max_depth} deep, and this task would be deeper: "
                "do the work without a sub-agent",
                limit=own.max_depth,
            )
        wait = self.scheduler.circuits.refusal(breaker_key(parent, params), now)
        if wait is not None:
            raise SubagentCircuitOpenError(
                "tasks for this agent failed repeatedly in this run: try later, "
                f"in about {wait:.0f} s, or without this agent",
                retry_after_ms=round(wait * 1000),
            )
        for account in parent.accounts:
            if account.is_exhausted:
                raise SubagentQuotaExceededError(
                    account.state, reason="budget", size=account.spent, limit=account.limit or 0
                )
        if not params.is_remote:
            self._check_queue(parent)
        elif parent.remote >= MOST_SPREAD:
            raise SubagentQuotaExceededError(
                f"{parent.remote} of your tasks are unfinished child runs, which is the limit: "
                "await some of these tasks before you dispatch others",
                size=parent.remote,
                limit=MOST_SPREAD,
            )

    def _check_queue(self, parent: Parent) -> None:
        """Check that one more task of a parent may start now, or that the queue has room for it.

        The queue limits the tasks of a parent, a tenant, and all tenants. For a tenant without
        queued tasks, only the parent's limit applies. A run without queued tasks may exceed the
        tenant's limit by 1, and the total limit by the number of tenants with queued tasks.
        """
        room, counts, limits = self.scheduler.room(parent), self.counts, self.limits
        startable, of_tenant = min(room, parent.ready), counts.queued_of[parent.tenant_id]
        if parent.queued >= parent.limits.max_queued + room:
            waiting = parent.queued - startable
            raise SubagentQuotaExceededError(
                f"{waiting} of your tasks wait already, which is the limit: await some of these "
                "tasks before you dispatch others",
                size=waiting,
                limit=parent.limits.max_queued,
            )
        if not of_tenant:
            return
        extra = 0 if counts.queued_of_run[parent.run_id] else 1
        sizes = [(counts.queued, limits.max_queue_size + extra * len(counts.queued_of))]
        if parent.tenant_id is not None:
            most = limits.tenant_max_queued or max(1, limits.max_queue_size // 2)
            sizes.append((of_tenant, most + extra))
        for size, limit in sizes:
            if size >= limit + room:
                waiting = size - startable
                raise SubagentQueueFullError(
                    f"the queue is full ({waiting} of {limit}): try again when tasks have ended",
                    size=waiting,
                    limit=limit,
                )

    def _add(
        self,
        parent: Parent,
        params: DispatchParams,
        work: Work,
        task_id: UUID,
        place: Any,
        now: float,
    ) -> SubagentHandle:
        fields = {name: getattr(params, name) for name in _ASKED}
        fields["timeout"] = parent.time_for(params.timeout, now)
        handle = SubagentHandle(
            **fields,
            task_id=task_id,
            parent=parent,
            path=(*parent.path, place),
            breaker=breaker_key(parent, params),
            created_at=now,
            status_changed_at=now,
            work=work,
            account=Account(f"the token budget of task {task_id}", params.token_budget),
            context=contextvars.copy_context(),
        )
        self._handles[task_id] = handle
        self._parents.setdefault(parent.parent_id, parent)
        parent.children[task_id] = handle
        self.counts.add(handle)
        return handle

    def _hold_back(self, handle: SubagentHandle) -> None:
        """Let a task wait for siblings whose results it reads. Let its queued readers wait, too."""
        parent = handle.parent
        if parent.ancestors is None or handle.agent is None:
            return
        unfinished = [child for child in parent.children.values() if not child.status.is_final]
        names = {child.agent for child in unfinished if child.agent is not None}
        agents = parent.ancestors(handle.agent)
        readers = {name for name in names if handle.agent in parent.ancestors(name)}
        queued = [child for child in unfinished if child.status is SubagentStatus.QUEUED]
        pairs = [(other, handle) for other in unfinished if other.agent in agents]
        pairs += [(handle, other) for other in queued if other.agent in readers]
        for first, then in pairs:
            then.holds |= {first}
            self.scheduler.hold(then)

    # Changes of status

    def transition(
        self, handle: SubagentHandle, status: SubagentStatus, outcome: SubagentOutcome | None = None
    ) -> None:
        """Change a task's status, and send an event. A final status cancels all descendants.

        Raises:
            IllegalTransition: the task's status may not change to ``status``.
        """
        check_move(handle.status, status)
        old = handle.status
        handle.status_changed_at = now = self.scheduler.now()
        if status.is_final:
            handle.fixed_duration_ms = handle.duration_ms(now)
            self._take_over(handle, outcome or SubagentOutcome(status))
        self._set(handle, status)
        data = {"attempt": handle.attempt, "from": old, "to": status}
        handle.parent.listener.on_event(handle, "status_changed", data)
        if status.is_final:
            self._ended(handle, now)

    def finish(self, handle: SubagentHandle, outcome: SubagentOutcome) -> bool:
        """End a task; if it has already ended, only count the late outcome and return false."""
        if handle.status.is_final or handle.suspended:
            self.late_results += 1
            return False
        self.transition(handle, outcome.status, outcome)
        return True

    def _set(self, handle: SubagentHandle, status: SubagentStatus) -> None:
        self.counts.add(handle, -1)
        handle.status = status
        self.counts.add(handle)

    def _take_over(self, handle: SubagentHandle, outcome: SubagentOutcome) -> None:
        handle.final_output, handle.error = outcome.output, outcome.error
        handle.error_code, handle.stop_reason = outcome.error_code, outcome.stop_reason

    def _ended(self, handle: SubagentHandle, now: float) -> None:
        usage = handle.token_usage
        data: dict[str, Any] = {"duration_ms": handle.fixed_duration_ms}
        data["token_usage"] = usage.to_dict()
        if handle.status is SubagentStatus.COMPLETED:
            data["stop_reason"] = handle.stop_reason
        else:
            data["error"] = {"code": handle.error_code, "message": handle.error}
        handle.parent.listener.on_event(handle, str(handle.status), data)
        self.scheduler.ended(handle, now)
        for waiter in list(handle.waiters or ()):
            waiter.ended(handle)
        for scope in list(handle.scopes):
            self.end_parent(scope, _reason(handle))
        siblings = () if handle.parent.ancestors is None else handle.parent.children.values()
        for other in [each for each in siblings if each.holds and handle in each.holds]:
            other.holds -= {handle}
            self.scheduler.released(other, by=handle)
        handle.holds = frozenset()
        self.telemetry.count(f"subagent.status.{handle.status}")
        self.telemetry.count("subagent.token.usage", usage.input, direction="input")
        self.telemetry.count("subagent.token.usage", usage.output, direction="output")
        self.telemetry.observe("subagent.completion.duration_ms", handle.fixed_duration_ms or 0)

    # Ending

    def cancel(self, task_id: UUID, reason: str, code: str = "cancelled") -> bool:
        """Cancel a task; cancel its descendants with the reason ``parent-cancelled:{reason}``.

        Return false if the task has already ended.
        """
        handle = self._handles.get(task_id)
        if handle is None or handle.status.is_final:
            return False
        outcome = SubagentOutcome(SubagentStatus.CANCELLED, error=reason, error_code=code)
        self.transition(handle, SubagentStatus.CANCELLED, outcome)
        return True

    def cancel_all(self, parent_id: UUID, reason: str = "cancelled") -> int:
        """Cancel all unfinished tasks of a parent; return their number."""
        return sum(self.cancel(child.task_id, reason) for child in self.get_by_parent(parent_id))

    def end_parent(self, parent: Parent, reason: str) -> None:
        """Mark a parent as ended, and cancel its tasks, whose results no agent would read."""
        parent.ended = True
        for child in list(parent.children.values()):
            self.cancel(child.task_id, reason)
        if not parent.children:
            self._parents.pop(parent.parent_id, None)

    def discard(self, parents: Iterable[Parent]) -> None:
        """Remove parents and their tasks; unfinished tasks stop and get no final status."""
        for parent in parents:
            parent.ended = True
            for child in list(parent.children.values()):
                if not child.status.is_final:
                    child.suspended = True
                    self.scheduler.ended(child, self.scheduler.now())
                self.remove(child)
            self._parents.pop(parent.parent_id, None)

    # Waiting

    async def wait_for_completion(
        self,
        handles: Sequence[SubagentHandle],
        *,
        mode: Mode = "all",
        quorum: int | None = None,
        timeout: float,
    ) -> bool:
        """Wait for tasks; see :func:`wait_for`."""
        return await wait_for(handles, mode, quorum, timeout)

    # Lifecycle

    def start(self) -> None:
        """Call :meth:`collect` every ``gc_interval`` seconds until :meth:`shutdown`."""
        self._stop_collecting()
        loop = asyncio.get_running_loop()
        self._collecting = loop.call_later(self.limits.gc_interval, self._collect_again)

    def _stop_collecting(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
            self._collecting = None

    def _collect_again(self) -> None:
        self.start()
        try:
            self.collect()
        except Exception:
            logger.exception("collecting finished tasks failed")

    async def shutdown(self) -> None:
        """Cancel and remove all tasks; return when no task runs."""
        self._stop_collecting()
        while self._handles:
            for parent in self.parents():
                self.end_parent(parent, SHUTDOWN)
            await self.scheduler.idle()
            for handle in self.handles():
                if handle.status.is_final:
                    self.remove(handle)
        self.scheduler.stop()

    async def __aenter__(self) -> "SubagentRegistry":
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def tidy(self) -> None:
        """Call :meth:`collect` if it is due and :meth:`start` was not called."""
        is_due = self.scheduler.now() - self._collected_at >= self.limits.gc_interval
        if self._collecting is None and is_due:
            self.collect()

    def collect(self) -> int:
        """Remove finished tasks; return their number. End overdue tasks and ended parents' tasks.

        The registry keeps a finished task for ``gc_ttl`` seconds, and longer if its parent has not
        read the outcome and may still read it. If there are too many tasks, the registry does not
        keep tasks whose outcome was read.
        """
        now = self._collected_at = self.scheduler.now()
        for parent in self.parents():
            if not parent.ended and parent.is_over:
                self.end_parent(parent, ORPHANED)
        for handle in self.handles():
            if not handle.status.is_final:
                self.scheduler.watch_over(handle)
        crowded = self.total_count > 10 * self.limits.max_concurrent_global
        removed = [
            handle
            for handle in self.handles()
            if handle.status.is_final
            and (handle.parent.ended or handle.received)
            and (
                now - handle.status_changed_at >= self.limits.gc_ttl
                or (crowded and handle.received)
            )
        ]
        for handle in removed:
            self.remove(handle)
        self.scheduler.circuits.forget(now)
        if removed:
            self.telemetry.count("subagent.gc.collected", len(removed))
        return len(removed)

    def remove(self, handle: SubagentHandle) -> None:
        """Remove a task. Remove also its parent, if the parent has ended and has no other task."""
        if self._handles.pop(handle.task_id, None) is None:
            return
        self.counts.add(handle, -1)
        parent = handle.parent
        parent.children.pop(handle.task_id, None)
        if parent.ended and not parent.children:
            self._parents.pop(parent.parent_id, None)


def _reason(handle: SubagentHandle) -> str:
    if handle.status is not SubagentStatus.CANCELLED:
        return f"parent-{handle.status}"
    reason = handle.error or ""
    return reason if reason.startswith(_PARENT_CANCELLED) else f"{_PARENT_CANCELLED}:{reason}"
