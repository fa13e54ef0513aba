"""Metrics of tasks."""

from bisect import bisect_left
from collections import Counter

BUCKETS = (100, 1_000, 10_000, 60_000, 300_000)
"""Upper bounds of a histogram's buckets. ``count`` and ``sum`` also include larger values."""


class Totals:
    """Sums of the tasks' metrics in memory; subclasses may send metrics to a monitoring system.

    Attributes:
        values: counters by ``name`` or ``name{key=value}``. A histogram has the counters
            ``name.count``, ``name.sum`` and ``name.le_{bound}`` (number of values up to the bound).
    """

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}

    def count(self, name: str, value: int = 1, **attributes: str) -> None:
        """Add to a counter."""
        if attributes:
            labels = ",".join(f"{key}={attributes[key]}" for key in sorted(attributes))
            name = f"{name}{{{labels}}}"
        self.values[name] += value

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._gauges[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add a measurement to a histogram."""
        self.values[f"{name}.count"] += 1
        self.values[f"{name}.sum"] += round(value)
        for bound in BUCKETS[bisect_left(BUCKETS, value) :]:
            self.values[f"{name}.le_{bound}"] += 1

    def snapshot(self) -> dict[str, float]:
        """Return all values, including the current gauges."""
        return {**self.values, **self._gauges}
