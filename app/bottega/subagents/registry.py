"""The single source of truth about tasks; executes nothing (spec page 3, S1 to S5)."""

import contextvars
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from bottega.errors import SubagentRefusedError
from bottega.subagents.breaker import BreakerKey, kind_of
from bottega.subagents.circuits import breaker_keys
from bottega.subagents.collecting import Collector
from bottega.subagents.counts import Counts
from bottega.subagents.handle import DispatchParams, Outcome, Parent, Past, SubagentHandle
from bottega.subagents.ledger import Account
from bottega.subagents.limits import SubagentLimits
from bottega.subagents.quotas import check_dispatch
from bottega.subagents.scheduler import SubagentScheduler
from bottega.subagents.states import SubagentStatus, check_move
from bottega.subagents.telemetry import NoTelemetry, Telemetry
from bottega.subagents.waiting import Mode, missing, wait_for

SHUTDOWN = "registry-shutdown"
_PARENT_CANCELLED = "parent-cancelled"
Work = Callable[[SubagentHandle], Awaitable[Outcome]]


class SubagentRegistry:
    """Knows every task of this process, and keeps them to their limits.

    Args:
        limits: for all parents; one parent's own may be lower.
        scheduler: that runs the tasks; made of the defaults if not given.

    Attributes:
        late_results: results that came after their task's end, and were dropped.
    """

    def __init__(
        self,
        limits: SubagentLimits | None = None,
        scheduler: SubagentScheduler | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.limits = limits or SubagentLimits()
        self.telemetry = telemetry or NoTelemetry()
        self.scheduler = scheduler or SubagentScheduler()
        self.scheduler.serve(self)
        self.late_results = 0
        self._handles: dict[UUID, SubagentHandle] = {}
        self._parents: dict[UUID, Parent] = {}
        self.counts = Counts()
        self._collector = Collector(self)

    # Looking

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
        """A task; with ``within`` only if it is among that one's descendants."""
        handle = self._handles.get(task_id)
        if handle is None or within is None:
            return handle
        ours = handle.run_id == within.run_id and handle.path[: within.depth] == within.path
        return handle if ours and len(handle.path) > within.depth else None

    def handles(self) -> list[SubagentHandle]:
        """All tasks."""
        return list(self._handles.values())

    def parents(self) -> list[Parent]:
        """All that have tasks, parents before those of their tasks."""
        return list(self._parents.values())

    def get_by_parent(self, parent_id: UUID) -> list[SubagentHandle]:
        parent = self._parents.get(parent_id)
        return list(parent.children.values()) if parent else []

    # Dispatching

    def dispatch(
        self, parent: Parent, params: DispatchParams, work: Work, *, task_id: UUID, place: Any
    ) -> SubagentHandle:
        """Take a task in; it waits in the queue. Once taken it is found again by its id.

        Args:
            place: (model call, index of the tool call) of the dispatch.

        Raises:
            SubagentRefusedError: which of its kinds, and its text, say why.
        """
        if (known := self.get(task_id, parent)) is not None:
            return known
        breakers = breaker_keys(parent, params)
        self._check(parent, breakers)
        handle = self._add(parent, params, breakers, work, task_id, place)
        self._hold_back(handle)
        self.telemetry.count("subagent.dispatch.count")
        self.scheduler.enqueue(handle)
        handle.queue_position = position = self.scheduler.position(handle)
        handle.parent.listener.happened(handle, "dispatched", {"queue_position": position})
        return handle

    def restore(
        self, parent: Parent, past: Past, work: Work, *, task_id: UUID, place: Any
    ) -> SubagentHandle:
        """Rebuild a task from before a crash: as it ended, or else queued. No limits are applied
        again, and no move is told."""
        if (known := self.get(task_id, parent)) is not None:
            return known
        breakers = breaker_keys(parent, past.params)
        handle = self._add(parent, past.params, breakers, work, task_id, place)
        now = self.scheduler.now()
        handle.attempt = past.attempt
        handle.created_at = now - past.waited
        if past.remaining is not None:
            handle.deadline = now + past.remaining
        if past.outcome is None:
            self._hold_back(handle)
            self.scheduler.enqueue(handle)
            return handle
        handle.token_usage = past.spent
        for account in (handle.account, *parent.paying()):
            account.spent += past.usage.tokens.total_tokens
        handle.fixed_duration_ms = past.duration_ms
        self._set(handle, past.outcome.status)
        self._take_over(handle, past.outcome)
        return handle

    def _check(self, parent: Parent, breakers: Sequence[BreakerKey]) -> None:
        try:
            check_dispatch(
                parent,
                self.limits,
                counts=self.counts,
                room=self.scheduler.room(parent),
                wait=self.scheduler.refusal(breakers),
            )
        except SubagentRefusedError as refusal:
            self.telemetry.count("subagent.dispatch.rejected", reason=refusal.code)
            parent.listener.refused(
                parent, {"code": refusal.code, "message": refusal.detail, **refusal.about}
            )
            raise

    def _add(
        self,
        parent: Parent,
        params: DispatchParams,
        breakers: tuple[BreakerKey, ...],
        work: Work,
        task_id: UUID,
        place: Any,
    ) -> SubagentHandle:
        limits = parent.limits
        now = self.scheduler.now()
        handle = SubagentHandle(
            task_id=task_id,
            parent=parent,
            path=(*parent.path, place),
            agent=params.agent,
            named=params.named,
            prompt=params.prompt,
            instructions=params.instructions,
            priority=params.priority,
            timeout=min(params.timeout or limits.default_timeout, limits.max_timeout),
            token_budget=params.token_budget,
            metadata=params.metadata,
            kind=_kind(params),
            breakers=breakers,
            created_at=now,
            status_changed_at=now,
            work=work,
            account=Account(f"the token budget of task {task_id}", params.token_budget),
            context=contextvars.copy_context(),
        )
        self._handles[task_id] = handle
        self._parents.setdefault(parent.parent_id, parent)
        parent.children[task_id] = handle
        self.counts.enter(handle)
        return handle

    def _hold_back(self, handle: SubagentHandle) -> None:
        """Let a task wait for siblings whose answers its agent reads, and those for it."""
        parent = handle.parent
        if parent.ancestors is None or not handle.named:
            return
        above = parent.ancestors(handle.agent)
        pairs = [(other, handle) for name in above for other in parent.active.get(name, ())]
        for name, others in parent.active.items():
            if handle.agent in parent.ancestors(name):
                pairs += [(handle, o) for o in others if o.status is SubagentStatus.QUEUED]
        for first, then in pairs:
            then.holds = then.holds or set()
            then.holds.add(first)
            first.blocks = first.blocks or []
            first.blocks.append(then)
            self.scheduler.hold(then)
        parent.active.setdefault(handle.agent, set()).add(handle)

    # Moving

    def transition(
        self, handle: SubagentHandle, status: SubagentStatus, outcome: Outcome | None = None
    ) -> None:
        """Move a task to another state: atomic, told once, its consequences with it.

        Raises:
            IllegalTransition: there is no such move.
        """
        check_move(handle.status, status)
        old = handle.status
        handle.status_changed_at = now = self.scheduler.now()
        if status.is_final:
            handle.fixed_duration_ms = handle.duration_ms(now)
            self._take_over(handle, outcome or Outcome(status))
        self._set(handle, status)
        handle.parent.listener.happened(
            handle, "status_changed", {"attempt": handle.attempt, "from": old, "to": status}
        )
        if status.is_final:
            self._ended(handle)

    def finish(self, handle: SubagentHandle, outcome: Outcome) -> bool:
        """What a task's work came to; dropped and counted if the task is over already."""
        if handle.status.is_final or handle.suspended:
            self.late_results += 1
            return False
        self.transition(handle, outcome.status, outcome)
        return True

    def _set(self, handle: SubagentHandle, status: SubagentStatus) -> None:
        self.counts.leave(handle)
        handle.status = status
        self.counts.enter(handle)

    def _take_over(self, handle: SubagentHandle, outcome: Outcome) -> None:
        handle.final_output, handle.error = outcome.output, outcome.error
        handle.error_code, handle.stop_reason = outcome.error_code, outcome.stop_reason
        active = handle.parent.active.get(handle.agent)
        if active is not None:
            active.discard(handle)
            if not active:
                del handle.parent.active[handle.agent]

    def _ended(self, handle: SubagentHandle) -> None:
        """What follows from the end of a task."""
        usage = handle.token_usage
        data: dict[str, Any] = {
            "duration_ms": handle.fixed_duration_ms,
            "token_usage": usage.model_dump(),
        }
        if handle.status is SubagentStatus.COMPLETED:
            data["stop_reason"] = handle.stop_reason
        else:
            data["error"] = {"code": handle.error_code, "message": handle.error}
        handle.parent.listener.happened(handle, str(handle.status), data)
        self.scheduler.ended(handle)
        for waiter in list(handle.waiters or ()):
            waiter.one_more()
        for scope in list(handle.scopes):
            self.end_parent(scope, _reason(handle))
        for other in handle.blocks or ():
            if other.holds:
                other.holds.discard(handle)
                self.scheduler.released(other, by=handle)
        handle.blocks = handle.holds = None
        self.telemetry.count(f"subagent.status.{handle.status}")
        self.telemetry.count("subagent.token.usage", usage.total_tokens)
        self.telemetry.observe("subagent.completion.duration_ms", handle.fixed_duration_ms or 0)

    # Ending

    def cancel(self, task_id: UUID, reason: str, code: str = "cancelled") -> bool:
        """End a task, and then all below it (``parent-cancelled:{reason}``). Idempotent: answers
        whether it was under way."""
        handle = self._handles.get(task_id)
        if handle is None or handle.status.is_final:
            return False
        outcome = Outcome(SubagentStatus.CANCELLED, error=reason, error_code=code)
        self.transition(handle, SubagentStatus.CANCELLED, outcome)
        return True

    def cancel_all(self, parent_id: UUID, reason: str = "cancelled") -> int:
        """End all tasks of a parent; answers how many were under way."""
        return sum(self.cancel(child.task_id, reason) for child in self.get_by_parent(parent_id))

    def end_parent(self, parent: Parent, reason: str) -> None:
        """A parent is over: its tasks are cancelled, and it will not read them any more."""
        parent.ended = True
        for child in list(parent.children.values()):
            self.cancel(child.task_id, reason)
        if not parent.children:
            self._parents.pop(parent.parent_id, None)

    def discard(self, parents: Iterable[Parent]) -> None:
        """Forget parents and their tasks: nobody will ask for them again here.

        Tasks that are under way are suspended: they get no end, and no slot.
        """
        for parent in parents:
            parent.ended = True
            for child in list(parent.children.values()):
                if not child.status.is_final:
                    child.suspended = True
                    self.scheduler.ended(child)
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
        gone: int = 0,
    ) -> bool:
        """Wait until all, any, or a quorum of the tasks are over; answers whether they are.

        The wait's timeout changes nothing about the tasks: they go on.

        Args:
            gone: more tasks that are waited for, over and collected.
        """
        return await wait_for(handles, missing(handles, mode, quorum, gone), timeout)

    # Life

    def start(self) -> None:
        """Collect regularly, until :meth:`shutdown`."""
        self._collector.start()

    async def shutdown(self) -> None:
        """Cancel all tasks, and return when nothing of them runs any more."""
        self._collector.stop()
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
        """Collect if it is time to, and nobody has called :meth:`start`."""
        self._collector.look()

    def collect(self) -> int:
        """Remove what nobody will ask for, end what lost its parent or its timer; answers how many
        tasks were removed. The one operation that looks at all tasks."""
        return self._collector.collect()

    def remove(self, handle: SubagentHandle) -> None:
        """Forget a task."""
        if self._handles.pop(handle.task_id, None) is None:
            return
        self.counts.leave(handle)
        parent = handle.parent
        parent.children.pop(handle.task_id, None)
        if parent.ended and not parent.children:
            self._parents.pop(parent.parent_id, None)


def _kind(params: DispatchParams) -> str:
    return kind_of(params.agent if params.named else None, params.instructions)


def _reason(handle: SubagentHandle) -> str:
    """Why the tasks below one that is over are cancelled: in all of a subtree by one reason."""
    if handle.status is not SubagentStatus.CANCELLED:
        return f"parent-{handle.status}"
    reason = handle.error or ""
    return reason if reason.startswith(_PARENT_CANCELLED) else f"{_PARENT_CANCELLED}:{reason}"
