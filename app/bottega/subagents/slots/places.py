"""Places of tasks where a tenant's limit holds over all workers."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol
from uuid import UUID

from bottega.subagents.slots.queue import TakeQueue


class PlaceSource(Protocol):
    """Source of places for the tasks of this worker; places are all alike."""

    def take(self, tenant: UUID) -> bool:
        """Take a place that this worker already holds; return false if there is none."""
        ...

    async def wait(self, tenant: UUID) -> None:
        """Return with a place; a cancelled wait has none."""
        ...

    def give_back(self, tenant: UUID) -> None: ...


class TenantPlaces:
    """Places that tasks need beside a slot, taken when the queue gives them one.

    Args:
        came: called when a place has come that a tenant's tasks waited for.
    """

    def __init__(self, came: Callable[[], None]) -> None:
        self.source: PlaceSource | None = None
        self._came = came
        self._asks: dict[UUID, set[asyncio.Task[None]]] = {}
        self._unused: Counter[UUID] = Counter()

    def take_for_next(self, queue: TakeQueue, free: int) -> bool:
        """Take a place for the queue's next entry; return false if no entry can have one.

        A tenant without a place loses its turn until one comes. It asks for as many as it could
        use now.

        Args:
            free: free slots.
        """
        while free > 0 and queue.ready:
            tenant = queue.turn
            if self.source is None or not isinstance(tenant, UUID) or self._take(tenant):
                return True
            self._ask(queue, tenant, min(free, queue.ready_of(tenant)))
            queue.block(tenant)
        return False

    def give_back(self, tenant: UUID | None) -> None:
        if self.source is not None and tenant is not None:
            self.source.give_back(tenant)

    def give_back_unused(self) -> None:
        """Give back the places that came when no slot was free, or for tasks that had ended."""
        for tenant in self._unused.elements():
            self.give_back(tenant)
        self._unused.clear()

    def stop(self) -> None:
        """Ask no more."""
        for asks in self._asks.values():
            for ask in asks:
                ask.cancel()

    def _take(self, tenant: UUID) -> bool:
        if self._unused[tenant]:
            self._unused[tenant] -= 1
            return True
        return self.source is not None and self.source.take(tenant)

    def _ask(self, queue: TakeQueue, tenant: UUID, wanted: int) -> None:
        asks = self._asks.setdefault(tenant, set())
        for _ in range(wanted - len(asks)):
            asks.add(asyncio.get_running_loop().create_task(self._get(queue, tenant)))

    async def _get(self, queue: TakeQueue, tenant: UUID) -> None:
        assert self.source is not None
        try:
            await self.source.wait(tenant)
            self._unused[tenant] += 1
        finally:
            asks = self._asks[tenant]
            asks.discard(asyncio.current_task())
            if not asks:
                del self._asks[tenant]
            queue.unblock(tenant)
        self._came()
