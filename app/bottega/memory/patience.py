"""Time limit for embedding a query.

A query whose vector is late is answered by its words alone. An embedder that hangs would cost each
query the full limit, so after a few timeouts in a row only occasional queries try it.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from bottega.errors import UnavailableError

if TYPE_CHECKING:
    from bottega.memory.embeddings import Embedder, Vectors

_OPENS_AFTER = 3
_PROBE_EVERY_S = 10.0


class _Breaker:
    """Timeouts of one embedder.

    Attributes:
        timeouts: number in a row.
        next_at: time of the next try, while the breaker is open.
    """

    def __init__(self) -> None:
        self.timeouts = 0
        self.next_at = float("-inf")


class Patience:
    """Embeds queries within a short time limit, with a circuit breaker per embedder.

    Args:
        deadline_s: longest time of one query.
        clock: monotonic seconds.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._breakers: dict[Embedder, _Breaker] = {}

    async def embed(self, embedder: "Embedder", query: str) -> "Vectors":
        """Return the vector of a query, shape (1, d).

        Raises:
            TimeoutError: the embedder was too slow.
            UnavailableError: the breaker is open: the last queries timed out.
            ModelError: the embedder answered with an error.
        """
        breaker = self._breakers.setdefault(embedder, _Breaker())
        if breaker.timeouts >= _OPENS_AFTER:
            now = self._clock()
            if now < breaker.next_at:
                raise UnavailableError("the embedder did not answer the last queries in time")
            breaker.next_at = now + _PROBE_EVERY_S  # one probe at a time
        try:
            async with asyncio.timeout(self._deadline_s):
                vectors = await embedder.embed([query])
        except TimeoutError:
            breaker.timeouts += 1
            breaker.next_at = self._clock() + _PROBE_EVERY_S
            raise
        except Exception:
            breaker.timeouts = 0  # an error is an answer
            raise
        breaker.timeouts = 0
        return vectors
