"""What waits for a slot: priorities that age, room per parent and tenant (spec page 3, S7). Pure.

Tenants take turns, and so do the runs of a tenant; within a run priorities decide. Ageing rules out
one fixed order of all that wait. But of two that came in with the same priority the earlier is
always first, so it is enough to compare the first of each priority: per parent and priority one
line by age, per run and priority the heads of those lines whose parent has room. A parent at its
limit takes its heads away, at most one per priority, however many wait behind.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any, TypeVar

from sortedcontainers import SortedList

WAKE = 0
"""The priority of what ran before and only needs its slot again: ahead of all that is new."""


@dataclass(slots=True, eq=False)
class Entry:
    """One thing that waits for a slot; not to be changed while it does.

    Attributes:
        run: takes turns with the tenant's other runs.
        parent: whose limit counts; of one run only.
        limit: how many of that parent may hold a slot; the last one pushed says it for all.
        priority: 1 (first) to 10, or ``WAKE``.
        enqueued_at: seconds on the scheduler's clock; may lie before what waits already.
        item: what the scheduler does with it.
        order: set by the queue, kept if pushed again; decides between two of the same time.
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
    """The priority after ``waited`` seconds: one better per interval, at best 1."""
    if priority == WAKE:
        return WAKE
    return max(1, priority - floor(waited / ageing_interval))


_Lines = dict[int, SortedList]
"""Per base priority (enqueued_at, order, entry) by age; without empty lines."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """
    Attributes:
        runs: those that have something waiting or taken.
        turns: those of them that have something ready; the first is next.
        waiting: how many wait at all, per priority.
    """

    key: Hashable
    taken: int = 0
    runs: "dict[Hashable, _Run]" = field(default_factory=dict)
    turns: "OrderedDict[Hashable, _Run]" = field(default_factory=OrderedDict)
    waiting: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Run:
    """
    Attributes:
        heads: of the lines of its parents that have room.
        ready: how many wait in those lines, per priority.
    """

    key: Hashable
    tenant: _Tenant
    parents: int = 0
    heads: _Lines = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Count the waiting tasks that have room."""
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
    lines: _Lines = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """How many could be taken if a slot were free."""
        return self.size if self.has_room else 0


class TakeQueue:
    """Says who gets the next slot: tenants in turn, then a tenant's runs, then the best priority.

    A tenant or run that has something to take again joins at the end of the turns. A change costs
    O(log n) and no look at other tenants, other runs, other parents, or what waits behind a parent
    at its limit.

    Args:
        ageing_interval: what waits gains one priority in this time, in seconds.
        tenant_limit: how many of one tenant may hold a slot; ``None``: any number.
        on_waiting: called with a parent and a difference whenever ``waiting(parent)`` has changed,
            as the last thing of a change: it may change the queue itself.
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
        self._entries: set[Entry] = set()
        self._parents: dict[Hashable, _Parent] = {}
        self._tenants: dict[Hashable, _Tenant] = {}
        self._turns: OrderedDict[Hashable, _Tenant] = OrderedDict()
        self._waiting: dict[int, int] = {}
        self._taken = 0
        self._pushed = 0
        self._newest = (-inf, 0)

    def __len__(self) -> int:
        """All that wait, also behind parents at their limit."""
        return len(self._entries)

    def push(self, entry: Entry) -> None:
        """Let it wait: it may be taken as soon as there is room.

        Raises:
            ValueError: it waits already.
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

    def discard(self, entry: Entry) -> bool:
        """It waits no more. ``False``: it did not."""
        if entry not in self._entries:
            return False
        parent = self._parents[entry.parent]
        before = parent.waiting
        self._shift(parent, entry, -1)
        self._settle(parent, before)
        return True

    def take(self, now: float) -> Entry | None:
        """The next one, if there is room for any; it counts as taken until it is released."""
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
        chosen: Entry = entry
        return chosen

    def release(self, tenant: Hashable, parent: Hashable) -> None:
        """One that was taken gives its room back.

        Raises:
            ValueError: none of that tenant's and parent's is taken.
        """
        holder = self._parents.get(parent)
        if holder is None or holder.run.tenant.key != tenant or not holder.taken:
            raise ValueError(f"nothing of {parent!r} is taken")
        before = holder.waiting
        self._hold(holder, -1)
        self._settle(holder, before)

    def ready(self, now: float) -> bool:
        """Whether there is something that :meth:`take` would answer with."""
        return bool(self._turns)

    def waiting(self, parent: Hashable) -> int:
        """How many of a parent could be taken if a slot were free: none while it is at its limit.

        The tenant's limit does not count: whoever gives a slot up makes room there, too.
        """
        found = self._parents.get(parent)
        return found.waiting if found else 0

    def by_priority(self, tenant: Hashable = None) -> dict[int, int]:
        """How many wait per base priority, of one tenant or of all."""
        if tenant is None:
            return dict(self._waiting)
        return dict(self._tenants[tenant].waiting) if tenant in self._tenants else {}

    def holding(self, tenant: Hashable = None) -> int:
        """How many are taken and not released, of one tenant or of all."""
        if tenant is None:
            return self._taken
        return self._tenants[tenant].taken if tenant in self._tenants else 0

    def holding_of(self, parent: Hashable) -> int:
        """How many of a parent are taken and not released."""
        return self._parents[parent].taken if parent in self._parents else 0

    def position(self, entry: Entry, now: float) -> int:
        """How many of its tenant's that have room would go before one that waits.

        Of its run those that are better; of each other run, since they take turns, as many, and one
        more if the turn of that run comes before. Costs a look at the runs that have something
        ready, and at those parents of its own run whose first of a priority goes before it; nothing
        for a priority of which all do, as of its own and better ones when it is new.
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

    def _better(self, entry: Entry, now: float) -> int:
        """Count the ready tasks of its run that go before an entry."""
        parent = self._parents[entry.parent]
        run = parent.run
        ahead = 0
        for priority, heads in run.heads.items():
            end = self._end(entry, priority, now)
            if end >= self._newest:
                itself = parent.has_room and priority == entry.priority
                ahead += run.ready[priority] - itself
                continue
            for _, _, head in heads.irange(maximum=end, inclusive=(True, False)):
                ahead += self._parents[head.parent].lines[priority].bisect_left(end)
        return ahead

    def _end(self, entry: Entry, priority: int, now: float) -> tuple[float, float]:
        """(enqueued_at, order) below which those of a base priority go before ``entry``."""
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
        """Since when something must wait to have an effective priority of ``wanted`` or better."""
        steps = priority - wanted
        return now - steps * self._ageing_interval if steps > 0 else inf

    def _effective(self, entry: Entry, now: float) -> int:
        return effective_priority(entry.priority, now - entry.enqueued_at, self._ageing_interval)

    def _join(self, entry: Entry) -> _Parent:
        tenant = self._tenants.setdefault(entry.tenant, _Tenant(entry.tenant))
        run = tenant.runs.setdefault(entry.run, _Run(entry.run, tenant))
        run.parents += 1
        parent = self._parents[entry.parent] = _Parent(entry.parent, run, entry.limit)
        return parent

    def _shift(self, parent: _Parent, entry: Entry, by: int) -> None:
        """Put an entry into its line (``by`` = 1) or take it out (-1)."""
        run, priority = parent.run, entry.priority
        place = entry.enqueued_at, entry.order, entry
        before = _head(parent.lines, priority)
        if by > 0:
            self._entries.add(entry)
            _put(parent.lines, priority, place)
        else:
            self._entries.remove(entry)
            _remove(parent.lines, priority, place)
        parent.size += by
        _count(self._waiting, priority, by)
        _count(run.tenant.waiting, priority, by)
        if parent.has_room:
            after = _head(parent.lines, priority)
            if before is not after:
                if before is not None:
                    _remove(run.heads, priority, before)
                if after is not None:
                    _put(run.heads, priority, after)
            _count(run.ready, priority, by)

    def _hold(self, parent: _Parent, by: int) -> None:
        parent.taken += by
        parent.run.tenant.taken += by
        self._taken += by

    def _settle(self, parent: _Parent, before: int) -> None:
        """Bring what depends on a parent's room up to date: heads, turns, and who is remembered.

        Args:
            before: how many of the parent could be taken before the change.
        """
        run, tenant = parent.run, parent.run.tenant
        if parent.has_room != (parent.taken < parent.limit):
            parent.has_room = not parent.has_room
            by = 1 if parent.has_room else -1
            change = _put if parent.has_room else _remove
            for priority, line in parent.lines.items():
                change(run.heads, priority, line[0])
                _count(run.ready, priority, by * len(line))
        _take_part(tenant.turns, run, bool(run.heads))
        may = bool(tenant.turns) and tenant.taken < self._tenant_limit
        _take_part(self._turns, tenant, may)
        if not parent.size and not parent.taken:
            self._forget(parent)
        if self._on_waiting is not None and parent.waiting != before:
            self._on_waiting(parent.key, parent.waiting - before)

    def _forget(self, parent: _Parent) -> None:
        """Remember nothing of a parent, nor of its run and tenant if it was their last."""
        run, tenant = parent.run, parent.run.tenant
        del self._parents[parent.key]
        run.parents -= 1
        if not run.parents:
            del tenant.runs[run.key]
        if not tenant.runs:
            del self._tenants[tenant.key]


def _take_part(turns: "OrderedDict[Hashable, _Turn]", one: _Turn, may: bool) -> None:
    """Let a tenant or run take turns, from the end on, or take it out; if that is new."""
    if not may:
        turns.pop(one.key, None)
    elif one.key not in turns:
        turns[one.key] = one


def _head(lines: _Lines, priority: int) -> tuple[float, int, Entry] | None:
    line = lines.get(priority)
    return None if line is None else line[0]


def _put(lines: _Lines, priority: int, place: tuple[float, int, Entry]) -> None:
    line = lines.get(priority)
    if line is None:
        line = lines[priority] = SortedList()
    line.add(place)


def _remove(lines: _Lines, priority: int, place: tuple[float, int, Entry]) -> None:
    line = lines[priority]
    line.remove(place)
    if not line:
        del lines[priority]


def _count(counts: dict[int, int], priority: int, by: int) -> None:
    counts[priority] = counts.get(priority, 0) + by
    if not counts[priority]:
        del counts[priority]
