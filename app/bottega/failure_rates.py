"""The rule of circuit breakers: a breaker opens when at least half of the recent calls have failed.

Pure.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

Ends = deque[float]


def _ends() -> Ends:
    return deque(maxlen=1000)  # limits the memory use of one key


@dataclass(slots=True)
class _Recent:
    failures: Ends = field(default_factory=_ends)
    successes: Ends = field(default_factory=_ends)


class FailureRates:
    """Counts of recent failures and successes by key. A key without recent calls uses no memory.

    Args:
        least: minimum number of recent calls before a breaker may open.
        window_s: a call is recent for this number of seconds after its end.
    """

    def __init__(self, least: int, window_s: float) -> None:
        self._least = least
        self._window_s = window_s
        self._recent: OrderedDict[Hashable, _Recent] = OrderedDict()  # sorted by the last end

    def succeeded(self, key: Hashable, now: float) -> None:
        """Count a success."""
        self._of(key, now).successes.append(now)

    def failed(self, key: Hashable, now: float) -> bool:
        """Count a failure; return true if the key's breaker must open."""
        recent = self._of(key, now)
        recent.failures.append(now)
        failed = len(recent.failures)
        ended = failed + len(recent.successes)
        return ended >= self._least and 2 * failed >= ended

    def failures(self, key: Hashable) -> int:
        """Return the number of failures that were recent when the key's last call ended."""
        return len(self._recent[key].failures) if key in self._recent else 0

    def forget(self, key: Hashable) -> None:
        """Forget all calls of a key."""
        self._recent.pop(key, None)

    def tidy(self, now: float) -> None:
        """Forget all keys that have no recent calls."""
        while self._recent:
            key, recent = next(iter(self._recent.items()))
            last = max(ends[-1] for ends in (recent.failures, recent.successes) if ends)
            if now - last <= self._window_s:
                return
            del self._recent[key]

    def _of(self, key: Hashable, now: float) -> _Recent:
        self.tidy(now)
        recent = self._recent.setdefault(key, _Recent())
        self._recent.move_to_end(key)
        for ends in (recent.failures, recent.successes):
            while ends and now - ends[0] > self._window_s:
                ends.popleft()
        return recent
