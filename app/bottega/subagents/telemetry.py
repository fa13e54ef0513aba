"""The port through which tasks are counted and measured (spec page 3, S21)."""

from bisect import bisect_left
from collections import Counter
from typing import Protocol


class Telemetry(Protocol):
    """Takes figures. Must not block, nor raise."""

    def count(self, name: str, value: int = 1, **attributes: str) -> None:
        """Add to a counter."""

    def gauge(self, name: str, value: float) -> None:
        """Set what something is now."""

    def observe(self, name: str, value: float) -> None:
        """Add a measurement to a histogram."""


class NoTelemetry:
    """Takes no notice."""

    def count(self, name: str, value: int = 1, **attributes: str) -> None: ...

    def gauge(self, name: str, value: float) -> None: ...

    def observe(self, name: str, value: float) -> None: ...


BUCKETS = (100, 1_000, 10_000, 60_000, 300_000)
"""Upper bounds of a histogram's buckets; what is above counts in its count alone."""


class Totals:
    """Adds up, for whoever asks.

    Attributes:
        values: by name, with its attributes as ``name{key=value}``; of a histogram ``name.count``,
            ``name.sum`` and ``name.le_{bound}``, how many were no more than that.
    """

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}

    def count(self, name: str, value: int = 1, **attributes: str) -> None:
        if attributes:
            told = ",".join(f"{key}={attributes[key]}" for key in sorted(attributes))
            name = f"{name}{{{told}}}"
        self.values[name] += value

    def gauge(self, name: str, value: float) -> None:
        self._gauges[name] = value

    def observe(self, name: str, value: float) -> None:
        self.values[f"{name}.count"] += 1
        self.values[f"{name}.sum"] += round(value)
        for bound in BUCKETS[bisect_left(BUCKETS, value) :]:
            self.values[f"{name}.le_{bound}"] += 1

    def shown(self) -> dict[str, float]:
        """All there is, gauges as they are now."""
        return {**self.values, **self._gauges}
