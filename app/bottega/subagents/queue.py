"""Queue of tasks that wait for a slot: ageing priorities, limits per parent and tenant. Pure.

Tenants take turns, and so do the runs of a tenant; within a run priorities decide. Priorities age,
so there is no fixed order of all entries. But of two entries with the same base priority the older
one is always first. So it is enough to compare the first entry of each priority: the queue keeps
one line by age per parent and priority, and per run and priority the heads of the lines whose
parent is below its limit. A parent that reaches its limit removes at most one head per priority,
however long its lines are.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any, TypeVar

from sortedcontainers import SortedList

Lines = dict[int, SortedList]
"""Per base priority a list of (enqueued_at, order, entry) by age; no list is empty."""


def head_of(lines: Lines, priority: int) -> tuple[float, int, Any] | None:
    line = lines.get(priority)
    return None if line is None else line[0]


def put(lines: Lines, priority: int, place: tuple[float, int, Any]) -> None:
    line = lines.get(priority)
    if line is None:
        line = lines[priority] = SortedList()
    line.add(place)


def remove(lines: Lines, priority: int, place: tuple[float, int, Any]) -> None:
    line = lines[priority]
    line.remove(place)
    if not line:
        del lines[priority]


def count(counts: dict[int, int], priority: int, by: int) -> None:
    counts[priority] = counts.get(priority, 0) + by
    if not counts[priority]:
        del counts[priority]


WAKE = 0
"""Priority of a task that already runs and needs its slot again; goes before all new tasks."""


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One entry of the queue; must not change while it waits.

    Attributes:
        run: takes turns with the tenant's other runs.
        parent: belongs to one run only.
        limit: slots that the parent may hold; the last pushed entry sets it for all.
        priority: 1 (first) to 10, or ``WAKE``.
        enqueued_at: seconds on the scheduler's clock; may be earlier than that of older entries.
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
    """Return the priority after ``waited`` seconds: one better per interval, at best 1."""
    if priority == WAKE:
        return WAKE
    return max(1, priority - floor(waited / ageing_interval))


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant with waiting or taken entries.

    Attributes:
        runs: the runs with waiting or taken entries.
        turns: the runs with ready entries; the first is next.
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
        heads: the first entries of the lines whose parent is below its limit.
        ready: number of entries in those lines, per priority.
    """

    key: Hashable
    tenant: _Tenant
    parents: int = 0
    heads: Lines = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of entries whose parent is below its limit."""
        return sum(self.ready.values())


_Turn = TypeVar("_Turn", _Tenant, _Run)


@dataclass(slots=True, eq=False)
class _Parent:
    key: Hashable
    run: _Run
    limit: int
    has_room: bool = True
    taken: int = 0
    size: int = 0
    lines: Lines = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Number of entries that could be taken if a slot were free."""
        return self.size if self.has_room else 0


class TakeQueue:
    """Queue that selects the next entry: by tenant in turn, then by run in turn, then by priority.

    A tenant or run that has ready entries again joins at the end of the turns. A change costs
    O(log n), independent of other tenants, runs and parents, and of the entries of a parent at its
    limit.

    Args:
        ageing_interval: seconds after which a waiting entry gains one priority.
        tenant_limit: slots that one tenant may hold; ``None``: no limit.
        on_waiting: called with a parent and a difference whenever ``waiting(parent)`` changes. It
            is the last step of a change, so it may change the queue itself.
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
        self._newest = (-inf, 0)
        self._blocked: set[Hashable] = set()

    def __len__(self) -> int:
        """Return the number of waiting entries, those of parents at their limit included."""
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
        self._newest = max(self._newest, (entry.enqueued_at, entry.order))
        self._shift(parent, entry, +1)
        self._settle(parent, before)

    def discard(self, entry: QueueEntry) -> bool:
        """Remove a waiting entry; return false if it does not wait."""
        if entry not in self._entries:
            return False
        parent = self._parents[entry.parent]
        before = parent.waiting
        self._shift(parent, entry, -1)
        self._settle(parent, before)
        return True

    def take(self, now: float) -> QueueEntry | None:
        """Remove and return the next ready entry; it counts as taken until :meth:`release`."""
        if not self._turns:
            return None
        tenant = next(iter(self._turns.values()))
        run = next(iter(tenant.turns.values()))
        heads = (line[0] for line in run.heads.values())
        _, _, _, entry = min((self._effective(head[2], now), *head) for head in heads)
        self._turns.move_to_end(tenant.key)
        tenant.turns.move_to_end(run.key)
        parent = self._parents[entry.parent]
        before = parent.waiting
        self._shift(parent, entry, -1)
        self._hold(parent, +1)
        self._settle(parent, before)
        chosen: QueueEntry = entry
        return chosen

    def release(self, tenant: Hashable, parent: Hashable) -> None:
        """Release one taken entry of a parent.

        Raises:
            ValueError: that tenant and parent have no taken entry.
        """
        holder = self._parents.get(parent)
        if holder is None or holder.run.tenant.key != tenant or not holder.taken:
            raise ValueError(f"{parent!r} has no taken entry")
        before = holder.waiting
        self._hold(holder, -1)
        self._settle(holder, before)

    @property
    def ready(self) -> bool:
        return bool(self._turns)

    @property
    def turn(self) -> Hashable:
        """The tenant of the entry that :meth:`take` would return; there must be one."""
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

        The tenant's limit does not count: a released slot makes room for the tenant, too.
        """
        found = self._parents.get(parent)
        return found.waiting if found else 0

    def entries_of(self, parent: Hashable) -> int:
        """Count all waiting entries of a parent, even at its limit."""
        return self._parents[parent].size if parent in self._parents else 0

    def entries_of_tenant(self, tenant: Hashable) -> int:
        """Count all waiting entries of a tenant, those of parents at their limit included."""
        return self._tenants[tenant].size if tenant in self._tenants else 0

    def holding(self, tenant: Hashable = None) -> int:
        """Count the entries taken and not released, of one tenant or of all."""
        if tenant is None:
            return self._taken
        return self._tenants[tenant].taken if tenant in self._tenants else 0

    def holding_of(self, parent: Hashable) -> int:
        return self._parents[parent].taken if parent in self._parents else 0

    def position(self, entry: QueueEntry, now: float) -> int:
        """Count the ready entries of the same tenant that go before a waiting entry.

        They are the better entries of its own parent, ready or not, and of its own run, and, since
        runs take turns, as many of each other run, plus one if that run's turn is earlier. Looks at
        all runs with ready entries, and at the parents of its own run whose head of a priority goes
        before it. A priority of which all entries go before it (its own and better ones, for a new
        entry) costs nothing.
        """
        run = self._parents[entry.parent].run
        better = self._better(entry, now)
        ahead, turns = better, better + 1
        for other in run.tenant.turns.values():
            if other is run:
                turns = better
            else:
                ahead += min(turns, other.size)
        return ahead

    def _better(self, entry: QueueEntry, now: float) -> int:
        parent = self._parents[entry.parent]
        run = parent.run
        ahead = 0 if parent.has_room else self.siblings_before(entry, now)
        for priority, heads in run.heads.items():
            end = self._end(entry, priority, now)
            if end >= self._newest:
                itself = parent.has_room and priority == entry.priority
                ahead += run.ready[priority] - itself
                continue
            for _, _, head in heads.irange(maximum=end, inclusive=(True, False)):
                ahead += self._parents[head.parent].lines[priority].bisect_left(end)
        return ahead

    def siblings_before(self, entry: QueueEntry, now: float) -> int:
        """Count the entries of the same parent that go before a waiting entry."""
        lines = self._parents[entry.parent].lines
        return sum(
            line.bisect_left(self._end(entry, priority, now)) for priority, line in lines.items()
        )

    def _end(self, entry: QueueEntry, priority: int, now: float) -> tuple[float, float]:
        """Return the (enqueued_at, order) below which entries of a priority go before ``entry``."""
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
        """Return the latest ``enqueued_at`` that gives an effective priority ≤ ``wanted``."""
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

    def _shift(self, parent: _Parent, entry: QueueEntry, by: int) -> None:
        """Add an entry to its line (``by`` = 1) or remove it (-1)."""
        run, priority = parent.run, entry.priority
        place = entry.enqueued_at, entry.order, entry
        before = head_of(parent.lines, priority)
        if by > 0:
            self._entries.add(entry)
            put(parent.lines, priority, place)
        else:
            self._entries.remove(entry)
            remove(parent.lines, priority, place)
        parent.size += by
        run.tenant.size += by
        if parent.has_room:
            after = head_of(parent.lines, priority)
            if before is not after:
                if before is not None:
                    remove(run.heads, priority, before)
                if after is not None:
                    put(run.heads, priority, after)
            count(run.ready, priority, by)

    def _hold(self, parent: _Parent, by: int) -> None:
        parent.taken += by
        parent.run.tenant.taken += by
        self._taken += by

    def _settle(self, parent: _Parent, before: int) -> None:
        """Update the heads and turns after a parent's change; forget it if it has no entries.

        Args:
            before: ``parent.waiting`` before the change.
        """
        run, tenant = parent.run, parent.run.tenant
        if parent.has_room != (parent.taken < parent.limit):
            parent.has_room = not parent.has_room
            by = 1 if parent.has_room else -1
            change = put if parent.has_room else remove
            for priority, line in parent.lines.items():
                change(run.heads, priority, line[0])
                count(run.ready, priority, by * len(line))
        _take_part(tenant.turns, run, bool(run.heads))
        self._join_turns(tenant)
        if not parent.size and not parent.taken:
            self._forget(parent)
        if self._on_waiting is not None and parent.waiting != before:
            self._on_waiting(parent.key, parent.waiting - before)

    def _join_turns(self, tenant: _Tenant) -> None:
        may = bool(tenant.turns) and tenant.taken < self._tenant_limit
        _take_part(self._turns, tenant, may and tenant.key not in self._blocked)

    def _forget(self, parent: _Parent) -> None:
        """Remove a parent, and its run and tenant if it was their last."""
        run, tenant = parent.run, parent.run.tenant
        del self._parents[parent.key]
        run.parents -= 1
        if not run.parents:
            del tenant.runs[run.key]
        if not tenant.runs:
            del self._tenants[tenant.key]


def _take_part(turns: "OrderedDict[Hashable, _Turn]", one: _Turn, may: bool) -> None:
    """Add a tenant or run at the end of the turns, or remove it; do nothing if already so."""
    if not may:
        turns.pop(one.key, None)
    elif one.key not in turns:
        turns[one.key] = one
