"""Queue of tasks that wait for a slot: ageing priorities, limits per parent and tenant. Pure.

Tenants take turns, and so do the runs of a tenant; within a run priorities decide. The priority of
a task rises with the time it waits, so the order of tasks changes. But of two tasks with equal base
priority, the older task always goes first. So each parent has one line for each base priority,
sorted by age. :meth:`TakeQueue.take` compares only the first tasks of the lines of the run's ready
parents. A parent is ready if it holds fewer slots than its limit.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import floor, inf

from bottega.subagents.handle import Parent, Place, SubagentHandle

WAKE = 0
"""Priority of a running task that needs its slot again; it goes before all new tasks."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant whose tasks wait in the queue or hold slots.

    Attributes:
        parents: number of parents of these tasks.
        in_line: number of waiting tasks.
        holding: number of tasks that hold a slot.
        turns: the runs with ready parents, and these parents; the first run is next.
    """

    key: Hashable
    parents: int = 0
    in_line: int = 0
    holding: int = 0
    turns: OrderedDict[Hashable, dict[Parent, None]] = field(default_factory=OrderedDict)


class TakeQueue:
    """Queue that selects the next task: by tenant in turn, then by run in turn, then by priority.

    A tenant or run that has ready tasks again joins at the end of the turns. A take reads only the
    ready parents of one run, so tasks of parents at their limit cost nothing. The queue keeps the
    lines, ``in_line``, ``ready`` and the holders of slots of each parent.

    Args:
        ageing_interval: seconds after which a waiting task rises by one priority.
        tenant_limit: slots that one tenant may hold; ``None``: no limit.
        on_ready: called with (parent, difference) whenever a parent's ``ready`` changes. It is
            called at the end of a change, so that it may change the queue.
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
        self._turns: OrderedDict[Hashable, _Tenant] = OrderedDict()
        self._in_line = self._holding = 0
        self._orders = count()
        self._blocked: set[Hashable] = set()

    def __len__(self) -> int:
        """Return the number of waiting tasks, also of parents at their limit."""
        return self._in_line

    def push(self, task: SubagentHandle, priority: int, enqueued_at: float) -> None:
        """Add a task.

        Args:
            priority: 1 (first) to 10, or ``WAKE``.
            enqueued_at: seconds on the scheduler's clock; a later push may have an earlier time.

        Raises:
            ValueError: the task already waits.
        """
        if task.place is not None:
            raise ValueError("a task may wait only once")
        task.place, task.line = (enqueued_at, next(self._orders)), priority
        insort(task.parent.lines.setdefault(priority, []), (task.place, task))
        self._change(task.parent, in_line=+1)

    def discard(self, task: SubagentHandle) -> bool:
        """Remove a waiting task; return false if it does not wait."""
        if task.place is None:
            return False
        self._remove(task)
        self._change(task.parent, in_line=-1)
        return True

    def take(self, now: float) -> SubagentHandle | None:
        """Remove and return the next ready task; it holds a slot until :meth:`release`."""
        if not self._turns:
            return None
        tenant = next(iter(self._turns.values()))
        run, parents = next(iter(tenant.turns.items()))
        heads = (line[0] for parent in parents for line in parent.lines.values())
        _, task = min(
            heads, key=lambda head: (self._effective(head[1].line, head[0], now), head[0])
        )
        self._turns.move_to_end(tenant.key)
        tenant.turns.move_to_end(run)
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
        return bool(self._turns)

    @property
    def turn(self) -> Hashable:
        """The tenant of the task that :meth:`take` would return; a task must be ready."""
        return next(iter(self._turns))

    def block(self, tenant: Hashable) -> None:
        """Take none of a tenant's tasks until :meth:`unblock`."""
        self._blocked.add(tenant)
        self._turns.pop(tenant, None)

    def unblock(self, tenant: Hashable) -> None:
        self._blocked.discard(tenant)
        if tenant in self._tenants:
            self._join_turns(self._tenants[tenant])

    def ready_of(self, tenant: Hashable) -> int:
        """Count a tenant's tasks that could start if slots were free, without its own limit."""
        return sum(map(_ready, self._tenants[tenant].turns.values()))

    def in_line_of(self, tenant: Hashable) -> int:
        """Count all waiting tasks of a tenant, also of parents at their limit."""
        return self._tenants[tenant].in_line if tenant in self._tenants else 0

    def holding(self, tenant: Hashable = None) -> int:
        """Count the tasks that hold a slot, of one tenant or of all tenants."""
        if tenant is None:
            return self._holding
        return self._tenants[tenant].holding if tenant in self._tenants else 0

    def position(self, task: SubagentHandle, now: float) -> int:
        """Count the ready tasks of the same tenant that go before a waiting task.

        These are the tasks of its own parent (ready or not) and of its own run that go before it.
        Because runs take turns, as many tasks of each other run go before it, and one more if that
        run's turn is earlier. The cost grows with the tenant's ready parents.
        """
        parent = task.parent
        turns = self._tenants[parent.tenant_id].turns
        siblings = {**turns.get(parent.run_id, {}), parent: None}
        better = sum(self._before(each, task, now) for each in siblings)
        ahead, takes = better, better + 1
        for run, parents in turns.items():
            if run == parent.run_id:
                takes = better
            else:
                ahead += min(takes, _ready(parents))
        return ahead

    def siblings_before(self, task: SubagentHandle, now: float) -> int:
        """Count the tasks of the same parent that go before a waiting task."""
        return self._before(task.parent, task, now)

    def _before(self, parent: Parent, task: SubagentHandle, now: float) -> int:
        """Count a parent's tasks that go before a waiting task."""
        return sum(
            bisect_left(line, (self._end(task, priority, now),))
            for priority, line in parent.lines.items()
        )

    def _end(self, task: SubagentHandle, priority: int, now: float) -> tuple[float, float]:
        """Return a bound: the tasks of ``priority`` whose place is below it go before ``task``."""
        own = task.place
        assert own is not None
        if priority == task.line:
            return own
        if WAKE in (priority, task.line):
            return (inf, inf) if priority == WAKE else (-inf, 0)
        best = self._effective(task.line, own, now)
        equal_until = self._reached(priority, best, now)
        better_until = self._reached(priority, best - 1, now) if best > 1 else -inf
        return max((better_until, inf), min((equal_until, inf), own))

    def _reached(self, priority: int, wanted: int, now: float) -> float:
        """Return the latest time of a push with which a priority has risen to ``wanted``."""
        steps = priority - wanted
        return now - steps * self._ageing_interval if steps > 0 else inf

    def _effective(self, priority: int, place: Place, now: float) -> int:
        """Return the priority of a task at a place: it rises by one per interval, up to 1."""
        if priority == WAKE:
            return WAKE
        return max(1, priority - floor((now - place[0]) / self._ageing_interval))

    def _remove(self, task: SubagentHandle) -> None:
        lines = task.parent.lines
        line = lines[task.line]
        del line[bisect_left(line, (task.place,))]
        if not line:
            del lines[task.line]
        task.place = None

    def _change(self, parent: Parent, *, in_line: int = 0, holding: int = 0) -> None:
        """Change the numbers of a parent's tasks; update the turns.

        Args:
            holding: change of the number of holders, which has happened already.
        """
        tenant = self._tenants.setdefault(parent.tenant_id, _Tenant(parent.tenant_id))
        was_here = parent.in_line + len(parent.holders) > holding
        self._in_line += in_line
        self._holding += holding
        tenant.in_line += in_line
        tenant.holding += holding
        parent.in_line += in_line
        before, has_room = parent.ready, len(parent.holders) < parent.limits.max_concurrent
        parent.ready = parent.in_line if has_room else 0
        if parent.ready:
            tenant.turns.setdefault(parent.run_id, {})[parent] = None
        elif (parents := tenant.turns.get(parent.run_id)) is not None:
            parents.pop(parent, None)
            if not parents:
                del tenant.turns[parent.run_id]
        self._join_turns(tenant)
        tenant.parents += bool(parent.in_line or parent.holders) - was_here
        if not tenant.parents:
            del self._tenants[tenant.key]
        if self._on_ready is not None and parent.ready != before:
            self._on_ready(parent, parent.ready - before)

    def _join_turns(self, tenant: _Tenant) -> None:
        """Let a tenant join at the end of the turns, keep its turn, or leave the turns."""
        may_take = tenant.turns and tenant.holding < self._tenant_limit
        if may_take and tenant.key not in self._blocked:
            self._turns.setdefault(tenant.key, tenant)
        else:
            self._turns.pop(tenant.key, None)


def _ready(parents: Iterable[Parent]) -> int:
    return sum(parent.ready for parent in parents)
