"""Variants of request bodies whose fields depend on each other, for OpenAPI.

Validators check such rules, and Pydantic leaves them out of the schema. Here a body's schema
becomes `oneOf` complete schemas, so that generators of clients make a class for each.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

_REF = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of a body.

    Attributes:
        name: of the variant's schema.
        needs: fields that must be present and not null.
        lacks: fields that must be absent or null.
        mode: allowed values of the field `mode`; empty if the body has no such field.
        rules: keywords to add to a field's schema.
    """

    name: str
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_NULL: dict[str, Any] = {"const": None}
"""As `{"type": "null"}`, which openapi-generator takes for the name of a class."""
_NO_SIGNATURE = {"properties": {"failure_signature": _NULL}}
_SIGNATURE = {
    "properties": {"failure_signature": {"type": "string"}},
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
    """Replace each schema that has variants by `oneOf` of them, in place."""
    for name, variants in VARIANTS.items():
        whole = schemas[name]
        for variant in variants:
            schemas[variant.name] = _of(whole, variant)
        kept = {key: whole[key] for key in ("title", "description", "examples") if key in whole}
        kinds = [{"$ref": f"{_REF}{variant.name}"} for variant in variants]
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
        fields[name] = {**_NULL, "title": name.replace("_", " ").title()}
    for name, rules in variant.rules.items():
        fields[name] |= deepcopy(dict(rules))
    if required := [*dict.fromkeys((*schema.get("required", ()), *variant.needs))]:
        schema["required"] = required
    return schema


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a required field: no null, no default."""
    about = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if not kinds:
        return about
    return about | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds})
