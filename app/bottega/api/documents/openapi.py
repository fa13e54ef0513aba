"""OpenAPI document: FastAPI's, with problems and keys added."""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json

from bottega.api.auth import is_public
from bottega.api.documents import variants
from bottega.api.errors import Problem, problems
from bottega.api.schemas.events.catalogue import type_events
from bottega.api.shared.deps import required_scopes
from bottega.tenants.keys import Scope

SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": (
        "An API key. Each operation names the scope that it needs (`x-required-scope`): `read`; "
        "`run` or `define`, which include `read`; or `admin`, which includes all. A server that "
        "never had a key needs none, and serves only its own machine."
    ),
}


_SCHEMAS = "#/components/schemas/"
_AT_THE_EDGE = (408, 414, 431)
"""Statuses of requests that are too slow or too long, refused before routing."""


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document of all routes; it is made once."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
        )
        _, definitions = models_json_schema(
            [(Problem, "serialization")], ref_template="#/components/schemas/{model}"
        )
        schema["components"]["schemas"] |= definitions["$defs"]
        variants.split(schema["components"]["schemas"])
        _name_defaults(schema)
        type_events(schema["components"]["schemas"])
        schema["components"]["securitySchemes"] = {"key": SCHEME}
        for operations in schema["paths"].values():
            for operation in operations.values():
                _add_problems(operation, *_AT_THE_EDGE)
        for path, method, scopes in _protected(app):
            _protect(schema["paths"][path][method], scopes)
        app.openapi_schema = schema
    return app.openapi_schema


def _name_defaults(document: dict[str, Any]) -> None:
    """Write the defaults of what clients send as words, and as ``x-default``.

    Generators of types take a field with ``default`` for one that is always there, also in what is
    sent.
    """
    schemas = document["components"]["schemas"]
    bodies = [
        operation["requestBody"]
        for operations in document["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    ]
    for name in _reached(bodies, schemas):
        for field in schemas[name].get("properties", {}).values():
            if "default" in field:
                field["x-default"] = default = field.pop("default")
                said = f"Default: {to_json(default).decode()}."
                field["description"] = " ".join(filter(None, (field.get("description"), said)))


def _reached(parts: list[Any], schemas: Mapping[str, Any]) -> set[str]:
    """Return the names of the schemas that parts of a document lead to."""
    todo, names = list(parts), set[str]()
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            todo += part.values()
            name = str(part.get("$ref", "")).removeprefix(_SCHEMAS)
            if name in schemas and name not in names:
                names.add(name)
                todo.append(schemas[name])
    return names


def _protected(app: FastAPI) -> Iterator[tuple[str, str, tuple[Scope, ...]]]:
    """Yield path, method and required scope of every operation that is not public."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        path = context.path_format or ""
        if not isinstance(route, APIRoute) or not route.include_in_schema or is_public(path):
            continue
        for method in route.methods or ():
            yield path, method.lower(), _scopes(route, method)


def _scopes(route: APIRoute, method: str) -> tuple[Scope, ...]:
    asked = [each.call for each in _all(route.dependant) if each.call is not None]
    found = {scopes for call in asked if (scopes := required_scopes(call, method))}
    if len(found) != 1:
        raise TypeError(
            f"{method} {route.path} must ask for one kind of tenant, see bottega.api.shared.deps"
        )
    return found.pop()


def _all(dependant: Dependant) -> Iterator[Dependant]:
    for each in dependant.dependencies:
        yield each
        yield from _all(each)


def _protect(operation: dict[str, Any], scopes: tuple[Scope, ...]) -> None:
    operation["security"] = [{"key": []}]
    operation["x-required-scope"] = scopes[0] if len(scopes) == 1 else list(scopes)
    _add_problems(operation, 401, 403, 422, 429, 500, 503)


def _add_problems(operation: dict[str, Any], *statuses: int) -> None:
    added = {str(status): problems(status)[status] for status in statuses}
    operation["responses"] = dict(sorted({**added, **operation["responses"]}.items()))
