"""The port through which tasks are counted and measured (spec page 3, S21)."""

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
