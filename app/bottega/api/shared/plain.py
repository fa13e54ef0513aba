"""Requests that need nothing of FastAPI: for them its dependencies cost more than all the rest."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from bottega.api.schemas.base import Body
from bottega.api.server.headers import sent
from bottega.api.shared.idempotency import HEADER, is_key

Sent = TypeVar("Sent", bound=Body)
Handle = Callable[[Request], Awaitable[Response]]


def plain_route(schema: type[Sent], answer: Callable[[Request, Sent], Awaitable[Response]]) -> type:
    """Return a class of routes that answer plain requests by themselves.

    A plain request has a valid JSON body, no query, and at most a valid
    ``Idempotency-Key``. All others go to the
    route's function, as FastAPI does it: errors of validation are FastAPI's.

    Args:
        answer: does what the route's function does with such a request, the scope's check included.
    """

    class PlainRoute(APIRoute):
        def get_route_handler(self) -> Handle:  # type: ignore[override]
            usual: Handle = super().get_route_handler()

            async def handle(request: Request) -> Response:
                body = await _plain_body(request, schema)
                return await (usual(request) if body is None else answer(request, body))

            return handle

    return PlainRoute


async def _plain_body(request: Request, schema: type[Sent]) -> Sent | None:
    scope = request.scope
    headers = dict(scope["headers"])
    if (
        scope["query_string"]
        or headers.get(b"content-type") != b"application/json"
        or not _may_be_keys(sent(scope, HEADER.encode()))
    ):
        return None
    try:
        return schema.model_validate(from_json(await request.body()))
    except (ValueError, ClientDisconnect):
        return None


def _may_be_keys(values: Sequence[bytes]) -> bool:
    return len(values) < 2 and all(is_key(value.decode("latin-1")) for value in values)
