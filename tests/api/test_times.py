"""Times with every UTC offset, in every place of the OpenAPI document that takes one."""

import json
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from bottega.settings import Settings
from tests.api.test_episodes import TASK, create_episode
from tests.api.test_patterns import add
from tests.service import running
from tests.tenants import holder

GOOD = [
    "2026-03-01T12:00:00+16:00",
    "2026-03-01T12:00:00-16:00",
    "2026-03-01T12:00:00+23:59",
    "2026-03-01T12:00:00-23:59",
]
BAD = [
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59Z",
    "2026-03-01T12:00:00+24:00",
    "2026-03-01T12:00:00",
]
EPISODE: dict[str, Any] = {"outcome": "SUCCESS", "task": {"original_input": TASK}}
BODIES: dict[str, dict[str, Any]] = {
    "import_episode": EPISODE,
    "search_episodes": {"mode": "structured", "filters": {}},
    "learn_from_episode": {"episode": EPISODE},
    "create_key": {"name": "k", "scopes": ["read"]},
    "record_pattern_application": {"good": True, "baseline_rate": 0.5},
}
"""By operation id, a body for each operation that takes a time in its body."""


def times(
    document: dict[str, Any], schema: dict[str, Any], *path: str
) -> Iterator[tuple[str, ...]]:
    """Yield the path of each property below ``schema`` that is a time."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if schema.get("format") == "date-time":
        yield path
    for member in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        yield from times(document, member, *path)
    for name, member in schema.get("properties", {}).items():
        if len(path) < 4:
            yield from times(document, member, *path, name)


def placed(body: dict[str, Any], path: tuple[str, ...], value: str) -> dict[str, Any]:
    """Return a copy of ``body`` with ``value`` at ``path``."""
    body = deepcopy(body)
    inner = body
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = value
    return body


async def operations(
    client: httpx2.AsyncClient,
) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    document = (await client.get("/openapi.json")).json()
    return document, [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


async def requests(client: httpx2.AsyncClient) -> list[tuple[str, str, tuple[str, ...], bool]]:
    """Return all places of times: operation id, method and path, place, and true for the query."""
    document, found = await operations(client)
    places: list[tuple[str, str, tuple[str, ...], bool]] = []
    for method, path, operation in found:
        name, target = operation["operationId"], f"{method} {path}"
        for parameter in operation.get("parameters", []):
            for _ in times(document, parameter["schema"]):
                places.append((name, target, (parameter["name"],), True))
        content = operation.get("requestBody", {}).get("content", {})
        if body := content.get("application/json"):
            for place in times(document, body["schema"]):
                places.append((name, target, place, False))
    return list(dict.fromkeys(places))


@pytest.fixture
async def admin(settings: Settings, database_url: str) -> AsyncIterator[httpx2.AsyncClient]:
    held = await holder(database_url)
    async with running(settings, database_url) as server, held.client(server) as client:
        yield client


SPAN = {"from": "2025-01-01T00:00:00Z", "to": "2027-01-01T00:00:00Z"}
NEEDED: dict[str, dict[str, str]] = {
    "get_metric_series": SPAN | {"metric": "runs", "step": "1d"},
    "get_metric_totals": SPAN,
    "get_outcomes": SPAN,
    "get_memory_effect": SPAN,
}
"""Other parameters of operations."""


@pytest.mark.deep
async def test_every_time_accepts_every_offset(admin: httpx2.AsyncClient) -> None:
    pattern = await add(admin)
    places = await requests(admin)
    assert {name for name, _, _, in_query in places if not in_query} == BODIES.keys()
    assert sum(in_query for *_, in_query in places) >= 6
    for name, target, place, in_query in places:
        method, _, path = target.partition(" ")
        path = path.replace("{pattern_id}", pattern["id"])
        for value in [*GOOD, *BAD]:
            expected = (200, 201) if value in GOOD else (422,)
            if name == "create_key":
                value = value.replace("2026", "2126")
            if in_query:
                query = NEEDED.get(name, {}) | {place[0]: value}
                answer = await admin.request(method, path, params=query)
            else:
                answer = await admin.request(method, path, json=placed(BODIES[name], place, value))
            assert answer.status_code in expected, (name, place, value, answer.text)


@pytest.mark.deep
async def test_no_cursor_with_a_time_breaks_a_list(admin: httpx2.AsyncClient) -> None:
    _, found = await operations(admin)
    lists = [
        (path, operation["operationId"])
        for method, path, operation in found
        if method == "get"
        and "cursor" in {each["name"] for each in operation.get("parameters", [])}
    ]
    assert len(lists) >= 12
    for value in [*GOOD, *BAD]:
        raw = json.dumps(["asc", [value, str(uuid4())]]).encode()
        cursor = urlsafe_b64encode(raw).decode().rstrip("=")
        for path, name in lists:
            filled = "/".join(str(uuid4()) if "_id" in part else part for part in path.split("/"))
            answer = await admin.get(filled.replace("{name}", "a"), params={"cursor": cursor})
            assert answer.status_code < 500, (name, value, answer.text)
            if name == "list_episodes":
                assert answer.status_code == (200 if value in GOOD else 422), value


async def test_an_offset_changes_only_the_time(client: httpx2.AsyncClient) -> None:
    kept = await create_episode(client, at="2026-03-01T12:00:00.123456+23:59")
    assert kept["at"] == "2026-02-28T12:01:00.123456Z"
    for after, before, count in [
        ("2026-02-27T18:00:00-18:00", "2026-03-01T12:02:00+23:59", 1),
        ("2026-02-28T12:02:00+00:00", "2026-03-02T00:00:00+00:00", 0),
        ("2026-02-27T12:03:00-23:59", "2026-03-02T00:00:00+00:00", 0),
    ]:
        found = await client.get("/v1/episodes", params={"after": after, "before": before})
        assert len(found.json()["items"]) == count, (after, before)
