"""Queue of tasks that wait for a slot: ageing priorities, limits per parent and tenant. Pure.

Tenants take turns, and so do the runs of a tenant; within a run priorities decide. The priority of
an entry rises with its age, so the order of entries changes. But of two entries with equal base
priority, the older entry always goes first. So each parent has one line for each base priority,
sorted by age. :meth:`TakeQueue.take` compares only the first entries of the lines of the run's
ready parents. A parent is ready if it holds fewer slots than its limit.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any, TypeVar

WAKE = 0
"""Priority of a running task that needs its slot again; it goes before all new tasks."""


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One entry of the queue; must not change while it waits.

    Attributes:
        run: the run, which takes turns with the tenant's other runs.
        parent: the parent, which belongs to one run only.
        limit: slots that the parent may hold; the last pushed entry sets the parent's limit.
        priority: 1 (first) to 10, or ``WAKE``.
        enqueued_at: seconds on the scheduler's clock; a later push may have an earlier time.
        item: the scheduler's payload.
        order: set by the queue at the first push; breaks ties of ``enqueued_at``.
    """

    tenant: Hashable
    run: Hashable
    parent: Hashable
    limit: int
    priority: int
    enqueued_at: float
    item: Any
    order: int = 0


def effective_priority(priority: int, waited: float, ageing_interval: float) -> int:
    """Return the priority after ``waited`` seconds: it rises by one per interval, up to 1."""
    if priority == WAKE:
        return WAKE
    return max(1, priority - floor(waited / ageing_interval))


Place = tuple[float, int]
"""Enqueueing time and order of an entry. A line is sorted by this pair."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant with waiting or taken entries.

    Attributes:
        runs: the runs with waiting or taken entries.
        turns: the runs with ready parents; the first is next.
        size: number of waiting entries.
    """

    key: Hashable
    taken: int = 0
    runs: "dict[Hashable, _Run]" = field(default_factory=dict)
    turns: "OrderedDict[Hashable, _Run]" = field(default_factory=OrderedDict)
    size: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """A run with waiting or taken entries.

    Attributes:
        ready: its parents below their limits with waiting entries.
    """

    key: Hashable
    tenant: _Tenant
    parents: int = 0
    ready: "dict[Hashable, _Parent]" = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of entries whose parent is below its limit."""
        return sum(parent.size for parent in self.ready.values())


_Turn = TypeVar("_Turn", _Tenant, _Run)


@dataclass(slots=True, eq=False)
class _Parent:
    """A parent with waiting or taken entries.

    Attributes:
        lines: waiting entries by age, for each base priority; no line is empty.
    """

    key: Hashable
    run: _Run
    limit: int
    taken: int = 0
    size: int = 0
    lines: dict[int, list[tuple[Place, QueueEntry]]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Number of entries that could be taken if a slot were free."""
        return self.size if self.taken < self.limit else 0

    def heads(self) -> Iterator[QueueEntry]:
        """Yield the first entry of each line."""
        return (line[0][1] for line in self.lines.values())


class TakeQueue:
    """Queue that selects the next entry: by tenant in turn, then by run in turn, then by priority.

    A tenant or run that has ready entries again joins at the end of the turns. A take reads only
    the ready parents of one run, so entries of parents at their limit cost nothing.

    Args:
        ageing_interval: seconds after which a waiting entry rises by one priority.
        tenant_limit: slots that one tenant may hold; ``None``: no limit.
        on_waiting: called with (parent, difference) whenever ``waiting(parent)`` changes. It is
            called at the end of a change, so that it may change the queue.
    """

    def __init__(
        self,
        ageing_interval: float = 5.0,
        tenant_limit: int | None = None,
        on_waiting: Callable[[Hashable, int], None] | None = None,
    ) -> None:
        self._ageing_interval = ageing_interval
        self._tenant_limit = inf if tenant_limit is None else tenant_limit
        self._on_waiting = on_waiting
        self._entries: set[QueueEntry] = set()
        self._parents: dict[Hashable, _Parent] = {}
        self._tenants: dict[Hashable, _Tenant] = {}
        self._turns: OrderedDict[Hashable, _Tenant] = OrderedDict()
        self._taken = 0
        self._pushed = 0
        self._blocked: set[Hashable] = set()

    def __len__(self) -> int:
        """Return the number of waiting entries, also of parents at their limit."""
        return len(self._entries)

    def push(self, entry: QueueEntry) -> None:
        """Add an entry.

        Raises:
            ValueError: the entry already waits.
        """
        if entry in self._entries:
            raise ValueError("an entry may wait only once")
        if not entry.order:
            self._pushed += 1
            entry.order = self._pushed
        parent = self._parents.get(entry.parent) or self._join(entry)
        before = parent.waiting
        parent.limit = entry.limit
        insort(parent.lines.setdefault(entry.priority, []), (_place(entry), entry))
        self._entries.add(entry)
        self._update_turns(parent, before, more=+1)

    def discard(self, entry: QueueEntry) -> bool:
        """Remove a waiting entry; return false if it does not wait."""
        if entry not in self._entries:
            return False
        parent = self._parents[entry.parent]
        before = parent.waiting
        self._remove(parent, entry)
        self._update_turns(parent, before, more=-1)
        return True

    def take(self, now: float) -> QueueEntry | None:
        """Remove and return the next ready entry; it counts as taken until :meth:`release`."""
        if not self._turns:
            return None
        tenant = next(iter(self._turns.values()))
        run = next(iter(tenant.turns.values()))
        heads = (entry for parent in run.ready.values() for entry in parent.heads())
        entry = min(heads, key=lambda head: (self._effective(head, now), _place(head)))
        self._turns.move_to_end(tenant.key)
        tenant.turns.move_to_end(run.key)
        parent = self._parents[entry.parent]
        before = parent.waiting
        self._remove(parent, entry)
        self._count_taken(parent, +1)
        self._update_turns(parent, before, more=-1)
        return entry

    def release(self, tenant: Hashable, parent: Hashable) -> None:
        """Release one taken entry of a parent.

        Raises:
            ValueError: that tenant and parent have no taken entry.
        """
        holder = self._parents.get(parent)
        if holder is None or holder.run.tenant.key != tenant or not holder.taken:
            raise ValueError(f"{parent!r} has no taken entry")
        before = holder.waiting
        self._count_taken(holder, -1)
        self._update_turns(holder, before)

    @property
    def ready(self) -> bool:
        return bool(self._turns)

    @property
    def turn(self) -> Hashable:
        """The tenant of the entry that :meth:`take` would return; an entry must be ready."""
        return next(iter(self._turns))

    def block(self, tenant: Hashable) -> None:
        """Take none of a tenant's entries until :meth:`unblock`."""
        self._blocked.add(tenant)
        self._turns.pop(tenant, None)

    def unblock(self, tenant: Hashable) -> None:
        self._blocked.discard(tenant)
        if tenant in self._tenants:
            self._join_turns(self._tenants[tenant])

    def ready_of(self, tenant: Hashable) -> int:
        """Count a tenant's entries whose parent is below its limit."""
        return sum(run.size for run in self._tenants[tenant].turns.values())

    def waiting(self, parent: Hashable) -> int:
        """Count a parent's entries that could be taken if a slot were free; 0 at its limit.

        The tenant's limit is ignored, because a released slot makes room for the tenant, too.
        """
        return self._parents[parent].waiting if parent in self._parents else 0

    def entries_of(self, parent: Hashable) -> int:
        """Count all waiting entries of a parent, even at its limit."""
        return self._parents[parent].size if parent in self._parents else 0

    def entries_of_tenant(self, tenant: Hashable) -> int:
        """Count all waiting entries of a tenant, also of parents at their limit."""
        return self._tenants[tenant].size if tenant in self._tenants else 0

    def holding(self, tenant: Hashable = None) -> int:
        """Count the entries taken and not released, of one tenant or of all tenants."""
        if tenant is None:
            return self._taken
        return self._tenants[tenant].taken if tenant in self._tenants else 0

    def holding_of(self, parent: Hashable) -> int:
        return self._parents[parent].taken if parent in self._parents else 0

    def position(self, entry: QueueEntry, now: float) -> int:
        """Count the ready entries of the same tenant that go before a waiting entry.

        These are the entries of its own parent (ready or not) and of its own run that go before it.
        Because runs take turns, as many entries of each other run go before it, and one more if
        that run's turn is earlier. The cost grows with the tenant's ready parents.
        """
        parent = self._parents[entry.parent]
        run = parent.run
        siblings = (ready for ready in run.ready.values() if ready is not parent)
        better = sum(self._before(each, entry, now) for each in (parent, *siblings))
        ahead, turns = better, better + 1
        for other in run.tenant.turns.values():
            if other is run:
                turns = better
            else:
                ahead += min(turns, other.size)
        return ahead

    def siblings_before(self, entry: QueueEntry, now: float) -> int:
        """Count the entries of the same parent that go before a waiting entry."""
        return self._before(self._parents[entry.parent], entry, now)

    def _before(self, parent: _Parent, entry: QueueEntry, now: float) -> int:
        """Count a parent's entries that go before a waiting entry."""
        return sum(
            bisect_left(line, (self._end(entry, priority, now),))
            for priority, line in parent.lines.items()
        )

    def _end(self, entry: QueueEntry, priority: int, now: float) -> tuple[float, float]:
        """Return a bound: entries of ``priority`` below this (time, order) go before ``entry``."""
        own = entry.enqueued_at, entry.order
        if priority == entry.priority:
            return own
        if WAKE in (priority, entry.priority):
            return (inf, inf) if priority == WAKE else (-inf, 0)
        best = self._effective(entry, now)
        equal_until = self._reached(priority, best, now)
        better_until = self._reached(priority, best - 1, now) if best > 1 else -inf
        return max((better_until, inf), min((equal_until, inf), own))

    def _reached(self, priority: int, wanted: int, now: float) -> float:
        """Return the latest ``enqueued_at`` with which a priority has risen to ``wanted``."""
        steps = priority - wanted
        return now - steps * self._ageing_interval if steps > 0 else inf

    def _effective(self, entry: QueueEntry, now: float) -> int:
        return effective_priority(entry.priority, now - entry.enqueued_at, self._ageing_interval)

    def _join(self, entry: QueueEntry) -> _Parent:
        tenant = self._tenants.setdefault(entry.tenant, _Tenant(entry.tenant))
        run = tenant.runs.setdefault(entry.run, _Run(entry.run, tenant))
        run.parents += 1
        parent = self._parents[entry.parent] = _Parent(entry.parent, run, entry.limit)
        return parent

    def _remove(self, parent: _Parent, entry: QueueEntry) -> None:
        line = parent.lines[entry.priority]
        del line[bisect_left(line, (_place(entry),))]
        if not line:
            del parent.lines[entry.priority]
        self._entries.remove(entry)

    def _count_taken(self, parent: _Parent, by: int) -> None:
        parent.taken += by
        parent.run.tenant.taken += by
        self._taken += by

    def _update_turns(self, parent: _Parent, before: int, more: int = 0) -> None:
        """Update the turns after a parent's change; forget a parent without entries.

        Args:
            before: ``parent.waiting`` before the change.
            more: change of the number of waiting entries.
        """
        run, tenant = parent.run, parent.run.tenant
        parent.size += more
        tenant.size += more
        if parent.waiting:
            run.ready[parent.key] = parent
        else:
            run.ready.pop(parent.key, None)
        _take_part(tenant.turns, run, bool(run.ready))
        self._join_turns(tenant)
        if not parent.size and not parent.taken:
            self._forget(parent)
        if self._on_waiting is not None and parent.waiting != before:
            self._on_waiting(parent.key, parent.waiting - before)

    def _join_turns(self, tenant: _Tenant) -> None:
        may = bool(tenant.turns) and tenant.taken < self._tenant_limit
        _take_part(self._turns, tenant, may and tenant.key not in self._blocked)

    def _forget(self, parent: _Parent) -> None:
        """Remove a parent, and its run and tenant if they have no other parent."""
        run, tenant = parent.run, parent.run.tenant
        del self._parents[parent.key]
        run.parents -= 1
        if not run.parents:
            del tenant.runs[run.key]
        if not tenant.runs:
            del self._tenants[tenant.key]


def _take_part(turns: "OrderedDict[Hashable, _Turn]", one: _Turn, may: bool) -> None:
    """Add a tenant or run at the end of the turns if it is missing, or remove it."""
    if not may:
        turns.pop(one.key, None)
    elif one.key not in turns:
        turns[one.key] = one


def _place(entry: QueueEntry) -> Place:
    return entry.enqueued_at, entry.order
