"""Writes the steps of all runs of a worker: steps that are ready together share a transaction.

A group is stored by one call of SQL's ``append_steps``, which fences each step by itself. A step
that cannot be stored with others is sent alone, so that it neither fails nor delays them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import asyncpg

from bottega import metrics
from bottega.clock import monotonic
from bottega.db.failures import is_transient, persist
from bottega.events import log
from bottega.events.steps import Step

SHOW_AFTER_S = 0.08
"""Longest time for which an event waits for the next step, so that people see it."""

_GROUP_STEPS = 50
_GROUP_CHARACTERS = 1024 * 1024
_PATIENCE_S = 0.005
"""Wait for a call under way before a second one begins."""
_CALLS = 2
_ALONE = 1


class _Waiting(NamedTuple):
    step: Step
    stored: "asyncio.Future[None]"


class StepWriter:
    """The writer of steps that all runs of a worker share."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._waiting: deque[_Waiting] = deque()
        self._calls = 0
        self._begin_at: asyncio.Handle | None = None
        self._alone = asyncio.Semaphore(_ALONE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unshown: dict[Callable[[], None], float] = {}
        self._show_at: asyncio.TimerHandle | None = None

    async def store(self, step: Step) -> None:
        """Store a step, in a group if others are ready too. At most one of each run at a time.

        Raises:
            FencedError: the run belongs to a newer attempt, or is over.
            UnreadMessagesError: the step ends a run that must read a message first.
            DatabaseAwayError: the database was away for too long.
        """
        loop, began = asyncio.get_running_loop(), monotonic()
        waiting = _Waiting(step, loop.create_future())
        self._waiting.append(waiting)
        if self._begin_at is None and self._calls < _CALLS:
            if self._calls == 0:
                self._begin_at = loop.call_soon(self._begin)
            else:
                self._begin_at = loop.call_later(_PATIENCE_S, self._begin)
        await waiting.stored
        metrics.step_duration.observe(monotonic() - began)

    def _begin(self) -> None:
        """Send the next group."""
        self._begin_at = None
        if not self._waiting:
            return
        group: list[_Waiting] = []
        characters = 0
        while self._waiting and len(group) < _GROUP_STEPS and characters < _GROUP_CHARACTERS:
            group.append(self._waiting.popleft())
            characters += len(group[-1].step.events)
        self._calls += 1
        self._start(self._send(group))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, group: list[_Waiting]) -> None:
        try:
            answers = await log.append_steps(self._pool, [each.step for each in group])
        except Exception as error:
            if is_transient(error) and not isinstance(error, asyncpg.LockNotAvailableError):
                self._start(self._send_again(group))
            else:
                self._each_alone(group)
        else:
            self._answer(group, answers)
        finally:
            self._calls -= 1
            if self._begin_at is not None:
                self._begin_at.cancel()
            self._begin()

    async def _send_again(self, group: list[_Waiting]) -> None:
        """Repeat a group while the database is away: it is unknown if it was stored."""
        steps = [each.step for each in group]

        async def send() -> list[str]:
            try:
                return await log.append_steps(self._pool, steps)
            except asyncpg.LockNotAvailableError:
                return ["busy"] * len(steps)

        try:
            answers = await persist(send)
        except Exception:
            self._each_alone(group)
        else:
            self._answer(group, answers)

    def _answer(self, group: list[_Waiting], answers: list[str]) -> None:
        for each, answer in zip(group, answers, strict=True):
            if answer == "busy":
                self._each_alone([each])
            elif not each.stored.done():
                if answer in ("refused", "unread"):
                    each.stored.set_exception(log.refusal(each.step, answer))
                else:
                    each.stored.set_result(None)

    def _each_alone(self, group: list[_Waiting]) -> None:
        for each in group:
            self._start(self._send_alone(each))

    async def _send_alone(self, waiting: _Waiting) -> None:
        try:
            await log.append_step(self._pool, waiting.step, self._alone)
        except Exception as error:
            if not waiting.stored.done():
                waiting.stored.set_exception(error)
        else:
            if not waiting.stored.done():
                waiting.stored.set_result(None)

    def show_later(self, show: Callable[[], None]) -> None:
        """Call ``show`` within :data:`SHOW_AFTER_S`, together with those of other runs."""
        self._unshown[show] = monotonic()
        if self._show_at is None:
            self._show_at = asyncio.get_running_loop().call_later(SHOW_AFTER_S, self._show)

    def shown(self, show: Callable[[], None]) -> None:
        """Do not call ``show`` any more."""
        self._unshown.pop(show, None)

    def _show(self) -> None:
        now = monotonic()
        due = [show for show, since in self._unshown.items() if now - since > SHOW_AFTER_S / 2]
        for show in due:
            del self._unshown[show]
            show()
        self._show_at = None
        if self._unshown:
            oldest = next(iter(self._unshown.values()))
            loop = asyncio.get_running_loop()
            self._show_at = loop.call_later(oldest + SHOW_AFTER_S - now, self._show)
