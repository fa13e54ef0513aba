"""The WebSocket on which a client watches a run, and the tickets for browsers.

Browsers need tickets, because their WebSockets and EventSources cannot send an Authorization
header. ``bottega.api.auth`` redeems a ticket before it calls the route. A ticket has the scopes of
the key that requested the ticket; if the key becomes invalid, the ticket does, too.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast
from uuid import UUID

from fastapi import APIRouter, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, from_json, to_json
from starlette.websockets import WebSocketDisconnect
from uvicorn.protocols.utils import ClientDisconnected

from bottega import metrics
from bottega.api.auth import Principal
from bottega.api.errors import (
    database_unavailable,
    field_problem,
    for_error,
    invalid,
    problem_response,
    problems,
)
from bottega.api.routes.stream import WatchQuery
from bottega.api.schemas.base import Answer, Body
from bottega.api.schemas.interrupts import Resolve
from bottega.api.schemas.messages import SendMessage
from bottega.api.server import connections
from bottega.api.server.connections import (
    DROP,
    MAY_PING,
    PING_BURST,
    PINGS_PER_S,
    SEND,
    TOO_MANY_PINGS,
)
from bottega.api.server.middleware import TURN
from bottega.api.shared.deps import PrincipalDep, ReviewTenant, ServiceDep, refuse_unknown_query
from bottega.api.shared.run_control import decide, refuse_other_user, send_message
from bottega.container import Service
from bottega.db.failures import is_transient
from bottega.errors import BottegaError, InvalidInputError
from bottega.events.reader import RunCursor
from bottega.events.stream import RunStream, Subscriber
from bottega.logger import Logger
from bottega.runs import read
from bottega.runs.control import request_cancel, request_task_cancel
from bottega.tenants import keys
from bottega.tenants.tokens import TICKET_S, Token

log = Logger(__name__)

Sent = TypeVar("Sent", bound=Body)

router = APIRouter(prefix="/v1/runs", tags=["runs"])

SUBPROTOCOL = "bottega.v1"
FINISHED, STOPPING, BROKEN, REPLACED, REVOKED, SLOW, DELETED, WENT_BACK = (
    1000,
    1001,
    1011,
    1012,
    4001,
    4008,
    4010,
    4011,
)
CLOSES = {
    FINISHED: "the final event was sent",
    STOPPING: "the server stops: reconnect with the seq in the reason",
    BROKEN: "an error of the server: reconnect with the seq in the reason",
    REPLACED: "another process of the server takes over: reconnect with the seq in the reason",
    REVOKED: "the key was revoked or has expired, or a key is required now",
    SLOW: (
        "the client reads too slowly or sends too many pings: it may reconnect with the seq in "
        "the reason"
    ),
    DELETED: "the run was deleted: do not reconnect",
    WENT_BACK: (
        "the log lost events that were sent, in a failover of the database: load the run again"
    ),
}
PING_LIMIT = (
    f"a socket may send {PINGS_PER_S:g} ping per second, and {PING_BURST} at once; "
    "beyond that it is closed with 4008. Frames that the server does not know, and WebSocket pings "
    "and pongs, count as pings; cancel, message and resolve frames count as requests instead"
)
_KNOWN = (
    'known frames: {"type":"ping"}, {"type":"cancel"} (with task_id: only this task; user: the '
    'run\'s user), {"type":"message"} with content, {"type":"resolve"} with interrupt_id and a '
    "decision"
)
_HEARTBEAT = b'{"type":"heartbeat"}'
_CANCELLED = '{"type":"cancel.accepted"}'


async def watch(socket: WebSocket) -> None:
    """Send the run's events as JSON text frames, then close the socket with 1000.

    A refusal is an HTTP response before the upgrade. The client may send ``{"type": "ping"}``,
    ``{"type": "cancel"}``, ``{"type": "message"}`` and ``{"type": "resolve"}``. The frames
    ``cancel`` and ``message`` need the scope ``run``. A cancellation with a ``task_id`` cancels
    only this task. The frame ``resolve`` needs the same scopes as its HTTP route. The server treats
    every other frame as a ping.
    """
    with contextlib.suppress(
        ClientDisconnected
    ):  # the client disconnected during the handshake or the refusal
        await _watch(socket)


# Use a route of Starlette: a route of FastAPI would also look for dependencies, and there are none.
router.add_websocket_route(f"{router.prefix}/{{run_id}}/ws", watch)


async def nowhere(socket: WebSocket) -> None:
    """Refuse a WebSocket at every path that has no WebSocket route."""
    detail = f"there is no WebSocket at this path: a run's path is {router.prefix}/{{id}}/ws"
    with contextlib.suppress(ClientDisconnected):
        await socket.send_denial_response(problem_response(404, "not_found", detail))


async def _watch(socket: WebSocket) -> None:
    service: Service = socket.app.state.service
    try:
        refuse_unknown_query(socket.query_params, WatchQuery.model_fields)
        query = WatchQuery.model_validate(dict(socket.query_params))
        run_id = UUID(socket.path_params["run_id"])
        socket.state.principal.need("read", "approve")
        cursor = await service.streams.cursor_of(socket.state.principal.tenant_id, run_id)
        cursor.require(query.after)
    except Exception as error:
        await socket.send_denial_response(_refusal(error))
        return
    offered = SUBPROTOCOL in socket.scope["subprotocols"]
    open_streams = metrics.streams.labels("websocket")
    with (
        open_streams.track_inprogress(),
        service.streams.watching(cursor, query.after) as watched,
    ):
        await socket.accept(SUBPROTOCOL if offered else None)
        await _serve(socket, service, cursor, watched, query)


def _refusal(error: Exception) -> Response:
    if isinstance(error, ValidationError):
        return invalid([{**item, "loc": ("query", *item["loc"])} for item in error.errors()])
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, BottegaError):
        return for_error(error, has_body=False)
    if isinstance(error, ValueError):
        return problem_response(422, "invalid", "the run's id must be a UUID")
    if is_transient(error):
        return database_unavailable()
    raise error


async def _serve(
    socket: WebSocket, service: Service, cursor: RunCursor, watched: RunStream, query: WatchQuery
) -> None:
    """Send events and read frames until the run ends, or the client or the server disconnects."""
    subscriber = Subscriber(watched, query.after, query.only)
    sending = _Sender(socket, subscriber, connections.SLOW_READER_S)
    socket.scope["extensions"][TOO_MANY_PINGS] = sending.refuse_pings
    tasks = [
        asyncio.ensure_future(sending.send_all()),
        asyncio.ensure_future(_read_frames(socket, service, cursor, sending)),
    ]
    identity = socket.state.principal.identity
    try:
        with (
            service.keys.watching(identity, sending.revoke),
            service.wakeups.resumable(sending.hand_over),
        ):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # if the first task is done, the socket is closed, so an error while answering is expected
        if not tasks[0].done():
            tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Sender:
    """Sender of a subscriber's frames, and of the frame that closes the socket.

    Args:
        patience_s: maximum number of seconds for which the client may read nothing.

    Attributes:
        answering: lock that the server holds while it answers a client's frame.
    """

    def __init__(self, socket: WebSocket, subscriber: Subscriber, patience_s: float) -> None:
        self._socket = socket
        # `_send` and `_drop` are functions of the server's protocol,
        # `bottega.api.server.connections`.
        self._send = socket.scope["extensions"][SEND]
        self._drop = socket.scope["extensions"][DROP]
        self._subscriber = subscriber
        self._patience_s = patience_s
        self._position = subscriber.place
        self._handed_over = False
        self.answering = asyncio.Lock()

    @property
    def stopped(self) -> bool:
        """True if the socket ends although the run may have more events."""
        return self._subscriber.stopped

    def revoke(self) -> None:
        """Close the socket, because the client's key is no longer valid."""
        self._break_off(REVOKED, "key revoked, expired or missing")

    def refuse_pings(self) -> None:
        """Close the socket, because the client has sent too many pings."""
        self._break_off(SLOW, "too many pings")

    def hand_over(self) -> None:
        """Close the socket, because another process takes over."""
        self._handed_over = True
        self._subscriber.stop()

    def _break_off(self, code: int, why: str) -> None:
        self._subscriber.stop()
        self._drop(code, f"{why}; resume after={self._position}")

    async def send_all(self) -> None:
        """Send frames until the socket is closed or dropped."""
        try:
            while (frames := await self._subscriber.next()) is not None:
                position = self._subscriber.place
                async with asyncio.timeout(self._patience_s):
                    await self._send([frame.body for frame in frames] or [_HEARTBEAT])
                self._position = position
            # the number of the last event, even if the filter dropped this event
            self._position = self._subscriber.place
            if self._subscriber.finished:
                await self._last_answer()
            async with asyncio.timeout(self._patience_s):
                if self._subscriber.finished:
                    await self._socket.close(FINISHED)
                elif self._subscriber.went_back:
                    await self._socket.close(WENT_BACK, "the log went back: load the run again")
                elif self._subscriber.orphaned:
                    await self._socket.close(DELETED, "the run was deleted")
                elif self._handed_over:
                    hint = f"server restarting; resume after={self._position}"
                    await self._socket.close(REPLACED, hint)
                elif not self._subscriber.stopped:
                    hint = f"server stopping; resume after={self._position}"
                    await self._socket.close(STOPPING, hint)
        except TimeoutError:
            self._drop(SLOW, f"slow; resume after={self._position}")
        except (WebSocketDisconnect, ClientDisconnected):
            pass
        except Exception:
            log.exception("websocket.broken")
            self._drop(BROKEN, f"internal error; resume after={self._position}")

    async def _last_answer(self) -> None:
        with contextlib.suppress(TimeoutError):
            # The lock `answering` is free as soon as the answer has been sent.
            async with asyncio.timeout(1.0), self.answering:
                pass


async def _read_frames(
    socket: WebSocket, service: Service, cursor: RunCursor, sending: _Sender
) -> None:
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect" or sending.stopped:
                return
            async with sending.answering:
                answer = await _answer(_frame(message.get("text")), socket, service, cursor)
                if answer is None:
                    return
                await socket.send_text(answer)


async def _answer(
    frame: dict[str, Any], socket: WebSocket, service: Service, cursor: RunCursor
) -> str | None:
    extensions = socket.scope["extensions"]
    principal: Principal = socket.state.principal
    match frame:
        case {"type": "cancel", **others} if not others.keys() - {"task_id", "user"}:
            return await _request(partial(_cancel, service, cursor, others, principal), extensions)
        case {"type": "resolve"}:
            return await _request(partial(_resolve, service, cursor, frame, principal), extensions)
        case {"type": "message"}:
            return await _request(partial(_message, service, cursor, frame, principal), extensions)
        case _ if not extensions[MAY_PING]():
            return None
        case {"type": "ping", **others} if not others:
            return '{"type":"pong"}'
    return to_json({"type": "error", "code": "unknown_frame", "detail": _KNOWN}).decode()


async def _request(act: Callable[[], Awaitable[str]], extensions: Mapping[str, Any]) -> str:
    if TURN in extensions:
        await extensions[TURN]()
    try:
        return await act()
    except Exception as error:
        return _error(error)


async def _cancel(
    service: Service, cursor: RunCursor, frame: Mapping[str, Any], principal: Principal
) -> str:
    principal.need("run")
    principal.need_action("cancel")
    database, actor = service.database, principal.actor
    task, user = frame.get("task_id"), frame.get("user")
    if not isinstance(user, str | None):
        raise InvalidInputError("user must be a text")
    await refuse_other_user(service, principal, cursor.run_id, user, "/user")
    if task is None:
        await request_cancel(database, cursor.tenant_id, cursor.run_id, actor)
        return _CANCELLED
    try:
        task_id = UUID(str(task))
    except ValueError:
        raise InvalidInputError("task_id must be a UUID") from None
    await request_task_cancel(database, cursor.tenant_id, cursor.run_id, task_id, actor)
    return _CANCELLED


async def _resolve(
    service: Service, cursor: RunCursor, frame: Mapping[str, Any], principal: Principal
) -> str:
    body = _valid(Resolve, frame)
    async with service.database.begin(cursor.tenant_id) as tx:
        await decide(tx, principal, body.interrupt_id, body, run_id=cursor.run_id)
    accepted = {"type": "resolve.accepted", "interrupt_id": body.interrupt_id}
    return to_json(accepted).decode()


async def _message(
    service: Service, cursor: RunCursor, frame: Mapping[str, Any], principal: Principal
) -> str:
    principal.need("run")
    principal.need_action("message")
    message = await send_message(service, principal, cursor.run_id, _valid(SendMessage, frame))
    return to_json({"type": "message.accepted", **message}).decode()


def _valid(schema: type[Sent], frame: Mapping[str, Any]) -> Sent:
    try:
        return schema.model_validate(frame)
    except ValidationError as error:
        first = error.errors()[0]
        problem = field_problem({**first, "loc": ("body", *first["loc"])}, frame)
        raise InvalidInputError(f"{problem.pointer or ''} {problem.detail}".strip()) from None


def _error(error: Exception) -> str:
    problem = from_json(bytes(_refusal(error).body))
    answer = {"type": "error", "code": problem["code"], "detail": problem["detail"]}
    return to_json(answer).decode()


def _frame(text: str | None) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        frame = from_json(text or "")
        if isinstance(frame, dict):
            return cast(dict[str, Any], frame)
    return {}


tickets_router = APIRouter(prefix="/v1/ws-tickets", tags=["runs"])


class NewTicket(Body):
    """A request for a ticket."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}]})

    opens: Annotated[Literal["websocket", "sse"], Field(alias="for")] = "websocket"
    """`websocket`: the ticket opens one WebSocket within 60 seconds. `sse`: the ticket opens the
    event stream of a run for an hour, so that an EventSource can reconnect."""
    run_id: Annotated[Annotated[UUID, Field(strict=False)] | None, Field(validate_default=True)] = (
        None
    )
    """The only run that the ticket opens; null (only for `websocket`): all runs of the tenant."""

    @field_validator("run_id")
    @classmethod
    def _names_one_for_sse(cls, value: UUID | None, info: ValidationInfo) -> UUID | None:
        if value is None and info.data.get("opens") == "sse":
            raise PydanticCustomError("missing", "a ticket for 'sse' opens one run: send run_id")
        return value


class Ticket(Answer):
    """A ticket, which opens a WebSocket or an event stream."""

    ticket: str
    """WebSocket: offer the subprotocols `["bottega.v1", "ticket.<ticket>"]`. EventSource: add
    `?ticket=<ticket>` to the URL of the run's events."""
    expires_at: datetime
    """Time until which the ticket can be used."""


@tickets_router.post(
    "",
    operation_id="create_ws_ticket",
    summary="Get a ticket for a WebSocket or an EventSource",
    description=(
        "For browsers, whose WebSockets and EventSources cannot send an Authorization header. "
        "Every API process accepts the ticket. The ticket has the scopes of your key, or the "
        "actions of your token, and ends with the key or token."
    ),
    status_code=201,
    response_model=Ticket,
    responses=problems(400, 404, 413, 415),
)
async def create(
    service: ServiceDep, principal: PrincipalDep, tenant: ReviewTenant, body: NewTicket
) -> Any:
    key = None
    async with service.database.begin(tenant) as tx:
        if body.run_id is not None:
            await read.get(tx, tenant, body.run_id)
        if principal.key_id is not None:
            key = await keys.get(tx, tenant, principal.key_id)
    await service.keys.know_tokens()
    signer, parent, person = service.keys.tokens, principal.token, principal.person
    ends = signer.until(TICKET_S[body.opens], None if key is None else key["expires_at"])
    text, token = signer.sign(
        replace(
            parent or Token(tenant, principal.key_id, None if key is None else key["prefix"], ends),
            expires_at=min([ends, *(each.expires_at for each in (parent, person) if each)]),
            scopes=tuple(principal.scopes),
            require_user=principal.require_user,
            limits=principal.limits,
            opens=body.opens,
            run_id=body.run_id,
            parent="" if person else parent.jti if parent else None,
            parent_expires_at=next((each.expires_at for each in (parent, person) if each), None),
        )
    )
    return Ticket(ticket=text, expires_at=datetime.fromtimestamp(token.expires_at, UTC))
