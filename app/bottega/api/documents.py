"""The AsyncAPI document, and FastAPI's OpenAPI document with added errors and security.

Pydantic's schemas do not show rules between a body's fields, because validators check these rules.
If a body has rules, this module replaces the body's schema by a `oneOf` of complete schemas, one
for each valid combination of fields. Client generators then make a class for each combination.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel, create_model
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json, to_json
from starlette.routing import BaseRoute

import bottega
from bottega.api.auth import TICKET, is_public
from bottega.api.errors import Problem, problems
from bottega.api.routes.batches import NewBatch
from bottega.api.routes.stream import WatchQuery
from bottega.api.routes.websocket import CLOSES, PING_LIMIT, SUBPROTOCOL
from bottega.api.schemas.base import Answer
from bottega.api.schemas.interrupts import Resolve
from bottega.api.schemas.messages import MessageSent, SendMessage
from bottega.api.schemas.runs import Event
from bottega.api.server.documents import LateDocument
from bottega.api.shared.deps import NoBody, required_scopes
from bottega.events.data import DATA, LiveText, ToolReport
from bottega.events.frames import LLM_DELTA
from bottega.events.types import EventType
from bottega.json_schema.described import SHARED_PARAMETERS
from bottega.tenants.keys import Scope
from bottega.tenants.tokens import TICKET_S

_EXAMPLES = Path(__file__).parent / "examples.json"
_REF_PREFIX = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of a body.

    Attributes:
        name: name of the variant's schema.
        needs: fields that must be present and not null.
        lacks: fields that must be absent or null.
        mode: allowed values of the field `mode`; empty if the body has no field `mode`.
        rules: JSON Schema keywords to add to the schemas of fields, by field name.
    """

    name: str
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_NULL: dict[str, Any] = {"const": None}
"""Means the same as `{"type": "null"}`, from which openapi-generator makes a wrong class."""
_ABSENT = {**_NULL, "description": "Not in this variant."}
_NO_SIGNATURE = {"properties": {"failure_signature": _ABSENT}}
_SIGNATURE = {
    "properties": {
        "failure_signature": {
            "type": "string",
            "description": "Only episodes with this signature of a failure.",
        }
    },
    "required": ["failure_signature"],
}
_NO_HEADERS = {"headers": {"maxProperties": 0}}

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "NewRun": (
        Variant("OrchestratedRun", needs=("agent",), mode=("orchestrated",)),
        Variant("DagRun", needs=("mode", "graph"), lacks=("agent",), mode=("dag",)),
    ),
    "SubAgents": (
        Variant("SyncSubAgents", lacks=("limits",), mode=("sync",)),
        Variant("AsyncSubAgents", needs=("mode",), mode=("async",)),
    ),
    "EpisodeSearch": (
        Variant("SearchByQuery", needs=("query",), lacks=("failure",), mode=("semantic", "hybrid")),
        Variant(
            "SearchByFilters",
            needs=("mode",),
            lacks=("query", "failure"),
            mode=("structured", "temporal"),
        ),
        Variant(
            "SearchByFailure",
            needs=("mode", "failure"),
            lacks=("query",),
            mode=("failures",),
            rules={"filters": _NO_SIGNATURE},
        ),
        Variant(
            "SearchBySignature",
            needs=("mode", "filters"),
            lacks=("query", "failure"),
            mode=("failures",),
            rules={"filters": _SIGNATURE},
        ),
    ),
    "SimilarFailures": (
        Variant("SimilarToError", needs=("error",), lacks=("failure_signature",)),
        Variant("SimilarToSignature", needs=("failure_signature",), lacks=("error",)),
    ),
    "NewLearning": (
        Variant("LearningFromStored", needs=("episode_id",), lacks=("episode",)),
        Variant("LearningFromNew", needs=("episode",), lacks=("episode_id",)),
    ),
    "NewKey": (
        Variant("NewKeyWithScopes", needs=("scopes",), lacks=("role",)),
        Variant("NewKeyWithRole", needs=("role",), lacks=("scopes",)),
    ),
    "NewMcpServer": (
        Variant("NewMcpServerAtUrl", needs=("url",), lacks=("command",)),
        Variant("NewMcpProgram", needs=("command",), lacks=("url",), rules=_NO_HEADERS),
    ),
    "McpServerBody": (
        Variant("McpServerAtUrl", needs=("url",), lacks=("command",)),
        Variant("McpProgram", needs=("command",), lacks=("url",), rules=_NO_HEADERS),
    ),
    "PatternsWanted": (
        Variant("PatternsForFeatures", needs=("features",), lacks=("task",)),
        Variant("PatternsForTask", needs=("task",), lacks=("features",)),
    ),
}


def split(schemas: dict[str, Any]) -> None:
    """Put a `oneOf` of the variants in place of each schema that has variants."""
    for name, variants in VARIANTS.items():
        whole = schemas[name]
        for variant in variants:
            schemas[variant.name] = _of(whole, variant)
        kept = {key: whole[key] for key in ("title", "description", "examples") if key in whole}
        kinds = [{"$ref": f"{_REF_PREFIX}{variant.name}"} for variant in variants]
        schemas[name] = {**kept, "oneOf": kinds}


def _of(whole: dict[str, Any], variant: Variant) -> dict[str, Any]:
    schema = {key: deepcopy(value) for key, value in whole.items() if key != "examples"}
    schema["title"] = variant.name
    fields = schema["properties"]
    if variant.mode:
        fields["mode"]["enum"] = list(variant.mode)
    for name in variant.needs:
        fields[name] = _not_null(fields[name])
    for name in variant.lacks:
        fields[name] = {**_ABSENT, "title": name.replace("_", " ").title()}
    for name, rules in variant.rules.items():
        fields[name] |= deepcopy(dict(rules))
    if required := [*dict.fromkeys((*schema.get("required", ()), *variant.needs))]:
        schema["required"] = required
    return schema


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    about = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if not kinds:
        return about
    return about | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": (
        "An API key. Each operation names the scope that it needs (`x-required-scope`): `read`; "
        "`run` or `define`, which include `read`; or `admin`, which includes all. A server that "
        "never had a key needs none, and serves only its own machine."
    ),
}


_STATUS_CODES: Mapping[int, str] = {
    400: "bad_json bad_request",
    401: "unauthenticated bad_key bad_ticket bad_token key_expired token_expired",
    403: "address_not_allowed beyond_limits insufficient_scope keys_required foreign_request "
    "other_user",
    404: "not_found",
    408: "request_timeout",
    412: "version_conflict",
    413: "body_too_large",
    414: "url_too_long",
    415: "unsupported_media_type",
    416: "range",
    422: "invalid",
    429: "rate_limited",
    431: "headers_too_large",
    500: "internal",
    503: "database_unavailable storage_full too_many_connections",
}
"""Error codes by status; each operation with the status may answer with any of these codes."""
_SECRETS = "secret_host_unset secret_in_clear secret_needs_https secret_not_for_host"
_ONCE = "idempotency_key_reused in_flight"
_STORES = "storage_quota too_many"
_PATTERNS = "pattern_checks pattern_too_large patterns_too_slow"
_RUNS = (
    "bad_data conversation_busy cost_per_day duplicate_tool egress_forbidden egress_refused "
    "file_quota mcp_server_not_refreshed object_store stateful_subagent stored_elsewhere "
    "too_many_tools too_many_uploads "
    "file_too_large files_too_large message_too_large missing_description no_webhook_secret "
    "key_tokens_per_day queued_runs reserved_field session_user storage_quota tokens_per_day "
    "too_deep too_many_messages too_many_nodes unknown_agent unknown_file unknown_graph "
    "unknown_mcp_server unknown_model unknown_provider unknown_tool unpriced_model "
    "unsupported_param unsupported_part user_erasing user_required wrong_media_type"
)
_AGENTS = (
    f"{_SECRETS} {_STORES} {_PATTERNS} cycle limit_above_operator reserved_field "
    "stateful_subagent unknown_plugin unsupported_param"
)
_GRAPHS = f"{_SECRETS} {_STORES} {_PATTERNS} cycle exists invalid_condition unknown_plugin"
_OWNED = "session_user user_required"
_OPERATION_CODES: Mapping[str, str] = {
    "add_graph_edge": f"{_STORES} cycle exists invalid_condition",
    "apply": f"{_AGENTS} {_GRAPHS} {_RUNS} unknown_command unknown_reference",
    "cancel_run": _OWNED,
    "cancel_run_task": _OWNED,
    "change_lesson": f"{_OWNED} removed too_many_pinned",
    "create_user_fact": "too_many_facts user_erasing",
    "change_user_fact": "exists",
    "change_pattern": "invalid_condition stale_version",
    "change_schedule": _OWNED,
    "change_session": f"{_OWNED} storage_quota",
    "create_batch": f"{_RUNS} {_ONCE} duplicate_key",
    "create_eval": f"{_RUNS} {_ONCE} {_PATTERNS} duplicate_target exists unknown_plugin",
    "create_agent": f"{_AGENTS} {_ONCE} exists",
    "create_draft_run": f"{_AGENTS} {_RUNS} {_ONCE} {_PATTERNS}",
    "create_file": "bad_multipart file_quota file_too_large object_store storage_quota "
    "too_many_uploads upload_stopped user_erasing user_required session_user",
    "create_graph": f"{_GRAPHS} {_ONCE}",
    "create_key": "too_many_keys",
    "create_mcp_server": f"{_SECRETS} {_STORES} {_ONCE} egress_forbidden exists unknown_command",
    "create_pattern": f"{_ONCE} invalid_condition",
    "create_provider": f"{_SECRETS} {_STORES} {_ONCE} egress_forbidden exists",
    "create_run": f"{_RUNS} {_ONCE} {_PATTERNS}",
    "create_schedule": f"{_RUNS} {_ONCE} {_PATTERNS} exists too_many",
    "create_session": f"{_ONCE} exists storage_quota user_erasing user_required",
    "delete_file": _OWNED,
    "delete_lesson": _OWNED,
    "delete_schedule": _OWNED,
    "delete_secret": "no_secrets_key",
    "delete_session": _OWNED,
    "delete_session_memory": _OWNED,
    "dry_run_graph": "dry_run_too_large dry_runs unknown_agent",
    "export_user": "user_erasing",
    "find_context": "user_required",
    "find_similar_failures": "user_required",
    "fork_run": f"{_RUNS} {_ONCE} child_run no_graph no_root node_skipped not_final not_the_user "
    "unknown_event unknown_node",
    "fork_session": f"{_OWNED} {_ONCE} exists not_completed not_final storage_quota unknown_run "
    "user_erasing",
    "get_episode": "user_required",
    "get_file": _OWNED,
    "get_file_content": f"{_OWNED} object_store stored_elsewhere",
    "get_graph_drawing": "drawings no_node",
    "get_run_graph": "no_graph no_node",
    "get_run_context": "no_graph",
    "get_run_prompt": "no_model_call",
    "get_secret": "no_secrets_key",
    "give_run_feedback": f"{_OWNED} not_final",
    "import_episode": f"{_OWNED} {_ONCE} storage_quota user_erasing",
    "learn_from_episode": f"{_OWNED} {_ONCE} not_final storage_quota user_erasing",
    "list_batch_events": "too_many_streams",
    "list_run_events": "log_went_back too_many_streams",
    "list_secrets": "no_secrets_key",
    "list_session_messages": _OWNED,
    "maintain_memory": "conflict",
    "merge_patterns": f"{_ONCE} conflict invalid_condition",
    "put_secret": "no_secrets_key secret_is_vocabulary too_many",
    "record_pattern_application": f"{_ONCE} stale_version",
    "refresh_mcp_server": f"{_STORES} bad_path changed duplicate_tool egress_bad_answer "
    "egress_forbidden egress_refused egress_timeout egress_tls egress_unreachable refreshes "
    "mcp_unreachable no_secrets_key unknown_command unknown_secret",
    "remove_graph_edge": _STORES,
    "replace_agent": f"{_AGENTS} exists",
    "replace_graph": _GRAPHS,
    "replace_mcp_server": f"{_SECRETS} {_STORES} egress_forbidden exists unknown_command",
    "replace_provider": f"{_SECRETS} {_STORES} egress_forbidden exists",
    "replace_schedule": f"{_RUNS} {_PATTERNS} too_many",
    "resolve_interrupt": f"{_OWNED} cancelled expired not_the_user resolved",
    "retry_batch": "nothing_failed",
    "retry_run": f"{_RUNS} {_ONCE} child_run not_final",
    "rotate_webhook_secret": "too_many",
    "search_episodes": "user_required",
    "send_run_message": f"{_OWNED} bad_data egress_refused file_quota file_too_large "
    "message_too_large object_store too_many_uploads "
    "final no_root storage_quota too_many_messages unknown_file unsupported_part",
    "set_default_model": "unknown_model unknown_provider",
    "stream_run_events": "log_went_back too_many_streams",
    "test_provider": f"{_SECRETS} egress_forbidden",
}
"""Error codes that only some operations have, by operation id."""


def _name_codes(operation: dict[str, Any]) -> None:
    codes = _OPERATION_CODES.get(operation["operationId"], "").split()
    for status in operation["responses"]:
        codes += _STATUS_CODES.get(int(status), "").split()
    names = {each["name"] for each in operation.get("parameters", ())}
    codes += ["invalid_cursor"] * ("cursor" in names) + ["user_required"] * ("user" in names)
    operation["x-error-codes"] = sorted({*codes})


class OtherEvent(Event):
    """An event of a type that this version does not know."""


def _event(kind: EventType) -> type[Event]:
    words = kind.value.replace(".", "_").split("_")
    fields: dict[str, Any] = {"type": (Literal[kind.value], ...), "data": (DATA[kind], ...)}
    return create_model(
        "".join(map(str.capitalize, words)) + "Event",
        __base__=Event,
        __doc__=f"An event of the type `{kind}`.",
        **fields,
    )


@functools.cache
def event_models() -> Mapping[EventType, type[Event]]:
    """Return the model of an event by event type. The service makes the models at the first use."""
    return {kind: _event(kind) for kind in EventType}


def _type_events(schemas: dict[str, Any]) -> None:
    """Replace, in place, the schema ``Event`` with one schema for each type of event.

    ``KnownEvent`` is the union of all types that this version knows. An event of a plugin, or of a
    different version of Bottega, is an ``OtherEvent``.
    """
    models: tuple[type[Event], ...] = (*event_models().values(), OtherEvent)
    _, rows = models_json_schema([(each, "serialization") for each in models], ref_template=_REF)
    for name, schema in rows["$defs"].items():
        schemas.setdefault(name, schema)
    refs = {str(kind): _REF.format(model=model.__name__) for kind, model in event_models().items()}
    schemas["KnownEvent"] = {
        "title": "KnownEvent",
        "description": "An event of a type that this version knows.",
        "oneOf": [{"$ref": each} for each in refs.values()],
        "discriminator": {"propertyName": "type", "mapping": refs},
    }
    either = ("KnownEvent", "OtherEvent")
    schemas["Event"] = {
        "title": "Event",
        "description": Event.__doc__,
        "anyOf": [{"$ref": _REF.format(model=each)} for each in either],
    }


def openapi_document(app: FastAPI, routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes; it is built at the first call."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=routes,
        )
        _, definitions = models_json_schema(
            [(Problem, "serialization"), (NewBatch, "validation")],
            ref_template="#/components/schemas/{model}",
        )
        if root := app.state.service.settings.root_path:
            schema["servers"] = [{"url": root}]
        schema["components"]["schemas"] |= definitions["$defs"]
        split(schema["components"]["schemas"])
        _type_events(schema["components"]["schemas"])
        _name_defaults(schema["components"]["schemas"].values())
        schema["components"]["securitySchemes"] = {"key": SCHEME}
        for operations in schema["paths"].values():
            for operation in operations.values():
                _describe_parameters(operation)
                _show_answers(operation)
                # Before routing, the server refuses requests that are too slow or too long.
                # Operations that accept no body also refuse requests that have a body.
                _add_problems(operation, 408, 414, 422, 431)
        for path, method, scopes in _protected(routes):
            _protect(schema["paths"][path][method], scopes)
            _name_codes(schema["paths"][path][method])
        app.openapi_schema = schema
    return app.openapi_schema


@functools.cache
def examples() -> Mapping[str, Mapping[str, Any]]:
    """Return the responses that tests/contract recorded, by operation, status and media type."""
    found: dict[str, dict[str, Any]] = from_json(_EXAMPLES.read_bytes())
    return found


def _show_answers(operation: dict[str, Any]) -> None:
    recorded = examples().get(operation["operationId"], {})
    for status, answer in operation["responses"].items():
        # If no response is recorded for a status (such as 202), show the response of a different
        # status (200).
        kinds: Mapping[str, Any] = recorded.get(status) or next(iter(recorded.values()), {})
        for kind, content in answer.get("content", {}).items():
            if (body := kinds.get(kind, kinds.get("text/plain"))) is not None:
                content["example"] = body


def _describe_parameters(operation: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", ()):
        if not parameter.get("description"):
            parameter["description"] = SHARED_PARAMETERS[parameter["name"]]


def _name_defaults(schemas: Iterable[dict[str, Any]]) -> None:
    """Move each ``default`` of a field to ``x-default`` and into the field's description.

    Otherwise, type generators would require fields with a ``default``, although requests, answers
    and events may lack them. Null as a default and the default of a constant say nothing new.
    """
    for schema in schemas:
        for member in schema.get("properties", {}).values():
            default = member.pop("default", None)
            if default is not None and "const" not in member:
                member["x-default"] = default
                said = f"Default: {to_json(default).decode()}."
                member["description"] = " ".join(filter(None, (member.get("description"), said)))


def _protected(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, str, tuple[Scope, ...]]]:
    for context in iter_route_contexts(routes):
        route = context.original_route
        path = context.path_format or ""
        if not isinstance(route, APIRoute) or not route.include_in_schema or is_public(path):
            continue
        for method in route.methods or ():
            yield path, method.lower(), _scopes(route, method)


def _scopes(route: APIRoute, method: str) -> tuple[Scope, ...]:
    dependencies = [each.call for each in _all(route.dependant) if each.call is not None]
    scope_sets = {scopes for call in dependencies if (scopes := required_scopes(call, method))}
    if len(scope_sets) != 1:
        raise TypeError(
            f"{method} {route.path} needs exactly one of the tenant dependencies in "
            "bottega.api.shared.deps"
        )
    return scope_sets.pop()


def _all(dependant: Dependant) -> Iterator[Dependant]:
    for child in dependant.dependencies:
        yield child
        yield from _all(child)


def _protect(operation: dict[str, Any], scopes: tuple[Scope, ...]) -> None:
    operation["security"] = [{"key": []}]
    operation["x-required-scope"] = scopes[0] if len(scopes) == 1 else list(scopes)
    _add_problems(operation, 401, 403, 422, 429, 500, 503)


def _add_problems(operation: dict[str, Any], *statuses: int) -> None:
    added = {str(status): problems(status)[status] for status in statuses}
    operation["responses"] = dict(sorted({**added, **operation["responses"]}.items()))


router = APIRouter(tags=["operations"])

_REF = "#/components/schemas/{model}"


class Delta(Event):
    """Live text; not stored."""

    seq: None  # type: ignore[assignment]
    """Always null: live text is not in the log."""
    type: Literal["llm.delta"]
    data: LiveText  # type: ignore[assignment]


class OutputChunk(Delta):
    """Live text of an asynchronous task.

    Only subscribers whose filter names this type get this frame.
    """

    type: Literal["subagent.output_chunk"]  # type: ignore[assignment]


class ToolProgress(Event):
    """The newest progress of a tool call; the progress is not stored."""

    seq: None  # type: ignore[assignment]
    """Always null: progress is not in the log."""
    type: Literal["tool.progress"]
    data: ToolReport  # type: ignore[assignment]


class Heartbeat(Answer):
    """A frame that the server sends when it has sent no other frame for some time."""

    type: Literal["heartbeat"]


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
    """An error: the server does not know the client's frame, or the frame's request failed."""

    type: Literal["error"]
    code: str
    """Stable code of the error."""
    detail: str


class Ping(Answer):
    """A request for a pong."""

    type: Literal["ping"]


class Cancel(Answer):
    """A request to cancel the run, or one task and its sub-tasks.

    If the request has a ``user``, the run must belong to this user.
    """

    type: Literal["cancel"]
    task_id: UUID | None = None
    """The task to cancel; null: the whole run."""
    user: str | None = None
    """The end user to whom the run must belong; null: any user."""


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
    dependencies=[NoBody],
    summary="The WebSocket as an AsyncAPI document",
    description=(
        "For clients that watch runs: frames in both directions, and the data of each event."
    ),
    response_model=dict[str, Any],
)
async def asyncapi(request: Request) -> Response:
    return await _DOCUMENT.answer(request)


def asyncapi_document() -> dict[str, Any]:
    """Return the AsyncAPI 3.0 document of this version."""
    events = event_models()
    models: tuple[type[BaseModel], ...] = (*events.values(), OtherEvent, *_SENT, *_RECEIVED)
    _, schemas = models_json_schema(
        [(model, "serialization") for model in models], ref_template=_REF
    )
    query = WatchQuery.model_json_schema()
    _name_defaults((query, *schemas["$defs"].values()))
    names = [*map(str, events), "other", *map(_name, _SENT)]
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
                             (*names, *received)},
                "bindings": {"ws": {"method": "GET", "query": query}},
            }
        },
        "operations": {
            "watch": _operation("send", names),
            "control": _operation("receive", received),
        },
        "components": {
            "messages": {
                **{str(kind): _message(model) for kind, model in events.items()},
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
        f"POST /v1/ws-tickets, which opens one connection within {TICKET_S['websocket']:g} s. "
        "Watching needs the scope `read` or `approve`. The frames `cancel` and `message` need the "
        "scope `run`. The frame `resolve` needs `approve` for approvals, and `run` or `approve` "
        "for other interrupts. Without the scope, an `error` frame has the code "
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


_DOCUMENT = LateDocument(lambda: to_json(asyncapi_document()))
