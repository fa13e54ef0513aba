"""JSON-RPC messages and errors for MCP clients, in both generations of the protocol. Pure.

In versions until 2025-11-25 a client begins with ``initialize``. The session id in the server's
answer says if the client can ask people, so no process needs to store this fact. Since version
2026-07-28 there are no sessions: each request has the client's capabilities in ``_meta``.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from uuid import UUID, uuid4

from pydantic_core import from_json

from bottega import __version__
from bottega.api.server.middleware import Translation


class RpcCode(IntEnum):
    """Codes of JSON-RPC and of MCP. ``REFUSED``: the same call may succeed at a later time."""

    INVALID_REQUEST = -32600
    INVALID_PARAMS = -32602
    INTERNAL = -32603
    REFUSED = -32000
    PARSE = -32700
    UNKNOWN_METHOD = -32601
    HEADERS = -32020
    UNSUPPORTED_VERSION = -32022


_CODES = {
    400: RpcCode.INVALID_REQUEST,
    404: RpcCode.INVALID_PARAMS,
    409: RpcCode.INVALID_PARAMS,
    422: RpcCode.INVALID_PARAMS,
}


def error_body(
    code: int, message: str, data: Any = None, call_id: str | int | None = None
) -> dict[str, Any]:
    """Return a JSON-RPC error; ``call_id``: id of the request, if it has one."""
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return {"jsonrpc": "2.0", "id": call_id, "error": error}


def code_of(status: int) -> int:
    """Return the JSON-RPC error code for the HTTP status of a problem."""
    return _CODES.get(status, RpcCode.INTERNAL if status == 500 else RpcCode.REFUSED)


def translated(status: int, problem: Mapping[str, Any]) -> Translation:
    """Return a problem as a JSON-RPC error without a request id, which is unknown here."""
    data = {"code": problem["code"]}
    if errors := problem.get("errors"):
        data["errors"] = errors
    return Translation(status, error_body(code_of(status), problem["detail"], data), {})


STATELESS = "2026-07-28"
WITH_SESSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")
SPOKEN = (STATELESS, *WITH_SESSIONS)
SESSION = "mcp-session-id"
VERSION = "mcp-protocol-version"
SERVER = {"name": "bottega", "title": "Bottega", "version": __version__}

USER = "bottega/user"
"""Field of a call's ``_meta`` that has the end user of the call's run."""
CallId = str | int

_PREFIX = "io.modelcontextprotocol/"
_VERSION, _CAPABILITIES = f"{_PREFIX}protocolVersion", f"{_PREFIX}clientCapabilities"
_SERVER = f"{_PREFIX}serverInfo"
_ENCODED = re.compile(r"=\?base64\?(.*)\?=")
_SESSION = re.compile(r"(asks|mute)-[0-9a-f]{32}")
_STATE = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.([0-9]{1,18})")
_LONGEST_ID = 200
_STATUSES: dict[int, int] = {RpcCode.UNKNOWN_METHOD: 404}


class RpcError(Exception):
    """An error that the client gets.

    Attributes:
        code: JSON-RPC's error code.
        status: HTTP status.
    """

    def __init__(
        self,
        code: int,
        message: str,
        data: Any = None,
        *,
        call_id: CallId | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.body = error_body(code, message, data, call_id)


@dataclass(frozen=True, slots=True)
class McpMessage:
    """A client's request, its notification, or its answer to a request of this server.

    Attributes:
        id: id of the request; ``None``: the message is a notification.
        method: the called method; empty: the message is an answer.
        result: the result in an answer; empty if the client answered with an error.
        stateless: the message follows the protocol 2026-07-28, which has no sessions.
        session: the client's session in older versions of the protocol.
        asks: the client can ask a person (MCP elicitation with a form).
    """

    id: CallId | None
    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    stateless: bool = False
    session: str | None = None
    asks: bool = False

    @property
    def meta(self) -> Mapping[str, Any]:
        found = (self.params if self.method else self.result).get("_meta")
        return found if isinstance(found, dict) else {}

    @property
    def user(self) -> str | None:
        """The end user in the message; ``None``: the message has no user.

        Raises:
            RpcError: the name is not a text.
        """
        if not isinstance(user := self.meta.get(USER), str | None):
            raise self.refusal(RpcCode.INVALID_PARAMS, f"'{USER}' in '_meta' must be a text")
        return user

    def answer(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to this request."""
        whole = dict(result)
        if self.stateless:
            whole = {"resultType": "complete", **whole}
            whole["_meta"] = {**whole.get("_meta", {}), _SERVER: SERVER}
        return {"jsonrpc": "2.0", "id": self.id, "result": whole}

    def refusal(self, code: int, message: str) -> RpcError:
        """Return an error for this request; for clients with sessions, the HTTP status is 200.

        Clients with sessions ignore the body of an answer whose status is not 200.
        """
        status = _STATUSES.get(code, 400) if self.stateless else 200
        return RpcError(code, message, call_id=self.id, status=status)


def read(body: bytes, headers: Mapping[str, str]) -> McpMessage:
    """Parse the message in a request.

    Raises:
        RpcError: the body is not a message, or its protocol version is not supported.
    """
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings=False)
    except ValueError:
        raise RpcError(
            RpcCode.PARSE, "the body is not JSON in UTF-8, or is nested too deeply"
        ) from None
    if isinstance(value, list):
        raise RpcError(RpcCode.INVALID_REQUEST, "batches are not part of MCP: send one message")
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
        raise RpcError(RpcCode.INVALID_REQUEST, 'a message must be an object with "jsonrpc": "2.0"')
    call_id = _id_of(value)
    method, params = value.get("method"), value.get("params")
    if method is None:
        return _answer_of(value, call_id, headers)
    if not isinstance(method, str) or not isinstance(params, dict | None):
        raise RpcError(
            RpcCode.INVALID_REQUEST,
            "'method' must be a text, and 'params' an object",
            call_id=call_id,
        )
    message = McpMessage(call_id, method, params or {})
    version = headers.get(VERSION)
    if _VERSION in message.meta or version not in (None, *WITH_SESSIONS):
        return _stateless(message, version, headers)
    return _with_session(message, headers)


def _id_of(fields: Mapping[str, Any]) -> CallId | None:
    if "id" in fields and not is_id(fields["id"]):
        raise RpcError(
            RpcCode.INVALID_REQUEST,
            f"an id must be an integer of 64 bits, or a text of at most {_LONGEST_ID} characters",
        )
    return fields.get("id")


def is_id(value: Any) -> bool:
    """Return true for a valid request id or progress token."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_ID and value.isprintable()
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _answer_of(
    fields: Mapping[str, Any], call_id: CallId | None, headers: Mapping[str, str]
) -> McpMessage:
    result = fields.get("result", {})
    if call_id is None or not ({"result", "error"} & fields.keys()) or not isinstance(result, dict):
        raise RpcError(RpcCode.INVALID_REQUEST, "the message has no 'method'", call_id=call_id)
    if headers.get(VERSION) == STATELESS:
        raise RpcError(
            RpcCode.INVALID_REQUEST,
            "repeat the call, and send the answers in 'inputResponses'",
            call_id=call_id,
        )
    return McpMessage(call_id, "", result=result, session=_session_of(headers, call_id))


def _stateless(message: McpMessage, version: str | None, headers: Mapping[str, str]) -> McpMessage:
    """Check a message of protocol 2026-07-28; return it with the fields of this protocol."""
    meta = message.meta
    if message.id is None or _VERSION not in meta:
        named = version
    else:
        named = meta[_VERSION]
        _check_headers(message, named, headers)
    if named != STATELESS:
        raise RpcError(
            RpcCode.UNSUPPORTED_VERSION,
            "Unsupported protocol version",
            {"supported": SPOKEN, "requested": str(named)[:_LONGEST_ID]},
            call_id=message.id,
        )
    capabilities = meta.get(_CAPABILITIES)
    if message.id is not None and not (_VERSION in meta and isinstance(capabilities, dict)):
        raise RpcError(
            RpcCode.INVALID_PARAMS,
            f"params._meta needs '{_VERSION}', and '{_CAPABILITIES}' as an object",
            call_id=message.id,
        )
    return McpMessage(
        message.id, message.method, message.params, stateless=True, asks=_asks(capabilities)
    )


def _check_headers(message: McpMessage, version: Any, headers: Mapping[str, str]) -> None:
    expected = {VERSION: version, "mcp-method": message.method}
    if message.method == "tools/call":
        expected["mcp-name"] = message.params.get("name")
    for header, value in expected.items():
        if _decoded(headers.get(header)) != value:
            raise RpcError(
                RpcCode.HEADERS,
                f"the header {header} must have the same value as the body",
                call_id=message.id,
            )


def _decoded(header: str | None) -> str | None:
    header = None if header is None else header.strip()
    if header is None or (match := _ENCODED.fullmatch(header)) is None:
        return header
    try:
        return base64.b64decode(match[1], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _with_session(message: McpMessage, headers: Mapping[str, str]) -> McpMessage:
    if message.method == "initialize":
        asks = _asks(message.params.get("capabilities"))
        session: str | None = f"{'asks' if asks else 'mute'}-{uuid4().hex}"
    else:
        session = _session_of(headers, message.id)
    return McpMessage(
        message.id,
        message.method,
        message.params,
        session=session,
        asks=session is not None and session.startswith("asks"),
    )


def _session_of(headers: Mapping[str, str], call_id: CallId | None) -> str | None:
    session = headers.get(SESSION)
    if session is not None and not _SESSION.fullmatch(session):
        raise RpcError(
            RpcCode.INVALID_REQUEST,
            "there is no such session: begin with 'initialize'",
            call_id=call_id,
            status=404,
        )
    return session


def _asks(capabilities: Any) -> bool:
    asks = capabilities.get("elicitation") if isinstance(capabilities, dict) else None
    return isinstance(asks, dict) and (not asks or "form" in asks)


def agreed(version: Any) -> str:
    """Return the protocol version with which the server answers ``initialize``."""
    return version if version in WITH_SESSIONS else WITH_SESSIONS[0]


def state_of(run_id: UUID, seq: int) -> str:
    """Return a waiting call's ``requestState``; ``seq``: ``seq`` of the last event sent."""
    return f"{run_id}.{seq}"


def run_of(state: Any) -> tuple[UUID, int] | None:
    """Parse a ``requestState`` into the arguments of :func:`state_of`; ``None``: invalid."""
    match = _STATE.fullmatch(state) if isinstance(state, str) else None
    return None if match is None else (UUID(match[1]), int(match[2]))
