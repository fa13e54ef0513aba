"""Query parameters, fields of bodies and bodies that an operation does not have are refused."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pydantic_core import from_json
from websockets import InvalidStatus, connect

from bottega.settings import Settings
from tests.service import Running, running
from tests.tenants import holder

ID = "0198c9a5-6b1c-7000-8000-000000000001"
EVENTS = {"accept": "text/event-stream"}


class Named(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return ID if name.endswith("_id") else "1"


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, set[str]]]:
    """Yield method, path and names of query parameters of each operation below ``/v1``."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path.startswith("/v1/"):
                found = (each for each in operation.get("parameters", ()) if each["in"] == "query")
                yield method.upper(), path.format_map(Named()), {each["name"] for each in found}


async def test_each_operation_refuses_an_unknown_parameter(shared: Running) -> None:
    document = (await shared.client.get("/openapi.json")).json()
    asked = 0
    for method, path, names in operations(document):
        for query in ("bogus=1", "bogus", *(f"{each}=1&bogus=1" for each in sorted(names)[:1])):
            if "ticket" in query:
                continue
            body: dict[str, Any] = {"json": {}} if method in ("POST", "PUT", "PATCH") else {}
            answer = await shared.client.request(method, f"{path}?{query}", **body)
            assert answer.status_code == 422, (method, path, query, answer.text)
            (error,) = answer.json()["errors"]
            assert error["parameter"] == "bogus", (method, path)
            assert answer.json()["detail"].startswith("bogus: ")
            assert all(name in error["detail"] for name in names), (method, path)
            asked += 1
    assert asked > 150


NO_BODY = "this operation takes no body: leave it out"


async def test_each_operation_without_a_body_refuses_one(shared: Running) -> None:
    document = (await shared.client.get("/openapi.json")).json()
    asked = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "requestBody" in operation:
                continue
            url = path.format_map(Named())
            for sent in (b'{"input": "x"}', b"[]", b"null", b"text", b"{"):
                answer = await shared.client.request(method.upper(), url, content=sent)
                told = answer.status_code, answer.json()["detail"]
                assert told == (422, NO_BODY), (method, path, sent, answer.text)
                asked += 1
    assert asked > 500


async def test_an_empty_body_is_no_body(shared: Running) -> None:
    document = (await shared.client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "requestBody" in operation or "{" not in path or path.endswith("/stream"):
                continue
            url = path.format_map(Named())
            for sent in (b"", b"{}", b" { }\n"):
                answer = await shared.client.request(method.upper(), url, content=sent)
                assert NO_BODY not in answer.text, (method, path, sent)


async def test_chunks_without_a_length_are_a_body(shared: Running) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"input": '
        yield b'"x"}'

    for url in (f"/v1/runs/{ID}/cancel", "/v1/webhook-secret"):
        answer = await shared.client.post(url, content=chunks())
        assert (answer.status_code, answer.json()["detail"]) == (422, NO_BODY)


async def test_a_missing_scope_goes_before_a_body(settings: Settings, database_url: str) -> None:
    reader = await holder(database_url, "default", "read")
    async with running(settings, database_url) as server, reader.client(server) as client:
        answer = await client.post("/v1/webhook-secret", json={"input": "x"})
        assert answer.status_code == 403


@pytest.mark.deep
async def test_each_body_refuses_an_unknown_field(shared: Running) -> None:
    document = (await shared.client.get("/openapi.json")).json()
    asked = 0
    for path, method, _ in bodies(document):
        if path == "/v1/secrets/{name}":
            continue  # this server stores no secrets
        body = {"bogus": 1}
        answer = await shared.client.request(method, path.format_map(Named()), json=body)
        assert answer.status_code == 422, (method, path, answer.text)
        pointers = [error["pointer"] for error in answer.json()["errors"]]
        assert "/bogus" in pointers, (method, path, answer.text)
        asked += 1
    assert asked > 40


async def test_each_object_in_a_body_has_only_its_own_fields(shared: Running) -> None:
    document = (await shared.client.get("/openapi.json")).json()
    found = {
        place
        for path, _, operation in bodies(document)
        for place in open_objects(
            document["components"]["schemas"],
            operation["requestBody"]["content"]["application/json"]["schema"],
            (path,),
        )
    }
    assert {place[-1] for place in found} == {"input_schema"}, found  # a JSON Schema


def bodies(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and operation of each operation below ``/v1`` with a body of JSON."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            kinds = operation.get("requestBody", {}).get("content", {})
            if path.startswith("/v1/") and "application/json" in kinds:
                yield path, method.upper(), operation


def open_objects(
    schemas: dict[str, Any], schema: dict[str, Any], place: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield the places of objects with named fields that accept other fields, too."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in place:
            yield from open_objects(schemas, schemas[name], (*place, name))
        return
    if "properties" in schema and schema.get("additionalProperties") is not False:
        yield place
    for group in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(group, ()):
            yield from open_objects(schemas, each, place)
    for group in ("items", "additionalProperties"):
        if isinstance(schema.get(group), dict):
            yield from open_objects(schemas, schema[group], (*place, group))
    for name, each in schema.get("properties", {}).items():
        yield from open_objects(schemas, each, (*place, name))


async def test_declared_parameters_are_not_refused(shared: Running) -> None:
    document = (await shared.client.get("/openapi.json")).json()
    for method, path, names in operations(document):
        if method != "GET":
            continue
        for name in names - {"ticket"}:
            answer = await shared.client.get(f"{path}?{name}=1")
            assert "no such query parameter" not in answer.text, (path, name)


@pytest.mark.parametrize("query", ["bogus=1", "run_id=1", "if-match=1", "after=0&Limit=1"])
async def test_streams_refuse_an_unknown_parameter(shared: Running, query: str) -> None:
    path = f"/v1/runs/{ID}/events?{query}"
    answer = await shared.client.get(path, headers=EVENTS)
    assert answer.status_code == 422
    assert "after, agents" in answer.json()["detail"]


@pytest.mark.parametrize(("query", "parameter"), [("bogus=1", "bogus"), ("limit=1", "limit")])
async def test_websockets_refuse_an_unknown_parameter(
    shared: Running, query: str, parameter: str
) -> None:
    url = f"ws://127.0.0.1:{shared.port}/v1/runs/{ID}/ws?{query}"
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, additional_headers=dict(shared.headers))
    assert refused.value.response.status_code == 422
    problem = from_json(refused.value.response.body or b"")
    assert problem["errors"][0]["parameter"] == parameter
    assert "after, agents, depth" in problem["detail"]


async def test_a_missing_scope_goes_before_an_unknown_parameter(
    settings: Settings, database_url: str
) -> None:
    reader = await holder(database_url, "default", "read")
    async with running(settings, database_url) as server, reader.client(server) as client:
        assert (await client.post("/v1/runs?bogus=1", json={})).status_code == 403
        assert (await client.get("/v1/nothing?bogus=1")).status_code == 404


async def test_other_apis_ignore_parameters_that_they_do_not_know(shared: Running) -> None:
    path = "/openai/v1/models?api-version=2026-01-01"
    assert (await shared.client.get(path)).status_code == 200
