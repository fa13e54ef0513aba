"""Public contracts: a change must show in the diff. UPDATE_SNAPSHOTS=1 rewrites the snapshots."""

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bottega import errors
from bottega.api import documents
from bottega.api.routes.deploy import Resources
from bottega.errors import BottegaError
from bottega.main import create_app
from bottega.settings import Settings

FOLDER = Path(__file__).parent / "snapshots"


def check(name: str, value: Any, folder: Path = FOLDER) -> None:
    path = folder / f"{name}.json"
    current = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(current)
    assert current == path.read_text(), f"{name} changed: if it should, UPDATE_SNAPSHOTS=1"


@pytest.fixture(scope="module")
def document(module_settings: Settings) -> dict[str, Any]:
    """Return the OpenAPI document; to make it takes seconds."""

    class NoService:
        pass

    service = NoService()
    service.settings = module_settings  # type: ignore[attr-defined]
    return create_app(service).openapi()  # type: ignore[arg-type]


def test_openapi_document_is_unchanged(document: dict[str, Any]) -> None:
    check("openapi", document)


def test_the_schema_of_files_for_apply_is_current() -> None:
    schema = Resources.model_json_schema()
    known = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Bottega team"}
    check("team.schema", schema | known, Path(__file__).parents[2] / "docs/reference")


def test_every_operation_is_named_described_and_documents_its_problems(
    document: dict[str, Any],
) -> None:
    names = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["operationId"] not in names, where
            names.add(operation["operationId"])
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert list(response["content"]) == ["application/problem+json"], where
            if path.startswith("/v1/") and path != "/v1/info":
                assert {"422", "500", "503"} <= set(operation["responses"]), where
            creates = operation["operationId"] == "replace_schedule"
            if "{" in path and path.startswith("/v1/") and not creates:
                assert "404" in operation["responses"], where
    assert "itemSchema" not in json.dumps(document)
    assert "HTTPValidationError" not in json.dumps(document)


def fields(part: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the schema of each field, at any depth of a document.

    Values are no schemas. What a schema demands of a value with `not` or `contains` is no field.
    """
    if isinstance(part, list):
        part = dict(enumerate(part))
    if isinstance(part, dict):
        members = part.get("properties")
        if isinstance(members, dict) and not where.endswith("/properties"):
            yield from ((f"{where}/{name}", member) for name, member in members.items())
        for key, value in part.items():
            named = where.endswith("/properties")
            if named or key not in ("example", "examples", "const", "enum", "not", "contains"):
                yield from fields(value, f"{where}/{key}")


@pytest.mark.parametrize("kind", ["openapi", "asyncapi"])
def test_every_field_is_described_and_no_default_makes_it_required(
    document: dict[str, Any], kind: str
) -> None:
    """Generators of types take a field with a `default` for one that is always there."""
    shown = document if kind == "openapi" else documents.asyncapi_document()
    found = dict(fields(shown))
    assert len(found) > 300
    assert [where for where, member in found.items() if not member.get("description")] == []
    assert [where for where, member in found.items() if "default" in member] == []


def test_a_default_is_named(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["OrchestratedRun"]["properties"]["priority"]["x-default"] == 5
    assert set(schemas["OrchestratedRun"]["required"]) == {"input", "agent"}
    beside = schemas["LlmStartedData"]["properties"]["beside"]
    assert beside["x-default"] is False
    assert beside["description"].endswith("Default: false.")
    assert "x-default" not in schemas["AgentCompletedData"]["properties"]["answer_seq"]


def test_every_parameter_and_operation_is_described(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert len(operation.get("description", "")) >= 40, (method, path)
            assert all(each["description"] for each in operation.get("parameters", ()))


def test_every_operation_lists_the_codes_of_its_problems(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path.startswith("/v1/"):
                assert len(operation["x-error-codes"]) > 8, operation["operationId"]


def test_streams_are_operations_of_their_own(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            kinds = {*operation["responses"].get("200", {}).get("content", {})}
            assert "text/event-stream" not in kinds or len(kinds) == 1, (method, path)


def test_asyncapi_document_is_unchanged() -> None:
    check("asyncapi", documents.asyncapi_document())


def test_error_catalogue_is_unchanged() -> None:
    tree = {
        name: {"code": kind.code, "kind": kind.kind}
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, BottegaError)
    }
    check("errors", tree)


def test_generators_can_name_every_object(document: dict[str, Any]) -> None:
    """Generators name inline objects after schema and property: `Episode.task`, `EpisodeTask`."""
    schemas = document["components"]["schemas"]
    names = {name.casefold() for name in schemas}
    inline = {
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, value in schema.get("properties", {}).items()
        if value.get("type") == "object" or "enum" in value
    }
    clashes = {
        each for each in inline if each.replace(".", "").replace("_", "").casefold() in names
    }
    assert clashes == set()
