"""Routes for a run's events over HTTP: as pages, and as server-sent events."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, StringConstraints, field_validator
from pydantic_core import PydanticCustomError
from sse_starlette import EventSourceResponse

from bottega import metrics
from bottega.api.auth import Principal
from bottega.api.errors import problems
from bottega.api.schemas.base import NAME_PATTERN, Page
from bottega.api.schemas.runs import Event as EventAnswer
from bottega.api.server.middleware import PAST
from bottega.api.shared.deps import PrincipalDep, ReviewTenant, ServiceDep
from bottega.api.shared.pages import PageQuery, escaped_lines
from bottega.clock import Clock, utcnow
from bottega.container import Service
from bottega.errors import NotFoundError
from bottega.events import log
from bottega.events.frames import LLM_DELTA, OUTPUT_CHUNK, TOOL_PROGRESS, Filter, Frame
from bottega.events.reader import RunCursor
from bottega.events.stream import RunStreams, Subscriber
from bottega.events.types import EventType
from bottega.logger import Logger
from bottega.runs import read

MAX_SEQ = 2**62
_END = b'event: end\r\ndata: {"seq":null,"type":"end"}\r\n\r\n'
_MOST = 50
_TYPES = frozenset([*EventType, LLM_DELTA, OUTPUT_CHUNK, TOOL_PROGRESS])
_NAMES = rf"^{NAME_PATTERN[1:-1]}(,{NAME_PATTERN[1:-1]}){{0,{_MOST - 1}}}$"


class WatchQuery(BaseModel):
    """Query parameters: the event after which to start, and filters."""

    after: Annotated[
        int, Query(ge=0, le=MAX_SEQ, description="Only events with a higher `seq`.")
    ] = 0
    agents: Annotated[
        Annotated[str, StringConstraints(pattern=_NAMES, max_length=4000)] | None,
        Query(
            description=f"Only events of these agents: at most {_MOST} names, separated by commas."
        ),
    ] = None
    types: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=2000)] | None,
        Query(description="Only events of these types, separated by commas."),
    ] = None
    depth: Annotated[
        int | None,
        Query(
            ge=0,
            le=1000,
            description=(
                "Only events of the run's own agent and of tasks up to this `depth` (as in "
                "`/tasks`: 0 for tasks that the run's own agent called)."
            ),
        ),
    ] = None

    @field_validator("types")
    @classmethod
    def _known_ids(cls, value: str | None) -> str | None:
        for name in (value or "").split(",") if value else ():
            if name not in _TYPES:
                raise PydanticCustomError(
                    "unknown_type",
                    "'{name}' is not a type of event: docs/reference/events.md lists the types",
                    {"name": name[:60]},
                )
        return value

    @property
    def only(self) -> Filter:
        """Filter of the events; the final event always passes the filter."""
        return Filter(
            agents=None if self.agents is None else frozenset(self.agents.split(",")),
            types=None if self.types is None else frozenset(self.types.split(",")),
            depth=self.depth,
        )


router = APIRouter(prefix="/v1/runs", tags=["runs"])


RunId = Annotated[UUID, Path(description="The run's id.")]


class StreamQuery(WatchQuery):
    event: Annotated[
        Literal["type", "message"],
        Query(
            description=(
                "Only for a stream. `type`: the name of each event is its `type`. `message`: "
                "only `end` has a name, so that an EventSource gets all events in `onmessage`."
            )
        ),
    ] = "type"
    children: Annotated[
        bool,
        Query(
            description=(
                "Only for a stream. True: it has the events and the live text of the run's child "
                "runs at all levels, too: from the first event of each child run that is under "
                "way, told apart by `run_id`, and without `id`, since a client resumes by the "
                "run's own events."
            )
        ),
    ] = False
    ticket: Annotated[
        str | None,
        Query(max_length=8192, description="A ticket of `POST /v1/ws-tickets`, instead of a key."),
    ] = None


class EventQuery(PageQuery, StreamQuery):
    """Query parameters of a run's events."""


_SERVER_SENT_EVENT = {
    "type": "object",
    "description": "An event of the stream, as an EventSource reads it.",
    "properties": {
        "id": {"type": "string", "description": "The event's `seq`."},
        "event": {"type": "string", "description": "The event's `type`, or `end`."},
        "data": {"type": "string", "description": "The event, as JSON."},
    },
}

LastEventId = Annotated[str | None, Header(max_length=30)]


@router.get(
    "/{run_id}/stream",
    operation_id="stream_run_events",
    summary="Stream a run's events",
    description=(
        "Server-sent events, for live views. The stream begins after the event `after` (or "
        "`Last-Event-ID`), goes on live, and ends with the final event and an event named `end`. "
        "It also ends when the run is deleted. `agents`, `types` and `depth` filter; the final "
        "event always passes. 409 `log_went_back`: the log does not reach `after`, because the "
        "database lost its last commits in a failover: load the run again."
    ),
    response_class=EventSourceResponse,
    responses={
        **problems(404, 409),
        200: {
            "description": "The stream: `id` is an event's `seq`, `data` the event as JSON.",
            "content": {"text/event-stream": {"schema": _SERVER_SENT_EVENT}},
        },
        204: {
            "description": "The run is over, and the client has all its events. This status stops "
            "an EventSource from reconnecting."
        },
    },
)
async def stream(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: ReviewTenant,
    run_id: RunId,
    query: Annotated[StreamQuery, Query()],
    request: Request,
    last_event_id: LastEventId = None,
) -> Response:
    cursor = await service.streams.cursor_of(tenant, run_id)
    after = query.after
    if last_event_id and last_event_id.isascii() and last_event_id.isdigit():
        after = min(int(last_event_id), MAX_SEQ)
    if cursor.over and after >= cursor.last_seq:
        return Response(status_code=204)
    cursor.require(after)
    past = request.scope.get("extensions", {}).get(PAST, lambda size: None)
    again = last_event_id is not None
    return event_stream(_sse(service, principal, cursor, after, query, past, again=again))


@router.get(
    "/{run_id}/events",
    operation_id="list_run_events",
    summary="List a run's events",
    description=(
        "A page of the log, in order. `agents`, `types` and `depth` filter; the final event "
        "always passes. With `Accept: text/event-stream` it streams, like `stream_run_events`."
    ),
    response_model=Page[EventAnswer],
    responses={
        **problems(404, 409),
        204: {"description": "Only for a stream, as in `stream_run_events`."},
    },
)
async def events(
    service: ServiceDep,
    principal: PrincipalDep,
    tenant: ReviewTenant,
    run_id: RunId,
    query: Annotated[EventQuery, Query()],
    request: Request,
    response: Response,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: LastEventId = None,
) -> Any:
    if "text/event-stream" in (accept or ""):
        return await stream(service, principal, tenant, run_id, query, request, last_event_id)
    await service.streams.cursor_of(tenant, run_id)
    position: int | None = query.place(int)
    after, before = query.after, MAX_SEQ
    if position is not None:
        after, before = (after, position) if query.descending else (position, before)
    rows = await log.page(
        service.database.pool,
        tenant,
        run_id,
        query.only,
        after=after,
        before=before,
        limit=query.limit,
        descending=query.descending,
    )
    return query.page(request, response, rows, lambda event: event.seq)


def event_stream(
    content: AsyncIterator[bytes], headers: Mapping[str, str] | None = None
) -> EventSourceResponse:
    """Return a response of server-sent events; ``content`` must yield its own heartbeats.

    The server disconnects a client that reads nothing for too long.
    """
    return EventSourceResponse(escaped_lines(content), headers=headers, ping=0)


async def _sse(
    service: Service,
    principal: Principal,
    cursor: RunCursor,
    after: int,
    query: StreamQuery,
    past: Callable[[int], None],
    *,
    again: bool,
) -> AsyncIterator[bytes]:
    encoded = _named if query.event == "type" else _unnamed
    open_streams, wakeups = metrics.streams.labels("sse"), service.wakeups
    with open_streams.track_inprogress(), service.streams.watching(cursor, after) as run_stream:
        subscriber = Subscriber(run_stream, after, query.only)
        with (
            service.keys.watching(principal.identity, subscriber.stop),
            wakeups.resumable(subscriber.stop),
        ):
            if again:  # the previous process may have sent `retry: 0`, so reset the value
                yield b"retry: 1000\r\n\r\n"
            async for frames in _frames(service, cursor, subscriber, query):
                if frames:
                    part = b"".join(encoded(frame) for frame in frames)
                    if subscriber.place <= cursor.last_seq:
                        past(len(part))
                    yield part
                else:
                    yield b": heartbeat\r\n\r\n"
        if subscriber.finished:
            yield _END
        elif subscriber.went_back:
            yield b": the log went back: load the run again\r\nretry: 0\r\n\r\n"
        elif subscriber.orphaned:
            yield b": the run was deleted\r\n\r\n"
        elif wakeups.handed_over:
            yield b": another process of the server goes on\r\nretry: 0\r\n\r\n"
        elif subscriber.stopped:
            yield b": the key was revoked or has expired, or a key is required now\r\n\r\n"
        else:
            yield b": the server stops\r\nretry: 1000\r\n\r\n"


async def _frames(
    service: Service,
    cursor: RunCursor,
    subscriber: Subscriber,
    query: StreamQuery,
    clock: Clock = utcnow,
) -> AsyncIterator[list[Frame]]:
    if not query.children:
        while (frames := await subscriber.next()) is not None:
            yield frames
        return
    since = clock()

    async def find(parents: Collection[UUID]) -> list[UUID]:
        async with service.database.begin(cursor.tenant_id) as tx:
            return await read.children(tx, cursor.tenant_id, parents, since)

    of_run = service.streams, cursor.tenant_id, cursor.run_id
    async with aclosing(Family(*of_run, subscriber, query.only, find).frames()) as family:
        async for frames in family:
            yield frames


def _named(frame: Frame) -> bytes:
    return f"event: {frame.type}\r\n".encode() + _unnamed(frame)


def _unnamed(frame: Frame) -> bytes:
    id_line = "" if frame.seq is None else f"id: {frame.seq}\r\n"
    return f"{id_line}data: ".encode() + frame.body + b"\r\n\r\n"


LOOKS_S = 0.5
"""Seconds between two searches for new child runs."""
ENDS_S = 10.0
"""Maximum wait for the last frames of child runs after their parent's final event, in seconds."""
MOST_AT_ONCE = 100
"""Maximum number of child runs that one client follows at the same time; the others wait."""

logger = Logger(__name__)


@dataclass(slots=True)
class Family:
    """A run and its child runs, whose events one client follows together.

    Args:
        parent: the reader of the run's own events.
        find: a function that takes ids of runs and returns the ids of their child runs; it may
            leave out child runs that ended some time ago.
    """

    streams: RunStreams
    tenant_id: UUID
    run_id: UUID
    parent: Subscriber
    only: Filter
    find: Callable[[Collection[UUID]], Awaitable[Iterable[UUID]]]
    _known_ids: set[UUID] = field(default_factory=set)
    _following: dict[asyncio.Task[None], UUID] = field(default_factory=dict)
    _ended: set[UUID] = field(default_factory=set)
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_AT_ONCE))
    # The queue holds one entry at most: so the runs' readers are never faster than the client.
    _frames: asyncio.Queue[list[Frame] | None] = field(default_factory=lambda: asyncio.Queue(1))

    async def frames(self) -> AsyncGenerator[list[Frame]]:
        """Yield frames of all runs; an empty list means that a heartbeat is due.

        A child run's frames are in order, begin with the child run's first event, and have no
        ``seq``, because a client resumes after a ``seq`` of the parent run. The final event of the
        run comes last.
        """
        looking = asyncio.create_task(self._look_again())
        read_task = asyncio.create_task(self._read(looking))
        try:
            while (frames := await self._frames.get()) is not None:
                yield frames
            await read_task
        finally:
            tasks = [looking, read_task, *self._following]
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
        # A run ends after its child runs, so one search after the run's end finds the last child
        # runs.
        ended = set(self._ended)
        parents = {self.run_id, *self._following.values(), *ended}
        new_ids = set(await self.find(parents)) - self._known_ids
        self._ended -= ended
        self._known_ids |= new_ids
        for run_id in new_ids:
            task = asyncio.create_task(self._follow(run_id))
            self._following[task] = run_id
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._ended.add(self._following.pop(task))

    async def _follow(self, run_id: UUID) -> None:
        async with self._places:
            with suppress(NotFoundError):  # the run was deleted meanwhile
                cursor = await self.streams.cursor_of(self.tenant_id, run_id)
                with self.streams.watching(cursor, 0) as stream:
                    child = Subscriber(stream, 0, self.only)
                    while (frames := await child.next()) is not None:
                        if frames:
                            await self._frames.put([replace(each, seq=None) for each in frames])
