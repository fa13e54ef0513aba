"""``/asyncapi.json``: the AsyncAPI document of the WebSocket."""

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json

import bottega
from bottega.api.auth import TICKET
from bottega.api.documents.openapi import SCHEME
from bottega.api.routes.tickets import VALID_S
from bottega.api.routes.websocket import CLOSES, PING_LIMIT, SUBPROTOCOL
from bottega.api.schemas.base import Answer
from bottega.api.schemas.events.catalogue import EVENTS, OtherEvent
from bottega.api.schemas.interrupts import Resolve
from bottega.api.schemas.messages import MessageSent, SendMessage
from bottega.api.schemas.runs import Event
from bottega.api.server.documents import LateDocument
from bottega.api.shared.event_filter import WatchQuery
from bottega.events.frames import LLM_DELTA

router = APIRouter(tags=["operations"])

_REF = "#/components/schemas/{model}"


class LiveText(Answer):
    """Text of a model call that arrived since the last frame."""

    call: int
    attempt: int
    offset: Annotated[
        int, Field(description=("Place in characters; it replaces the text from there."))
    ]
    text: str


class Delta(Event):
    """Live text; not stored."""

    seq: None  # type: ignore[assignment]
    type: Literal["llm.delta"]
    data: LiveText  # type: ignore[assignment]


class OutputChunk(Delta):
    """Live text of an asynchronous task, for subscribers that name this type."""

    type: Literal["subagent.output_chunk"]  # type: ignore[assignment]


class ToolReport(Answer):
    """Progress of a call of an MCP tool, in the server's own units."""

    tool_call_id: str
    name: str
    progress: float
    total: float | None
    message: str | None


class ToolProgress(Event):
    """The newest progress of a tool call; not stored."""

    seq: None  # type: ignore[assignment]
    type: Literal["tool.progress"]
    data: ToolReport  # type: ignore[assignment]


class Heartbeat(Answer):
    """A frame in quiet times: all events up to `seq` were sent or filtered out."""

    type: Literal["heartbeat"]
    seq: int


class Pong(Answer):
    """The answer to a ping."""

    type: Literal["pong"]


class CancelAccepted(Answer):
    """Confirmation that the cancellation is stored."""

    type: Literal["cancel.accepted"]


class ResolveAccepted(Answer):
    """Confirmation that the decision is stored."""

    type: Literal["resolve.accepted"]
    interrupt_id: UUID


class MessageAccepted(MessageSent):
    """Confirmation that the message is stored."""

    type: Literal["message.accepted"]


class FrameError(Answer):
    """An error: the frame is unknown, or cannot be carried out."""

    type: Literal["error"]
    code: str
    detail: str


class Ping(Answer):
    """A request for a pong."""

    type: Literal["ping"]


class Cancel(Answer):
    """A request to cancel the run, or one task and all tasks below it.

    With a ``user`` it is refused unless the run is that user's.
    """

    type: Literal["cancel"]
    task_id: UUID | None = None
    user: str | None = None


_TICKET_SCHEME = {
    "type": "httpApiKey",
    "name": "Sec-WebSocket-Protocol",
    "in": "header",
    "description": f"For browsers: `{SUBPROTOCOL}, {TICKET}<ticket>`.",
}

_SENT: tuple[type[BaseModel], ...] = (
    Delta,
    OutputChunk,
    ToolProgress,
    Heartbeat,
    Pong,
    CancelAccepted,
    ResolveAccepted,
    MessageAccepted,
    FrameError,
)
_RECEIVED: tuple[type[BaseModel], ...] = (Ping, Cancel, SendMessage, Resolve)


@router.head("/asyncapi.json", include_in_schema=False)
@router.get(
    "/asyncapi.json",
    operation_id="get_asyncapi",
    summary="The WebSocket as an AsyncAPI document",
    response_model=dict[str, Any],
)
async def asyncapi(request: Request) -> Response:
    return await _DOCUMENT.answer(request)


def document() -> dict[str, Any]:
    """Return the AsyncAPI 3.0 document of this version."""
    models: tuple[type[BaseModel], ...] = (*EVENTS.values(), OtherEvent, *_SENT, *_RECEIVED)
    _, schemas = models_json_schema(
        [(model, "serialization") for model in models], ref_template=_REF
    )
    sent = [*map(str, EVENTS), "other", *map(_name, _SENT)]
    received = [_name(model) for model in _RECEIVED]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Bottega: watching a run",
            "version": bottega.__version__,
            "description": _described(),
        },
        "defaultContentType": "application/json",
        "channels": {
            "run": {
                "address": "/v1/runs/{run_id}/ws",
                "parameters": {"run_id": {"description": "The run's id."}},
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in
                             (*sent, *received)},
                "bindings": {"ws": {"method": "GET", "query": WatchQuery.model_json_schema()}},
            }
        },
        "operations": {
            "watch": _operation("send", sent),
            "control": _operation("receive", received),
        },
        "components": {
            "messages": {
                **{str(kind): _message(model) for kind, model in EVENTS.items()},
                "other": _message(OtherEvent),
                **{_name(model): _message(model) for model in (*_SENT, *_RECEIVED)},
            },
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": SCHEME, "ticket": _TICKET_SCHEME},
        },
    }  # fmt: skip


def _described() -> str:
    closes = "; ".join(f"{code}: {meaning}" for code, meaning in CLOSES.items())
    return (
        f"Close codes: {closes}. A refusal is an HTTP answer with a problem, before the upgrade. "
        f"Subprotocols: `{SUBPROTOCOL}`, and for browsers `{TICKET}<ticket>` with a ticket of "
        f"POST /v1/ws-tickets, good once for {VALID_S['websocket']:g} s. Watching needs the scope "
        "`read`, the frames `cancel` and `message` the scope `run`, the frame `resolve` the scope "
        "`approve` "
        "(approvals), or `run` or `approve` (the rest); else an `error` frame has the code "
        f"`insufficient_scope`. Pings: {PING_LIMIT}."
    )


def _operation(action: str, names: list[str]) -> dict[str, Any]:
    messages = [{"$ref": f"#/channels/run/messages/{name}"} for name in names]
    security = [{"$ref": f"#/components/securitySchemes/{name}"} for name in ("key", "ticket")]
    return {
        "action": action,
        "channel": {"$ref": "#/channels/run"},
        "messages": messages,
        "security": security,
    }


def _name(model: type[BaseModel]) -> str:
    if model is Delta:
        return LLM_DELTA
    name: str = model.model_fields["type"].annotation.__args__[0]  # type: ignore[union-attr]
    return name


def _message(model: type[BaseModel]) -> dict[str, Any]:
    return {"summary": model.__doc__, "payload": {"$ref": _REF.format(model=model.__name__)}}


_DOCUMENT = LateDocument(lambda: to_json(document()))
