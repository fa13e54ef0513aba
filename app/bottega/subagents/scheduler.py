"""Scheduler of tasks: queue, slots, timers, cancellation.

:class:`TakeQueue` decides which task starts next. Tenants take turns, and the runs of a tenant take
turns. Within a run, the task with the best priority starts first. A task's priority improves while
the task waits, but of two tasks with equal base priority, the older task always starts first. So
each parent has a line (a list of tasks, sorted by age) for each base priority, and the queue only
compares the first tasks of these lines. The queue ignores the lines of parents that are not ready.
A parent is ready if it has waiting tasks, and its tasks hold fewer slots than its limit.

:class:`SubagentScheduler` starts the next task when the pool's size and the breakers allow it.
:func:`estimated_start_ms` estimates when a waiting task starts, from the durations of recent tasks.
"""

import asyncio
import logging
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from math import floor, inf
from typing import Protocol
from uuid import UUID

from bottega.errors import BudgetExhaustedError
from bottega.subagents.breaker import Breakers
from bottega.subagents.handle import (
    Parent,
    Place,
    SubagentHandle,
    SubagentOutcome,
    SubagentStatus,
    TaskCounts,
    all_done,
)
from bottega.subagents.limits import SchedulerOptions, SubagentLimits, resized
from bottega.subagents.telemetry import Totals

WAKE = 0
"""Priority of a running task that needs a slot again. The task goes before all new tasks."""


@dataclass(slots=True, eq=False)
class _Run:
    """A run that has ready parents.

    Attributes:
        ready: number of the parents' ready tasks.
    """

    ready: int = 0
    parents: dict[Parent, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant whose tasks wait in the queue or hold slots.

    Attributes:
        in_line: number of waiting tasks.
        holding: number of tasks that hold a slot.
        turns: the runs that have ready parents; the first run has the next turn.
    """

    key: Hashable
    in_line: int = 0
    holding: int = 0
    runs_in_turn: OrderedDict[Hashable, _Run] = field(default_factory=OrderedDict)


class TakeQueue:
    """Queue of tasks: tenants take turns, a tenant's runs take turns; then priorities decide.

    A tenant or run that was not ready gets its first turn after all other tenants or runs. The
    queue updates the attributes ``lines``, ``in_line``, ``ready`` and ``holders`` of each parent.

    Args:
        ageing_interval: seconds after which a waiting task's priority improves by one.
        tenant_limit: maximum number of one tenant's slots, or ``None`` for no limit.
        on_ready: function called with (parent, difference) after each change of a parent's
            ``ready``. The function may change the queue.
    """

    def __init__(
        self,
        ageing_interval: float = 5.0,
        tenant_limit: int | None = None,
        on_ready: Callable[[Parent, int], None] | None = None,
    ) -> None:
        self._ageing_interval = ageing_interval
        self._tenant_limit = inf if tenant_limit is None else tenant_limit
        self._on_ready = on_ready
        self._tenants: dict[Hashable, _Tenant] = {}
        self._tenants_in_turn: OrderedDict[Hashable, _Tenant] = OrderedDict()
        self._in_line = self._holding = 0
        self._orders = count()
        self._blocked: set[Hashable] = set()

    def __len__(self) -> int:
        """Return the number of waiting tasks, including the tasks of parents that are not ready."""
        return self._in_line

    def push(self, task: SubagentHandle, priority: int, enqueued_at: float) -> None:
        """Add a task.

        Args:
            priority: 1 (first) to 10, or ``WAKE``.
            enqueued_at: start of the task's wait, in seconds on the scheduler's clock. A task may
                be added after a task that started to wait later.

        Raises:
            ValueError: the task already waits.
        """
        if task.place is not None:
            raise ValueError("a task may wait only once")
        task.place, task.line = (enqueued_at, next(self._orders)), priority
        line = task.parent.lines.setdefault(priority, [])
        if line and _place_of(line[-1]) > task.place:
            insort(line, task, key=_place_of)
        else:
            line.append(task)
        self._change(task.parent, in_line=+1)

    def discard(self, task: SubagentHandle) -> bool:
        """Remove a waiting task; return false if the task does not wait."""
        if task.place is None:
            return False
        self._remove(task)
        self._change(task.parent, in_line=-1)
        return True

    def take(self, now: float) -> SubagentHandle | None:
        """Remove and return the next ready task, which holds a slot until :meth:`release`."""
        if not self._tenants_in_turn:
            return None
        tenant = next(iter(self._tenants_in_turn.values()))
        key, run = next(iter(tenant.runs_in_turn.items()))
        heads = (line[0] for parent in run.parents for line in parent.lines.values())
        task = min(heads, key=lambda head: self._rank(head, now))
        self._tenants_in_turn.move_to_end(tenant.key)
        tenant.runs_in_turn.move_to_end(key)
        self._remove(task)
        task.parent.holders[task] = now
        self._change(task.parent, in_line=-1, holding=+1)
        return task

    def release(self, task: SubagentHandle) -> None:
        """Release a task's slot.

        Raises:
            KeyError: the task holds no slot.
        """
        del task.parent.holders[task]
        self._change(task.parent, holding=-1)

    @property
    def ready(self) -> bool:
        return bool(self._tenants_in_turn)

    @property
    def turn(self) -> Hashable:
        """The tenant that has the next turn. Read this property only if a task is ready."""
        return next(iter(self._tenants_in_turn))

    def block(self, tenant: Hashable) -> None:
        """Give a tenant no turn until :meth:`unblock` is called."""
        self._blocked.add(tenant)
        self._tenants_in_turn.pop(tenant, None)

    def unblock(self, tenant: Hashable) -> None:
        self._blocked.discard(tenant)
        if tenant in self._tenants:
            self._join_turns(self._tenants[tenant])

    def ready_of(self, tenant: Hashable) -> int:
        """Count the ready tasks of a tenant; the tenant's limit does not matter."""
        return sum(run.ready for run in self._tenants[tenant].runs_in_turn.values())

    def in_line_of(self, tenant: Hashable) -> int:
        """Count all waiting tasks of a tenant, including tasks of parents that are not ready."""
        return self._tenants[tenant].in_line if tenant in self._tenants else 0

    def holding(self, tenant: Hashable = None) -> int:
        """Count the tasks of a tenant (``None``: of all tenants) that hold a slot."""
        if tenant is None:
            return self._holding
        return self._tenants[tenant].holding if tenant in self._tenants else 0

    def position(self, task: SubagentHandle, now: float) -> int:
        """Count the tasks of the same tenant that start before a waiting task.

        These are the n tasks of the same run with a better rank. Because runs take turns, up to n
        ready tasks of each other run also start first (n + 1 if that run has the earlier turn). The
        method's time is linear in the number of the run's ready parents and of the tenant's runs.
        """
        parent = task.parent
        runs = self._tenants[parent.tenant_id].runs_in_turn
        own = runs.get(parent.run_id)
        better = 0 if parent.ready else self.before(task, parent, now)
        for sibling in () if own is None else own.parents:
            better += self.before(task, sibling, now)
        ahead, takes = better, better + 1
        for run in runs.values():
            if run is own:
                takes = better
            else:
                ahead += takes if takes < run.ready else run.ready
        return ahead

    def before(self, task: SubagentHandle, parent: Parent, now: float) -> int:
        """Count a parent's tasks that start before a waiting task."""
        own = self._rank(task, now)
        return sum(
            len(line) - 1  # a new task: the usual case
            if line[-1] is task
            else bisect_left(line, own, key=lambda each: self._rank(each, now))
            for line in parent.lines.values()
        )

    def _rank(self, task: SubagentHandle, now: float) -> tuple[int, Place]:
        """Return a task's rank (effective priority, place): the lowest rank starts first.

        The effective priority starts at the task's priority, and falls by 1 per
        ``ageing_interval``, but not below 1.
        """
        place = _place_of(task)
        if task.line == WAKE:
            return WAKE, place
        steps = floor((now - place[0]) / self._ageing_interval)
        return max(1, task.line - steps), place

    def _remove(self, task: SubagentHandle) -> None:
        lines = task.parent.lines
        line = lines[task.line]
        del line[0 if line[0] is task else bisect_left(line, _place_of(task), key=_place_of)]
        if not line:
            del lines[task.line]
        task.place = None

    def _change(self, parent: Parent, *, in_line: int = 0, holding: int = 0) -> None:
        tenant = self._tenants.get(parent.tenant_id)
        if tenant is None:
            tenant = self._tenants[parent.tenant_id] = _Tenant(parent.tenant_id)
        self._in_line += in_line
        self._holding += holding
        tenant.in_line += in_line
        tenant.holding += holding
        parent.in_line += in_line
        before, has_room = parent.ready, len(parent.holders) < parent.limits.max_concurrent
        parent.ready = parent.in_line if has_room else 0
        if change := parent.ready - before:
            run = tenant.runs_in_turn.get(parent.run_id)
            if run is None:
                run = tenant.runs_in_turn[parent.run_id] = _Run()
            run.ready += change
            if parent.ready:
                run.parents[parent] = None
            else:
                del run.parents[parent]
            if not run.parents:
                del tenant.runs_in_turn[parent.run_id]
        self._join_turns(tenant)
        if not (tenant.in_line or tenant.holding):
            del self._tenants[tenant.key]
        if self._on_ready is not None and change:
            self._on_ready(parent, change)

    def _join_turns(self, tenant: _Tenant) -> None:
        """Give a tenant turns if the tenant may take a slot; otherwise remove it from the turns."""
        may_take = tenant.runs_in_turn and tenant.holding < self._tenant_limit
        if may_take and tenant.key not in self._blocked:
            self._tenants_in_turn.setdefault(tenant.key, tenant)
        else:
            self._tenants_in_turn.pop(tenant.key, None)


def _place_of(task: SubagentHandle) -> Place:
    assert task.place is not None
    return task.place


class PlaceSource(Protocol):
    """Source of places; a place permits a tenant to run one task. All workers share the places."""

    def take(self, tenant: UUID) -> bool:
        """Use a free place that this worker holds; return false if there is none."""
        ...

    async def wait(self, tenant: UUID) -> None:
        """Wait until the worker gets a place for the tenant; a cancelled wait takes no place."""
        ...

    def give_back(self, tenant: UUID) -> None: ...


class TenantPlaces:
    """Places that tasks need in addition to a slot. A task gets its place together with its slot.

    Args:
        came: function called when the worker gets a place for a tenant whose tasks waited for it.
    """

    def __init__(self, came: Callable[[], None]) -> None:
        self.source: PlaceSource | None = None
        self._came = came
        self._asks: dict[UUID, set[asyncio.Task[None]]] = {}
        self._unused: Counter[UUID] = Counter()

    def take_for_next(self, queue: TakeQueue, free: int) -> bool:
        """Take a place for the queue's next task; return false if no task can have a place.

        If the worker has no place for a tenant, the worker requests as many places as the tenant's
        tasks could use now, and the tenant gets no turn until a place arrives.

        Args:
            free: number of free slots.
        """
        while free > 0 and queue.ready:
            tenant = queue.turn
            if self.source is None or not isinstance(tenant, UUID):
                return True
            if self._unused[tenant]:
                self._unused[tenant] -= 1
                return True
            if self.source.take(tenant):
                return True
            asks = self._asks.setdefault(tenant, set())
            for _ in range(min(free, queue.ready_of(tenant)) - len(asks)):
                ask = self._get(self.source, queue, tenant)
                asks.add(asyncio.get_running_loop().create_task(ask))
            queue.block(tenant)
        return False

    def give_back(self, tenant: UUID | None) -> None:
        if self.source is not None and tenant is not None:
            self.source.give_back(tenant)

    def give_back_unused(self) -> None:
        """Give back places that no task can use: no slot is free, or no task needs a place."""
        for tenant in self._unused.elements():
            self.give_back(tenant)
        self._unused.clear()

    def stop(self) -> None:
        for asks in self._asks.values():
            for ask in asks:
                ask.cancel()

    async def _get(self, source: PlaceSource, queue: TakeQueue, tenant: UUID) -> None:
        try:
            await source.wait(tenant)
            self._unused[tenant] += 1
        finally:
            asks = self._asks[tenant]
            asks.discard(asyncio.current_task())
            if not asks:
                del self._asks[tenant]
            queue.unblock(tenant)
        self._came()


def estimated_start_ms(
    handle: SubagentHandle, durations: Sequence[float], queue: TakeQueue, slots: int, now: float
) -> int | None:
    """Return the milliseconds until a queued task starts, or ``None`` without an estimate.

    The estimate assumes that only siblings start before the task. An estimate is possible only if
    recent siblings took about the same time.

    Args:
        durations: seconds for which recent siblings held their slots.
        slots: number of slots that only the parent's tasks use.
    """
    parent = handle.parent
    if handle.place is None or slots < len(parent.holders):
        return None
    seconds_left = [max(durations) - (now - since) for since in parent.holders.values()]
    if min(seconds_left, default=0.0) < 0:
        return None  # a running task has taken longer than all recent tasks
    free = sorted([0.0] * (slots - len(seconds_left)) + seconds_left)
    mean = sum(durations) / len(durations)
    soon = late = 0.0
    for _ in range(2):  # at the estimated start, other tasks may have a better rank
        before = queue.before(handle, parent, now + 2 * late)
        soon, late = late, free[before % slots] + before // slots * mean
    return None if max(soon, late) > 2 * min(soon, late) else round(1000 * (soon + late) / 2)


def _durations(parent: Parent) -> list[float] | None:
    """Return the seconds for which recent tasks of a parent held their slots.

    The tasks belong to agents that also have unfinished tasks. Return ``None`` if an agent has
    fewer than 3 recent tasks, if the longest time is at least 1.8 times the shortest, or if an
    unfinished task neither waits in the queue nor holds its first slot.
    """
    durations = parent.durations
    if any(len(durations.get(agent, ())) < 3 for agent in parent.waiting):
        return None  # a quick check, before the slow checks below
    agents = {*parent.waiting, *(handle.agent_name for handle in parent.holders)}
    samples = [durations.get(agent, ()) for agent in agents]
    seconds = [each for one in samples for each in one]
    are_in_line = (
        parent.queued == parent.in_line
        and parent.here == parent.in_line + len(parent.holders)
        and all(handle.started_at == since for handle, since in parent.holders.items())
    )
    if not are_in_line or min(map(len, samples), default=0) < 3:
        return None
    return seconds if max(seconds) < 1.8 * min(seconds) else None


class TaskRegistry(Protocol):
    """The part of the registry that the scheduler needs."""

    limits: SubagentLimits
    counts: TaskCounts
    telemetry: Totals

    def transition(self, handle: SubagentHandle, status: SubagentStatus) -> None:
        """Change the status of a task."""

    def finish(self, handle: SubagentHandle, outcome: SubagentOutcome) -> bool:
        """End a task; return false if the task had already ended."""

    def cancel(self, task_id: UUID, reason: str) -> bool:
        """Cancel a task and all its descendants."""


logger = logging.getLogger(__name__)

PARENTS_TIME_IS_UP = "parent-timeout"


class SubagentScheduler:
    """Scheduler that assigns slots to tasks, runs the tasks and enforces the tasks' deadlines.

    Attributes:
        size: current number of slots.
        places: places that tasks need in addition to a slot, if all workers share a tenant's limit.
    """

    def __init__(self, options: SchedulerOptions | None = None) -> None:
        self.options = options or SchedulerOptions()
        self.size = self.options.min_workers
        self.places = TenantPlaces(self.pump_soon)
        self.circuits: Breakers
        self._queue: TakeQueue
        self._registry: TaskRegistry
        self._running: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pumping: asyncio.Handle | None = None
        self._resizing: asyncio.TimerHandle | None = None
        self._resized_at = float("-inf")

    def serve(self, registry: TaskRegistry) -> None:
        """Connect the scheduler to the registry, which calls this method."""
        self._registry = registry
        self.circuits = Breakers(
            self.options,
            registry.telemetry,
            call_at=lambda *about: asyncio.get_running_loop().call_at(*about),
            release=self.push,
        )
        self._queue = TakeQueue(
            self.options.ageing_interval,
            registry.limits.tenant_max_concurrent,
            on_ready=self._ready_changed,
        )

    def now(self) -> float:
        """Return the event loop's time in seconds; all times in this module use this clock."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a new loop: timers of the old loop never fire
            self.stop()
            self._loop = loop
        return loop.time()

    # For the registry

    @property
    def capacity(self) -> int:
        return min(self.size, self._registry.limits.max_concurrent_global)

    @property
    def in_use(self) -> int:
        return self._queue.holding()

    @property
    def parked(self) -> int:
        """Number of started tasks that hold no slot, because they wait for tasks or for a slot."""
        return self._registry.counts.active - self.in_use

    def room(self, parent: Parent) -> int:
        """Return the number of slots that a parent's tasks may get now."""
        other_tasks = len(self._queue) - parent.ready
        free = self.capacity - self.in_use - other_tasks
        own = parent.limits.max_concurrent - len(parent.holders)
        of_tenant = self._registry.limits.tenant_max_concurrent
        if parent.tenant_id is not None and of_tenant is not None:
            own = min(own, of_tenant - self._queue.holding(parent.tenant_id))
        return max(0, min(free, own))

    def position(self, handle: SubagentHandle, now: float) -> int:
        """Return the number of the tenant's waiting tasks that start before a task.

        If a breaker or an unfinished task holds the task back, the number is that of all waiting
        tasks of the tenant. For a child run, which does not wait in this queue, the number is 0.
        """
        if handle.is_remote:
            return 0
        if handle.place is None:
            return self._queue.in_line_of(handle.tenant_id)
        return self._queue.position(handle, now)

    def estimated_start_ms(self, handle: SubagentHandle) -> int | None:
        """Estimate the milliseconds until a queued task starts, or return ``None``."""
        parent, tenant = handle.parent, handle.tenant_id
        durations = _durations(parent)
        if durations is None:
            return None
        queue, counts = self._queue, self._registry.counts
        is_fixed = self.options.min_workers == self.options.max_workers
        limits = [(self.capacity, counts.active + len(queue), is_fixed)]
        of_tenant = self._registry.limits.tenant_max_concurrent
        if of_tenant is not None and tenant is not None:
            is_ours = self.places.source is None  # false: other workers' tasks also use the limit
            claims = counts.active_of[tenant] + queue.in_line_of(tenant)
            limits.append((of_tenant if is_ours else 0, claims, is_ours))
        slots, own = parent.limits.max_concurrent, parent.in_line + len(parent.holders)
        for limit, claims, is_fixed in limits:
            if claims - own + min(slots, own) > limit:
                if claims > own or not is_fixed:
                    return None
                slots = limit
        return estimated_start_ms(handle, durations, queue, slots, self.now())

    def enqueue(self, handle: SubagentHandle, now: float) -> None:
        """Queue a new task, unless a breaker or an unfinished task holds it back."""
        if handle.is_remote:
            asyncio.get_running_loop().call_soon(self._begin, handle)
        if self.circuits.admit(handle, now):
            self.push(handle)

    def hold(self, handle: SubagentHandle) -> None:
        """Remove a task from the queue, because the task must wait for other tasks."""
        if handle.status is SubagentStatus.QUEUED and handle.paused_at is None:
            self._queue.discard(handle)

    def released(self, handle: SubagentHandle, by: SubagentHandle) -> None:
        """Queue a task that waited for ``by``; send a warning if ``by`` is not completed."""
        if by.status is not SubagentStatus.COMPLETED and handle.status is SubagentStatus.QUEUED:
            name, other = handle.agent_name, by.agent_name
            text = f"'{name}' starts without the answer of '{other}': it is {by.status}"
            data = {"code": "upstream_failed", "message": text}
            handle.parent.listener.on_event(handle, "warning", data)
        self.push(handle)

    def ended(self, handle: SubagentHandle, now: float) -> None:
        """Stop a finished or suspended task: remove its timer, queue entry, slot and coroutine."""
        handle.stop_timer()
        self._queue.discard(handle)
        self.release(handle)
        if handle.running is not None:
            handle.running.cancel()
        self.circuits.ended(handle, now)

    def watch_over(self, handle: SubagentHandle) -> None:
        """End a task that has run for twice its timeout, which means that its timer was lost."""
        started = handle.started_at if handle.paused_at is None else None
        if started is not None and self.now() - started > 2 * handle.timeout:
            self.time_out(handle)

    def release(self, handle: SubagentHandle) -> None:
        """Release a task's slot, and cancel the task's request for a slot."""
        self._ask_no_more(handle)
        self._give_up_slot(handle)

    async def idle(self) -> None:
        await all_done(self._running)

    def stop(self) -> None:
        self.places.stop()
        for timer in (self._pumping, self._resizing):
            if timer is not None:
                timer.cancel()
        self._pumping = self._resizing = None

    # Slots

    def pump_soon(self) -> None:
        """Assign free slots in the event loop's next iteration, after all current dispatches."""
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        if self._pumping is not None:
            self._pumping.cancel()
            self._pumping = None
        self._give_out()
        if self._resize():
            self._give_out()
        self.places.give_back_unused()
        self._measure()

    def _give_out(self) -> None:
        while self.places.take_for_next(self._queue, self.capacity - self.in_use):
            now = self.now()
            handle = self._queue.take(now)
            assert handle is not None
            if handle.slot is not None:
                handle.slot.set_result(None)
                handle.slot = None
            elif self.circuits.admit(handle, now):
                self._start(handle, now)
            else:
                self._give_up_slot(handle)

    def push(self, handle: SubagentHandle, *, wakes: bool = False) -> None:
        """Queue a task, unless it is held back; ``wakes``: the task has already run and waited."""
        if not wakes and (
            handle.status is not SubagentStatus.QUEUED
            or handle.is_remote
            or handle.place is not None
            or handle.holds
        ):
            return
        if wakes:
            self._queue.push(handle, WAKE, self.now())
        else:
            self._queue.push(handle, handle.priority, handle.created_at)
        self.pump_soon()

    def _start(self, handle: SubagentHandle, now: float) -> None:
        if (seconds_left := handle.parent.time_for(handle.timeout, now)) <= 0:
            self._registry.cancel(handle.task_id, PARENTS_TIME_IS_UP)
            return
        handle.started_at = now
        if handle.deadline is None:
            handle.timeout, handle.deadline = seconds_left, now + seconds_left
        data = {
            "attempt": handle.attempt,
            "waited_ms": round((now - handle.created_at) * 1000),
            "timeout_ms": max(0, round((handle.deadline - now) * 1000)),
        }
        handle.parent.listener.on_event(handle, "dequeued", data)
        self._registry.telemetry.observe("subagent.queue.wait_ms", data["waited_ms"])
        loop = asyncio.get_running_loop()
        handle.timer = loop.call_at(handle.deadline, self.time_out, handle)
        self._begin(handle)

    def _begin(self, handle: SubagentHandle) -> None:
        if handle.status is SubagentStatus.QUEUED and not handle.suspended:
            self._registry.transition(handle, SubagentStatus.RUNNING)
            running = asyncio.get_running_loop().create_task(
                self._run(handle), context=handle.context
            )
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            handle.running, handle.context = running, None

    async def _run(self, handle: SubagentHandle) -> None:
        try:
            outcome = await handle.work(handle)
        except asyncio.CancelledError:
            if handle.status.is_final or handle.suspended:
                return
            outcome = SubagentOutcome.failed("cancelled_itself", "the task cancelled itself")
        except BudgetExhaustedError as error:
            outcome = SubagentOutcome.failed(error.code, error.detail)
        except Exception as error:
            outcome = SubagentOutcome.failed("task_failed", f"{type(error).__name__}: {error}")
            logger.exception("the work of task %s raised", handle.task_id)
        handle.running = None  # from here on nothing awaits
        since = handle.parent.holders.get(handle)
        took = self.now() - since if since is not None and since == handle.started_at else inf
        if self._registry.finish(handle, outcome) and not handle.is_remote:
            durations = handle.parent.durations.setdefault(handle.agent_name, deque(maxlen=10))
            durations.append(took)

    def time_out(self, handle: SubagentHandle) -> None:
        owner = handle.parent.owner
        seconds_left = None if owner is None else owner.left(self.now())
        if owner is not None and seconds_left is not None and seconds_left <= 0:
            self.time_out(owner)  # the end of the owner also ends this task
        if handle.status.is_final:
            return
        error = f"the task's time is up: it had {handle.timeout:.4g} s"
        outcome = SubagentOutcome(SubagentStatus.TIMEOUT, error=error, error_code="timeout")
        self._registry.finish(handle, outcome)

    def _give_up_slot(self, handle: SubagentHandle) -> None:
        if handle.holds_slot:
            self._queue.release(handle)
            self.places.give_back(handle.tenant_id)
            self.pump_soon()

    def _only_if_needed(self, handle: SubagentHandle) -> None:
        if not handle.calls:
            self._ask_no_more(handle)
            if handle.awaits:
                self._give_up_slot(handle)

    async def _need_slot(self, handle: SubagentHandle) -> None:
        while not handle.holds_slot:
            if handle.status.is_final or handle.suspended:
                raise asyncio.CancelledError
            if handle.slot is None:
                self._ask_for_slot(handle)
            assert handle.slot is not None
            await asyncio.shield(handle.slot)

    def _ask_for_slot(self, handle: SubagentHandle) -> None:
        handle.slot = asyncio.get_running_loop().create_future()
        if not handle.polling or not handle.waiting_below:
            handle.polling = False
            self.push(handle, wakes=True)

    def _ask_no_more(self, handle: SubagentHandle) -> None:
        if handle.slot is None:
            return
        handle.slot.cancel()
        handle.slot = None
        handle.polling = False
        self._queue.discard(handle)

    @asynccontextmanager
    async def parking(self, handle: SubagentHandle) -> AsyncIterator[None]:
        """Release a task's slot while the task waits; its next model call gets a slot again."""
        handle.awaits += 1
        self._only_if_needed(handle)
        try:
            yield
        finally:
            handle.awaits -= 1

    async def begin_call(self, handle: SubagentHandle) -> None:
        """Wait for a slot for a task's model call. The task's descendants get free slots first.

        The task holds the slot at least until :meth:`end_call`, unless this method raises an error.
        """
        handle.calls += 1
        try:
            if handle.calls == 1 and not handle.awaits and handle.waiting_below:
                self._pump()
                if handle.waiting_below:
                    handle.polling = True
                    self._give_up_slot(handle)
            if not handle.holds_slot:
                await self._need_slot(handle)
        except BaseException:
            self.end_call(handle)
            raise

    def end_call(self, handle: SubagentHandle) -> None:
        handle.calls -= 1
        self._only_if_needed(handle)

    def _ready_changed(self, parent: Parent, change: int) -> None:
        """Update ``waiting_below`` of all ancestors; queue ancestors that may continue."""
        owner = parent.owner
        while owner is not None:
            owner.waiting_below += change
            if owner.polling and not owner.waiting_below and owner.slot is not None:
                owner.polling = False
                self.push(owner, wakes=True)
            owner = owner.parent.owner

    # The pool's size

    def _resize(self) -> bool:
        """Resize the pool by its load; return true if the size changed.

        Call this method after the assignment of free slots: if many tasks end at the same time, the
        load looks low until then.
        """
        options, before = self.options, self.size
        if options.min_workers >= options.max_workers:
            return False
        loop = asyncio.get_running_loop()
        if loop.time() - self._resized_at >= options.resize_cooldown:
            size = resized(self.size, self.in_use, options)
            if size != self.size:
                self.size, self._resized_at = size, loop.time()
        if self._resizing is None and (self.in_use or self.size > options.min_workers):
            self._resizing = loop.call_later(options.resize_cooldown, self._resize_later)
        return self.size != before

    def _resize_later(self) -> None:
        self._resizing = None
        self._pump()

    def _measure(self) -> None:
        gauge = self._registry.telemetry.gauge
        gauge("subagent.queue.depth", len(self._queue))
        gauge("subagent.active.count", self._registry.counts.active)
        gauge("subagent.pool.size", self.size)
        gauge("subagent.pool.utilization", self.in_use / max(1, self.capacity))
