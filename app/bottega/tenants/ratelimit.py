"""Rate limit of a client's requests: the generic cell rate algorithm (GCRA).

A client's state is one number: the time at which the client's debt is paid. Each request adds a
cost, in seconds, to the debt. A request is refused if the debt would exceed the burst. A long body
costs extra. A body's cost is added while the body arrives, so the debt may then exceed the burst.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

_MOST_CLIENTS = 20_000


@dataclass(frozen=True, slots=True)
class Rate:
    """Limit of requests: the average number per second, and the size of the largest burst."""

    per_s: float
    burst: int

    @classmethod
    def of(cls, per_s: float, seconds: int = 2) -> "Rate":
        """Return a rate; its burst has as many requests as the rate allows in ``seconds`` s."""
        return cls(per_s, max(1, math.ceil(seconds * per_s)))

    @property
    def window_s(self) -> float:
        """Seconds without requests after which the full burst is available again."""
        return self.burst / self.per_s


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a request.

    Attributes:
        paid_at: the client's state, for the next decision.
        remaining: number of further requests that the client may send at once.
        whole_s: seconds until the full burst is available again.
        retry_after_s: seconds until the client may repeat a refused request; 0: not refused.
    """

    allowed: bool
    paid_at: float
    remaining: int
    whole_s: float
    retry_after_s: float


def decide(rate: Rate, paid_at: float, now: float) -> Decision:
    """Decide on one request.

    Args:
        paid_at: the client's state after the last decision; for a new client, any time in the past.
        now: the current time on the same clock, in seconds.
    """
    owed = max(0.0, paid_at - now) * rate.per_s
    # The debt may exceed the burst by a hundredth of a request, because sums of floats are rounded.
    room = rate.burst - owed + 0.01
    allowed = room >= 1
    if allowed:
        owed += 1
        room -= 1
    return Decision(
        allowed=allowed,
        paid_at=now + owed / rate.per_s,
        remaining=max(0, math.floor(room)),
        whole_s=owed / rate.per_s,
        retry_after_s=0.0 if allowed else (1 + owed - rate.burst) / rate.per_s,
    )


Who = TypeVar("Who", bound=Hashable)


class RateLimits(Generic[Who]):
    """States of the clients that this process saw last. Each process allows the full rate."""

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self.rate = rate
        self._clock = clock
        self._paid_at: LRUCache[Who, float] = LRUCache(_MOST_CLIENTS)

    def take(self, who: Who, rate: Rate | None = None) -> Decision:
        """Decide on a client's current request, and count it.

        ``rate`` replaces the usual rate for this client.
        """
        now = self._clock()
        decision = decide(rate or self.rate, self._paid_at.pop(who, now), now)
        self._paid_at[who] = decision.paid_at
        return decision

    def look(self, who: Who) -> Decision:
        """Decide on a client's current request, but do not count the request."""
        now = self._clock()
        return decide(self.rate, self._paid_at.get(who, now), now)

    def charge(self, who: Who, requests: int) -> None:
        """Add the cost of ``requests`` more requests to a client's debt."""
        owes_until = max(self._paid_at.pop(who, 0.0), self._clock())
        self._paid_at[who] = owes_until + requests / self.rate.per_s
