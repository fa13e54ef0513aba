"""Frames of a run together with those of its child runs, at all levels."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from uuid import UUID

import structlog

from bottega.errors import NotFoundError
from bottega.events.frames import Filter, Frame
from bottega.events.stream import RunStreams, Subscriber

LOOKS_S = 0.5
"""Seconds between two looks for new child runs."""
ENDS_S = 10.0
"""Longest wait for the last frames of child runs, after the final event of their parent."""
MOST_AT_ONCE = 100
"""Most child runs that one client follows at a time; others are followed as soon as these end."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class Family:
    """A run and its child runs, which one client follows.

    Args:
        parent: reads the run's own events.
        find: returns the child runs of some runs: those that are not over, or began lately.
    """

    streams: RunStreams
    tenant_id: UUID
    run_id: UUID
    parent: Subscriber
    only: Filter
    find: Callable[[Collection[UUID]], Awaitable[Iterable[UUID]]]
    _known: set[UUID] = field(default_factory=set)
    _following: dict[asyncio.Task[None], UUID] = field(default_factory=dict)
    _ended: set[UUID] = field(default_factory=set)
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AT_ONCE))
    # A slow client slows all readers.
    _frames: asyncio.Queue[list[Frame] | None] = field(default_factory=lambda: asyncio.Queue(1))

    async def frames(self) -> AsyncGenerator[list[Frame]]:
        """Yield frames of all runs; empty lists: a heartbeat is due.

        The frames of a child run are in order, from its first event on, and without ``seq``: a
        client resumes by the run's own. The run's final event comes last.
        """
        looking = asyncio.create_task(self._look_again())
        reading = asyncio.create_task(self._read(looking))
        try:
            while (frames := await self._frames.get()) is not None:
                yield frames
            await reading
        finally:
            tasks = [looking, reading, *self._following]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, looking: asyncio.Task[None]) -> None:
        try:
            while (frames := await self.parent.next()) is not None:
                if frames and frames[-1].is_final:
                    looking.cancel()
                    await self._look()
                    if self._following:
                        await asyncio.wait(self._following, timeout=ENDS_S)
                await self._frames.put(frames)
        finally:
            await self._frames.put(None)

    async def _look_again(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                logger.exception("stream.children_unknown", run_id=str(self.run_id))
            await asyncio.sleep(LOOKS_S)

    async def _look(self) -> None:
        # A run ends after its child runs, so one look after its end finds the last of these.
        ended = set(self._ended)
        parents = {self.run_id, *self._following.values(), *ended}
        found = set(await self.find(parents)) - self._known
        self._ended -= ended
        self._known |= found
        for run_id in found:
            task = asyncio.create_task(self._follow(run_id))
            self._following[task] = run_id
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._ended.add(self._following.pop(task))

    async def _follow(self, run_id: UUID) -> None:
        async with self._places:
            with suppress(NotFoundError):  # deleted meanwhile
                cursor = await self.streams.cursor_of(self.tenant_id, run_id)
                with self.streams.watching(cursor, 0) as stream:
                    child = Subscriber(stream, 0, self.only)
                    while (frames := await child.next()) is not None:
                        if frames:
                            await self._frames.put([replace(each, seq=None) for each in frames])
