"""Virtual time: if nothing is ready, the clock jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_THREADS_S = 5.0


class _Jumping(selectors.DefaultSelector):
    """Selector that never waits for a timer; raises if nothing is left to wait for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:  # no timer and nothing ready: only a thread can continue
            if found := super().select(_THREADS_S):
                return found
            raise RuntimeError("everything waits, and nothing will ever happen")
        found = super().select(0)
        if not found:
            self.now += max(0.0, timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose :meth:`time` starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
