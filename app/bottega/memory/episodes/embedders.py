"""Choice of the embedder for a tenant's queries, and computation of the queries' vectors."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

import asyncpg

from bottega.clock import monotonic
from bottega.errors import BottegaError, UnavailableError
from bottega.logger import Logger

if TYPE_CHECKING:  # numpy is slow to import
    import numpy as np
    from numpy.typing import NDArray

    from bottega.memory.text.embeddings import Background, Embedder, Floor, Vectors

    Vector = NDArray[np.float32]

log = Logger(__name__)

# One statement sets the transaction's tenant and reads the tenant's row, to save a round trip.
_OF_QUERIES = """
SELECT i.* FROM (SELECT set_config('bottega.tenant', $1, true)::uuid AS id) AS acting
CROSS JOIN LATERAL (
    SELECT embedder, background_of = embedder AS measured, background_mean, background
    FROM tenant_memory WHERE tenant_id = acting.id LIMIT 1) AS i
"""


@dataclass(frozen=True, slots=True)
class EmbeddedQuery:
    """A query's vector, its embedder and the minimum relevant cosines; ``None``: no vector.

    Attributes:
        compared: what the vectors represent: ``spelling`` or ``meaning``, depending on the
            embedder. ``words``: without a vector, a search compares only words.
    """

    vector: "Vector | None" = None
    embedder: str | None = None
    floor: "Floor | None" = None
    compared: str = "words"


@dataclass(frozen=True, slots=True)
class Embedders:
    """The configured embedder of this process, and the embedders of stored vectors.

    Attributes:
        load_current: function that loads the configured embedder at its first call.
        load_named: function from an embedder's name to the embedder; ``None``: this process does
            not have the embedder.
    """

    pool: asyncpg.Pool
    load_current: "Callable[[], Embedder]"
    load_named: "Callable[[str], Embedder | None]"
    clock: Callable[[], float] = monotonic
    _patience: "dict[Embedder, Patience]" = field(default_factory=dict)

    @property
    def current(self) -> "Embedder":
        """The embedder that makes vectors of new episodes."""
        return self.load_current()

    def named(self, name: str | None) -> "Embedder | None":
        """Return the embedder with this name. Name ``None``: the current embedder. Result ``None``:
        this process does not have the embedder."""
        current = self.load_current()
        return current if name is None or name == current.name else self.load_named(name)

    def paid_by(self, tenant_id: UUID, embedder: "Embedder | None" = None) -> "Embedder":
        """Return an embedder whose calls a tenant pays for; calls of local embedders are free.

        Args:
            embedder: the embedder; ``None``: the current embedder.
        """
        embedder = embedder or self.load_current()
        bind = getattr(embedder, "paid_by", None)
        return embedder if bind is None else bind(tenant_id)

    async def embed_query(self, tenant_id: UUID, query: str, deadline_s: float) -> EmbeddedQuery:
        """Embed a query with the embedder that made vectors for all of the tenant's episodes.

        Returns:
            The vector; no vector if this process does not have the embedder, or if the embedder
            fails or is too slow.
        """
        from bottega.memory.text.embeddings import compared_by, floor_of

        row = await self.pool.fetchrow(_OF_QUERIES, str(tenant_id))
        embedder = self.named(row and row["embedder"])
        if embedder is None:
            return EmbeddedQuery()
        patience = self._patience.setdefault(embedder, Patience(embedder, self.clock))
        try:
            paid = self.paid_by(tenant_id, embedder)
            (vector,) = await patience.embed(paid, query, deadline_s)
        except (TimeoutError, BottegaError) as error:
            log.warning("memory.query_not_embedded", error=str(error) or type(error).__name__)
            return EmbeddedQuery()
        least = floor_of(embedder, vector, _background(row))
        return EmbeddedQuery(vector, embedder.name, least, compared_by(embedder))


def _background(row: asyncpg.Record | None) -> "Background | None":
    if row is None or not row["measured"]:
        return None
    import numpy as np

    from bottega.memory.text.embeddings import Background

    return Background(np.array(row["background_mean"], np.float32), *row["background"])


@dataclass(slots=True)
class Patience:
    """Embedding of queries with one embedder, a short time limit and a circuit breaker.

    After three timeouts in a row, only one query in ten seconds reaches the embedder.
    """

    embedder: "Embedder"
    clock: Callable[[], float]
    _timeouts: int = 0  # number of consecutive timeouts
    _next_at: float = float("-inf")

    async def embed(self, embedder: "Embedder", query: str, deadline_s: float) -> "Vectors":
        """Return the vector of a query, shape (1, d).

        Args:
            embedder: the object's embedder, bound to the tenant that pays for the call.

        Raises:
            TimeoutError: the embedder was too slow.
            BudgetExhaustedError: the tenant's daily budget is exhausted.
            UnavailableError: the embedder is still loading its model, or the circuit breaker is
                open because the last queries timed out.
            ModelError: the embedder answered with an error.
        """
        from bottega.memory.text.embeddings import embed_queries, is_ready

        if not is_ready(self.embedder):
            raise UnavailableError("the embedder is starting")
        if self._timeouts >= 3 and self.clock() < self._next_at:
            raise UnavailableError("the embedder did not answer the last queries in time")
        self._next_at = self.clock() + 10  # while the breaker is open, one query in 10 s
        try:
            async with asyncio.timeout(deadline_s):
                vectors = await embed_queries(embedder, [query])
        except TimeoutError:
            self._timeouts += 1
            raise
        except Exception:
            self._timeouts = 0  # an error is not a timeout, because the embedder has answered
            raise
        self._timeouts = 0
        return vectors
