"""Metrics of tasks."""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

BUCKETS = (100, 1_000, 10_000, 60_000, 300_000)
"""Upper bounds of a histogram's buckets. ``count`` and ``sum`` also include larger values."""


class Totals:
    """Sums of the tasks' metrics in memory; subclasses may send metrics to a monitoring system."""

    def __init__(self) -> None:
        self._counters: Counter[tuple[str, *tuple[tuple[str, str], ...]]] = Counter()
        self._histograms: dict[str, list[int]] = {}  # number of values per bucket, not summed up
        self._gauges: dict[str, float] = {}

    def count(self, name: str, value: int = 1, **attributes: str) -> None:
        """Add to a counter."""
        self._counters[(name, *sorted(attributes.items()))] += value

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._gauges[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add a measurement to a histogram."""
        numbers = self._histograms.setdefault(name, [0] * (len(BUCKETS) + 1))
        numbers[bisect_left(BUCKETS, value)] += 1
        self._counters[f"{name}.sum",] += round(value)

    def snapshot(self) -> dict[str, float]:
        """Return all values, including the current gauges.

        The keys of counters are ``name`` or ``name{key=value}``. A histogram has the keys
        ``name.count``, ``name.sum`` and ``name.le_{bound}`` (number of values up to the bound).
        """
        values: dict[str, float] = {}
        for (name, *attributes), value in self._counters.items():
            labels = ",".join(f"{key}={text}" for key, text in attributes)
            values[f"{name}{{{labels}}}" if labels else name] = value
        for name, numbers in self._histograms.items():
            values[f"{name}.count"] = sum(numbers)
            for bound, number in zip(BUCKETS, accumulate(numbers[:-1]), strict=True):
                values[f"{name}.le_{bound}"] = number
        return values | self._gauges
