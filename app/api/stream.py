"""Watching a run: its log as pages, as server-sent events, and over a WebSocket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, cast
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request, Response, WebSocket
from pydantic_core import from_json, to_json
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.websockets import WebSocketDisconnect

from app.api.deps import ServiceDep, Tenant
from app.api.errors import for_error, problem_response, problems
from app.api.pages import PageQuery
from app.api.schemas.base import Page
from app.api.schemas.runs import Event as EventAnswer
from app.container import Service
from app.db.base import DEFAULT_TENANT
from app.errors import NotFoundError
from app.events import log
from app.events.types import Event
from app.runs.control import request_cancel

router = APIRouter(prefix="/v1/runs", tags=["runs"])

HEARTBEAT_S = 15
_SLOW_POLL_S = 5.0
_RETRY_S = 0.2
_PAGE = 500
_MAX_SEQ = 2**62

RunId = Annotated[UUID, Path(description="The run's id.")]


async def _require_run(service: Service, tenant_id: UUID, run_id: UUID) -> None:
    query = "SELECT 1 FROM runs WHERE tenant_id = $1 AND id = $2"
    if await service.database.pool.fetchval(query, tenant_id, run_id) is None:
        raise NotFoundError(f"there is no run {run_id}")


async def _is_over(service: Service, tenant_id: UUID, run_id: UUID) -> bool:
    query = "SELECT ended_at IS NOT NULL FROM runs WHERE tenant_id = $1 AND id = $2"
    return await service.database.pool.fetchval(query, tenant_id, run_id) is not False


async def follow(
    service: Service, tenant_id: UUID, run_id: UUID, after: int = 0
) -> AsyncIterator[list[Event]]:
    """The run's events behind ``after``, in batches: replayed, then as they come.

    Ends after the final event, or when the process is about to stop. Between batches it holds
    no connection. Wake-ups are hints; a slow poll makes good for a lost one.
    """
    quiet = True  # nobody said that there is news: look whether the run is over
    with service.feed.watching(run_id) as news:
        while not service.feed.closed.is_set():
            news.clear()
            try:
                events = await log.read(service.database.pool, tenant_id, run_id, after, _PAGE)
                over = quiet and not events and await _is_over(service, tenant_id, run_id)
            except Exception as error:
                if not log.is_transient(error):
                    raise
                # The database went away; the subscriber need not notice.
                await asyncio.sleep(_RETRY_S)
                continue
            if events:
                after = events[-1].seq
                yield events
                if events[-1].is_final:
                    return
                if len(events) == _PAGE:
                    continue
            elif over:
                # The final event was before ``after``, or came between the two reads.
                if not await log.read(service.database.pool, tenant_id, run_id, after, 1):
                    return
                continue
            quiet = not await _told(news, _SLOW_POLL_S)


async def _told(news: asyncio.Event, within_s: float) -> bool:
    """Wait for news; false if none came in time."""
    try:
        async with asyncio.timeout(within_s):
            return await news.wait()
    except TimeoutError:
        return False


async def until_final(service: Service, tenant_id: UUID, run_id: UUID) -> None:
    """Return when the run is over."""
    with service.feed.watching(run_id) as news:
        while not (service.feed.closed.is_set() or await _is_over(service, tenant_id, run_id)):
            await _told(news, _SLOW_POLL_S)
            news.clear()


class EventQuery(PageQuery):
    """Query parameters of a run's events."""

    after: Annotated[
        int, Query(ge=0, le=_MAX_SEQ, description="Only events with a higher `seq`.")
    ] = 0


@router.get(
    "/{run_id}/events",
    operation_id="list_run_events",
    summary="A run's events: a page, or a live stream",
    description=(
        "With `Accept: text/event-stream`: server-sent events, first what there is behind `after` "
        "(or `Last-Event-ID`), then what comes, until the final event. Otherwise a page."
    ),
    response_model=Page[EventAnswer],
    responses={
        **problems(404),
        200: {
            "description": "A page of events, or the stream.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
    },
)
async def events(
    service: ServiceDep,
    tenant: Tenant,
    run_id: RunId,
    query: Annotated[EventQuery, Query()],
    request: Request,
    response: Response,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Annotated[str | None, Header(max_length=30)] = None,
) -> Any:
    await _require_run(service, tenant, run_id)
    if "text/event-stream" in (accept or ""):
        after = query.after
        if last_event_id and last_event_id.isascii() and last_event_id.isdigit():
            after = min(int(last_event_id), _MAX_SEQ)
        return EventSourceResponse(_sse(service, tenant, run_id, after), ping=HEARTBEAT_S)
    place: int | None = query.place(int)
    after, before = query.after, None
    if query.descending:
        before = _MAX_SEQ if place is None else place
    elif place is not None:
        after = place
    pool = service.database.pool
    found = await log.read(pool, tenant, run_id, after, query.limit + 1, before=before)
    items = [event.envelope() for event in found]
    return query.page(request, response, items, lambda event: event["seq"])


async def _sse(
    service: Service, tenant_id: UUID, run_id: UUID, after: int
) -> AsyncIterator[ServerSentEvent]:
    async for batch in follow(service, tenant_id, run_id, after):
        for event in batch:
            data = to_json(event.envelope()).decode()
            yield ServerSentEvent(data, event=event.type, id=str(event.seq))


@router.websocket("/{run_id}/ws")
async def watch(socket: WebSocket, run_id: str) -> None:
    """Send the run's events as JSON text frames, then close with 1000.

    A refusal is an HTTP answer, before the upgrade. Frames from the client: ``{"type": "ping"}``
    and ``{"type": "cancel"}``.
    """
    service: Service = socket.app.state.service
    try:
        run = UUID(run_id)
        after = int(socket.query_params.get("after", "0"))
        if not 0 <= after <= _MAX_SEQ:
            raise ValueError
    except ValueError:
        detail = "the run's id must be a UUID, and after a seq (0 or more)"
        await socket.send_denial_response(problem_response(422, "invalid", detail))
        return
    try:
        await _require_run(service, DEFAULT_TENANT, run)
    except NotFoundError as error:
        await socket.send_denial_response(for_error(error))
        return
    except Exception as error:
        if not log.is_transient(error):
            raise
        detail = "the database is out of reach at the moment: try again"
        await socket.send_denial_response(problem_response(503, "database_unavailable", detail))
        return
    await socket.accept()
    reader = asyncio.ensure_future(_read_frames(socket, service, run))
    try:
        await _send_events(socket, service, run, after, reader)
    except WebSocketDisconnect:
        pass
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _send_events(
    socket: WebSocket, service: Service, run_id: UUID, after: int, reader: asyncio.Future[None]
) -> None:
    sender = asyncio.ensure_future(_send_all(socket, service, run_id, after))
    await asyncio.wait([sender, reader], return_when=asyncio.FIRST_COMPLETED)
    if not sender.done():  # the client has gone, or sent what it must not
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        return
    sender.result()
    stopping = service.feed.closed.is_set() and not await _is_over(service, DEFAULT_TENANT, run_id)
    await socket.close(1001 if stopping else 1000)


async def _send_all(socket: WebSocket, service: Service, run_id: UUID, after: int) -> None:
    async for batch in follow(service, DEFAULT_TENANT, run_id, after):
        for event in batch:
            await socket.send_text(to_json(event.envelope()).decode())


async def _read_frames(socket: WebSocket, service: Service, run_id: UUID) -> None:
    """Answer the client's frames until it goes away."""
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            frame = _frame(message.get("text"))
            if frame == {"type": "ping"}:
                answer = '{"type":"pong"}'
            elif frame == {"type": "cancel"}:
                await request_cancel(service.database.pool, DEFAULT_TENANT, run_id)
                answer = '{"type":"cancel.accepted"}'
            else:
                answer = (
                    '{"type":"error","code":"unknown_frame","detail":"known frames: '
                    '{\\"type\\":\\"ping\\"} and {\\"type\\":\\"cancel\\"}"}'
                )
            await socket.send_text(answer)


def _frame(text: str | None) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        frame = from_json(text or "")
        if isinstance(frame, dict):
            return cast(dict[str, Any], frame)
    return {}
