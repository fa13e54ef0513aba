"""Errors as RFC 9457 problems. Only this module knows HTTP statuses."""

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any
from uuid import uuid4

import asyncpg
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.routing import Route

from bottega.db.failures import is_storage_full, is_transient
from bottega.errors import (
    BottegaError,
    BusyError,
    ErrorKind,
    LimitedError,
    UnknownReferenceError,
)
from bottega.logger import Logger

log = Logger(__name__)

_RENAMED = {
    413: "Content Too Large",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}
MEDIA_TYPE = "application/problem+json"

_STATUS = {
    ErrorKind.INVALID: 422,
    ErrorKind.UNAUTHENTICATED: 401,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.CONFLICT: 409,
    ErrorKind.PRECONDITION: 412,
    ErrorKind.LIMITED: 429,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.MODEL: 502,
    ErrorKind.UPSTREAM: 502,
    ErrorKind.INTERNAL: 500,
}
_HEADERS = {
    ErrorKind.UNAUTHENTICATED: {"WWW-Authenticate": "Bearer"},
    ErrorKind.UNAVAILABLE: {"Retry-After": "1"},
}
FAILURE = "database_failure"
"""Key in the request's state that holds the temporary database error behind a 503 answer."""
_CODES = {
    400: "bad_request",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    422: "invalid",
    429: "limited",
    503: "unavailable",
}
_SPOKEN = frozenset(("secret_in_clear",))
"""Pydantic error types that are also the problem's code; all other types become ``invalid``."""


class FieldProblem(BaseModel):
    """An error in one field or parameter of the request."""

    detail: Annotated[str, Field(description="What is wrong, and what to send instead.")]
    pointer: Annotated[
        str | None, Field(description="JSON Pointer (RFC 6901) into the request's body.")
    ] = None
    parameter: Annotated[
        str | None, Field(description="Name of the query, path or header parameter.")
    ] = None


class Problem(BaseModel):
    """An error, and how to correct it (RFC 9457)."""

    type: Annotated[str, Field(description="Always `about:blank`; `code` names the error.")] = (
        "about:blank"
    )
    title: Annotated[str, Field(description="Name of the HTTP status.")]
    status: Annotated[int, Field(description="The HTTP status.")]
    code: Annotated[str, Field(description="Stable: match on this, not on texts.")]
    detail: Annotated[str, Field(description="What happened and what to do; texts may change.")]
    errors: Annotated[
        list[FieldProblem], Field(description="Errors in single fields; at most 20.")
    ] = []
    run_id: Annotated[
        str | None,
        Field(description="Only with the code `conversation_busy`: the run that is not over."),
    ] = None


def title_of(status: int) -> str:
    """Return a status's name from RFC 9110. (The names in Python depend on Python's version.)"""
    return _RENAMED.get(status) or HTTPStatus(status).phrase


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of the problems that an operation may return."""
    return {
        status: {
            "description": title_of(status),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted({*statuses, 422, 500, 503})
    }


def headers(**described: str) -> dict[str, Any]:
    """Return OpenAPI's description of headers; ``_`` in an argument's name stands for ``-``."""
    return {
        "headers": {
            name.replace("_", "-"): {"description": text, "schema": {"type": "string"}}
            for name, text in described.items()
        }
    }


def problem_response(
    status: int,
    code: str,
    detail: str,
    errors: Sequence[FieldProblem] = (),
    headers: Mapping[str, str] | None = None,
    **more: str,
) -> Response:
    """Return a problem as a response."""
    body = Problem(
        title=title_of(status),
        status=status,
        code=code,
        detail=detail,
        errors=list(errors),
        **more,
    )
    unset = set() if more else {"run_id"}
    return JSONResponse(
        body.model_dump(exclude=unset),
        status_code=status,
        media_type=MEDIA_TYPE,
        headers=dict(headers or {}),
    )


def for_error(error: BottegaError, *, has_body: bool = True) -> Response:
    """Return the problem for an error that Bottega's own code raised.

    Args:
        has_body: true: the request has a body; false: the error's pointer names a query parameter.
    """
    places = [] if error.pointer is None else [(error.pointer, error.detail)]
    if isinstance(error, UnknownReferenceError):
        places = list(error.places)
    pointed = [
        FieldProblem(detail=detail, pointer=place)
        if has_body
        else FieldProblem(detail=detail, parameter=place.removeprefix("/"))
        for place, detail in places
    ]
    headers = _HEADERS.get(error.kind)
    if isinstance(error, LimitedError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    more = {"run_id": error.run_id} if isinstance(error, BusyError) else {}
    status = _STATUS[error.kind]
    return problem_response(status, error.code, error.detail, pointed, headers, **more)


def database_unavailable() -> Response:
    """Return the problem of a request during an outage of the database."""
    return problem_response(
        503,
        "database_unavailable",
        "the database is unavailable: try again; before you repeat a change, check if it was made",
        headers=_HEADERS[ErrorKind.UNAVAILABLE],
    )


def field_problem(error: Mapping[str, Any], body: Any = None) -> FieldProblem:
    """Convert an error of Pydantic to a problem, which does not quote the input.

    Args:
        body: the body as the client sent it. The error's path may contain Pydantic's names of
            unions' members. They are not in the body, so the problem's pointer omits them.
    """
    source, *path = error["loc"]
    if source == "body":
        pointer = ""
        for number, step in enumerate(path):
            last = number == len(path) - 1
            if isinstance(body, dict) and (step in body or (last and error["type"] == "missing")):
                body = body.get(step)
            elif isinstance(body, list) and isinstance(step, int) and step < len(body):
                body = body[step]
            else:
                continue
            pointer += f"/{_escape(step)}"
        return FieldProblem(detail=error["msg"], pointer=pointer)
    return FieldProblem(detail=error["msg"], parameter=".".join(str(step) for step in path))


def _escape(step: object) -> str:
    text = str(step).encode("utf-8", "replace").decode()
    return text[:100].replace("~", "~0").replace("/", "~1")


async def _on_invalid(request: Request, error: RequestValidationError) -> Response:
    problems = error.errors()
    if any(item["type"] == "json_invalid" and item["loc"][0] == "body" for item in problems):
        return problem_response(400, "bad_json", "the body is not valid JSON")
    sent = request.headers.get("content-type", "")
    if problems[0]["loc"] == ("body",) and not re.match(r"application/([\w.+-]+\+)?json\b", sent):
        detail = f"the body's content-type is '{sent[:60]}': send it as application/json"
        return problem_response(415, "unsupported_media_type", detail)
    return invalid(problems, error.body)


def invalid(problems: Sequence[Any], body: Any = None) -> Response:
    """Return the problem for validation errors; see :func:`field_problem`."""
    errors = [field_problem(item, body) for item in problems[:20]]
    first = errors[0]
    where = first.pointer if first.pointer is not None else first.parameter
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    whole = "the body" if first.parameter is None else "the query"
    detail = f"{where or whole}: {first.detail}{more}"
    code = next((item["type"] for item in problems if item["type"] in _SPOKEN), "invalid")
    return problem_response(422, code, detail, errors)


async def _on_http(request: Request, error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(allowed_methods(request))
        detail = f"{request.method} is not allowed here; allowed: {headers['Allow']}"
    elif error.status_code == 404 and error.detail == "Not Found":
        detail = "there is nothing at this path: /docs lists all paths"
    elif error.status_code == 400 and error.detail == "There was an error parsing the body":
        detail = (
            "the body is not JSON in UTF-8, is nested too deeply, or has a number that is too long"
        )
        return problem_response(400, "bad_json", detail)
    elif error.status_code == 413:
        detail = "the body is longer than this server's limit"
    else:
        detail = str(error.detail)
    code = _CODES.get(error.status_code, "http_error")
    return problem_response(error.status_code, code, detail, headers=headers)


def allowed_methods(request: Request) -> list[str]:
    """Return the methods that the API has for the request's path."""
    path = request.url.path
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    # A route with exactly the requested path has precedence over routes with path parameters.
    matches = [route for route in routes if route.path == path] or [
        route for route in routes if route.path_regex.match(path)
    ]
    return sorted({method for route in matches for method in route.methods or ()}) or ["GET"]


async def _on_own(request: Request, error: BottegaError) -> Response:
    return for_error(error, has_body=request.method not in ("GET", "HEAD"))


def storage_full() -> Response:
    """Return the problem of a write while the database's disk is full."""
    return problem_response(
        503,
        "storage_full",
        "the database's disk is full, so nothing was stored: its operator must free space",
        headers={"Retry-After": "30"},
    )


async def _on_database(request: Request, error: Exception) -> Response:
    if is_storage_full(error):
        request.app.state.service.database.storage.full = True
        log.error("api.storage_full", path=request.url.path, error=str(error))
        return storage_full()
    if is_transient(error):
        log.warning("api.database_unavailable", error=str(error))
        request.scope.setdefault("state", {})[FAILURE] = error
        return database_unavailable()
    return await _on_bug(request, error)


async def _on_bug(request: Request, error: Exception) -> Response:
    number = uuid4().hex[:12]
    log.error("api.error", path=request.url.path, number=number, exc_info=error)
    detail = f"an internal error; the server's log says more under the number {number}"
    return problem_response(500, "internal", detail)


Handler = Callable[[Request, Any], Awaitable[Response]]


def install(app: FastAPI) -> None:
    """Make ``app`` respond to every error with a problem."""
    handlers: dict[type[Exception], Handler] = {
        RequestValidationError: _on_invalid,
        HTTPException: _on_http,
        BottegaError: _on_own,
        asyncpg.PostgresError: _on_database,
        asyncpg.InterfaceError: _on_database,
        asyncpg.InternalClientError: _on_database,
        OSError: _on_database,
        Exception: _on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
