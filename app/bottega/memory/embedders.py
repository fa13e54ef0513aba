"""Which embedder a tenant's queries are compared with (spec page 4, M18)."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import UUID

import asyncpg

from bottega.clock import monotonic
from bottega.db.engine import acting_as

if TYPE_CHECKING:
    from bottega.memory.embeddings import Embedder

_BELIEVED_S = 5.0
_KNOWN = 10_000

_OF_QUERIES = "SELECT embedder FROM memory_indexes WHERE tenant_id = $1"


class Embedders:
    """The embedder of this process, and those that stored vectors are still of.

    Args:
        current: what is configured; asked for when it is first needed.
        named: another embedder by its name; ``None`` if this process does not have it.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        pool: asyncpg.Pool,
        current: "Callable[[], Embedder]",
        named: "Callable[[str], Embedder | None]",
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._pool = pool
        self._current = current
        self._named = named
        self._clock = clock
        self._believed: OrderedDict[UUID, tuple[str | None, float]] = OrderedDict()

    @property
    def current(self) -> "Embedder":
        """The one that new vectors are made by."""
        return self._current()

    def named(self, name: str | None) -> "Embedder | None":
        """The embedder of that name, if this process has it; of none, the current one."""
        current = self._current()
        return current if name is None or name == current.name else self._named(name)

    async def of_queries(self, tenant_id: UUID) -> "Embedder | None":
        """The one whose vectors all of the tenant's episodes have, as known for five seconds.

        Returns:
            ``None`` if this process does not have it: queries go by their words then, until the
            episodes have vectors of the current one.
        """
        now = self._clock()
        name, until = self._believed.get(tenant_id, (None, now))
        if until <= now:
            async with acting_as(self._pool, tenant_id) as connection:
                name = await connection.fetchval(_OF_QUERIES, tenant_id)
            self._believed[tenant_id] = (name, now + _BELIEVED_S)
            while len(self._believed) > _KNOWN:
                self._believed.popitem(last=False)
        return self.named(name)

    async def still(self, connection: asyncpg.Connection, tenant_id: UUID, name: str) -> bool:
        """Whether queries are still compared with vectors of ``name``, in that transaction of the
        tenant's: those of another go soon after all have been changed over. If they are not,
        :meth:`of_queries` knows it from now on."""
        known = await connection.fetchval(_OF_QUERIES, tenant_id)
        if known in (None, name):
            return True
        self._believed[tenant_id] = (known, self._clock() + _BELIEVED_S)
        return False
