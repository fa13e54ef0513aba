"""The time limit of a query for its vector.

A query that cannot be embedded in time is answered by its words. An embedder that hangs would cost
each query that time, so after a few timeouts in a row it is asked only now and then.
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
    """Counts an embedder's timeouts.

    Attributes:
        timeouts: in a row.
        next_at: when the embedder may be asked again, if the breaker is open.
    """

    def __init__(self) -> None:
        self.timeouts = 0
        self.next_at = float("-inf")


class Patience:
    """Asks embedders for the vectors of queries, for a short time each.

    Args:
        deadline_s: the longest time of one query.
        clock: seconds that never go back.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._breakers: dict[Embedder, _Breaker] = {}

    async def embed(self, embedder: "Embedder", query: str) -> "Vectors":
        """The vector of a query, shape (1, d).

        Raises:
            TimeoutError: it did not come in time.
            UnavailableError: none of the last queries' vectors did, and it is no time to try again.
            ModelError: the embedder answered with an error.
        """
        breaker = self._breakers.setdefault(embedder, _Breaker())
        if breaker.timeouts >= _OPENS_AFTER:
            now = self._clock()
            if now < breaker.next_at:
                raise UnavailableError("the embedder did not answer lately")
            breaker.next_at = now + _PROBE_EVERY_S  # others do not wait beside this one
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
