"""Schemas of answers, in the forms that model servers accept.

- OpenAI: ``strict`` requires ``additionalProperties: false`` and every property in ``required``,
  and refuses many keywords (developers.openai.com/api/docs/guides/structured-outputs, "Supported
  schemas"). Schemas that break these rules are sent without ``strict``. The schema's root must be
  an object.
- Anthropic refuses most keywords, and objects that may have other properties
  (platform.claude.com/docs/en/build-with-claude/structured-outputs, "JSON Schema limitations").
  This module moves refused keywords into descriptions, as Anthropic's SDK does.
- Gemini accepts the keywords of ``responseJsonSchema`` (ai.google.dev/api/generate-content).

The caller validates every answer by the whole schema, including keywords that the server did not
get.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from bottega.agents.messages import AssistantMessage
from bottega.agents.provider import DialectName, ToolSchema
from bottega.json_schema.patterns import is_supported
from bottega.llm.server import ServerSpec

Schema = Mapping[str, Any]

ANSWER_TOOL = "final_answer"
_BY_TOOL = (
    f"Give your final answer by one call of the tool `{ANSWER_TOOL}`, alone and without other text."
)
BY_TEXT = "Your final answer is JSON, without any other text. It fits this JSON Schema:\n"

_COMMON = frozenset(
    ("$defs", "$ref", "type", "title", "description", "enum", "anyOf", "items", "properties")
) | {"required", "additionalProperties", "format", "minItems"}
_NUMBERS = frozenset(("minimum", "maximum", "maxItems"))
_STRICT_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
)
"""Formats that strict mode accepts (platform.openai.com/docs/guides/structured-outputs)."""
_STRICT = _COMMON | _NUMBERS | {"const", "pattern", "multipleOf", "exclusiveMinimum"}
_STRICT |= {"exclusiveMaximum"}
_KEPT: Mapping[DialectName, frozenset[str]] = {
    "anthropic": _COMMON | {"const", "allOf"},
    "gemini": _COMMON | _NUMBERS | {"$id", "$anchor", "prefixItems", "oneOf", "propertyOrdering"},
}
_ANTHROPIC_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid")
)


class _UnfitError(Exception):
    """A schema that the server's own structured output cannot express."""


@dataclass(frozen=True, slots=True)
class Output:
    """The form of a schema in a request.

    Attributes:
        schema: schema for the server's own structured output; ``None``: the request has none.
        tools: the tool by which the model answers; empty: the request has no such tool.
        demand: instruction to the model; may be empty.
    """

    schema: Schema | None = None
    tools: tuple[ToolSchema, ...] = ()
    demand: str = ""

    def read(self, message: AssistantMessage, after_results: bool) -> AssistantMessage:
        """Return the answer with its JSON as the text, wherever the model wrote the JSON.

        Args:
            after_results: true if the request ended with results of tools. Without results, the
                turn has no other calls. Servers need no state of a turn without calls.
        """
        answers = [call for call in message.tool_calls if call.name == ANSWER_TOOL]
        if self.tools and answers:
            others = tuple(call for call in message.tool_calls if call.name != ANSWER_TOOL)
            if others:  # the answer is not final
                return message.model_copy(update={"tool_calls": others})
            call = answers[0]
            said = (
                call.malformed if call.malformed is not None else to_json(call.arguments).decode()
            )
            changes: dict[str, Any] = {"content": said, "tool_calls": ()}
            if message.metadata.get("finish_reason") != "length":  # "length": the answer is cut off
                changes["metadata"] = {**message.metadata, "finish_reason": "stop"}
            if not after_results:
                changes["state"] = {}
            return message.model_copy(update=changes)
        if self.schema is None and not message.tool_calls:
            return message.model_copy(update={"content": json_in(message.content)})
        return message


def output_of(schema: Schema, spec: ServerSpec) -> Output:
    """Choose the form of a schema in requests to a server."""
    mode = spec.structured_output
    if mode == "native":
        try:
            return Output(schema=_native(schema, spec.dialect))
        except _UnfitError:
            mode = "prompt"
    if mode == "tool" and schema.get("type") == "object":
        tool = ToolSchema(ANSWER_TOOL, "Give your final answer.", dict(schema))
        return Output(tools=(tool,), demand=_BY_TOOL)
    return Output(demand=BY_TEXT + to_json(schema).decode())


def is_strict(schema: Schema) -> bool:
    """Return true if OpenAI's strict mode accepts this schema, with all of its keywords."""
    return "anyOf" not in schema and all(map(_is_strict_part, _parts(schema)))


def _is_strict_part(part: Schema) -> bool:
    if not _STRICT.issuperset(part):
        return False
    if "$ref" in part:
        return len(part) == 1 and (part["$ref"] == "#" or part["$ref"].startswith("#/$defs/"))
    kinds = part.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if len(kinds - {"null"}) > 1 or not (kinds or {"anyOf", "enum", "const"} & part.keys()):
        return False
    if part.get("format", "date") not in _STRICT_FORMATS or not is_supported(
        part.get("pattern", "")
    ):
        return False
    if ("array" in kinds or "items" in part) and not isinstance(part.get("items"), Mapping):
        return False
    if "object" in kinds or "properties" in part:
        names = part.get("properties")
        is_closed = part.get("additionalProperties") is False
        return is_closed and names is not None and set(part.get("required", ())) == set(names)
    return True


def fitted(schema: Schema, dialect: DialectName) -> dict[str, Any]:
    """Return a tool's schema for a server. Keywords that the server refuses become descriptions.

    A schema that cannot be converted is returned unchanged.
    """
    try:
        return _fitted(schema, dialect, 0)
    except (_UnfitError, AttributeError, TypeError, ValueError):  # tools' schemas have any form
        return dict(schema)


def json_in(text: str) -> str:
    """Return the JSON in an answer without the text around it; without JSON, the whole text."""
    if _is_json(text):
        return text
    for opening, closing in ("{}", "[]"):
        begin, end = text.find(opening), text.rfind(closing)
        if 0 <= begin < end:
            found = text[begin : end + 1]
            if _is_json(found):
                return found
    return text


def _is_json(text: str) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def _native(schema: Schema, dialect: DialectName) -> Schema:
    if dialect != "gemini" and schema.get("type") != "object":
        raise _UnfitError
    return schema if dialect in ("chat", "responses") else _fitted(schema, dialect, 0)


def _parts(schema: Any) -> Iterator[Schema]:
    open_parts: list[Any] = [schema]
    while open_parts:
        part = open_parts.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        for name in ("properties", "$defs"):
            if isinstance(named := part.get(name), Mapping):
                open_parts += named.values()
        for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if isinstance(several := part.get(name), list):
                open_parts += several
        open_parts += [part.get(name) for name in ("items", "additionalProperties")]


def _fitted(schema: Any, dialect: DialectName, depth: int) -> dict[str, Any]:
    if not isinstance(schema, Mapping) or depth > 64:
        raise _UnfitError
    found = dict(schema)
    _refuse_old(found)
    if dialect == "gemini" and "$ref" in found:
        return {name: value for name, value in found.items() if name.startswith("$")}
    _rename(found, dialect)
    if "allOf" in found and dialect == "gemini":
        raise _UnfitError
    if dialect == "anthropic":
        _refuse_joint(found)
        _close(found)
    left = {name: found.pop(name) for name in [*found] if name not in _KEPT[dialect]}
    left |= _unfit_values(found, dialect)
    if isinstance(found.get("items"), list):  # older drafts of JSON Schema have this form
        left["items"] = found.pop("items")
    left.pop("$schema", None)
    for name in ("properties", "$defs"):
        if name in found:
            inner = found[name].items()
            found[name] = {key: _fitted(part, dialect, depth + 1) for key, part in inner}
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if name in found:
            found[name] = [_fitted(part, dialect, depth + 1) for part in found[name]]
    if isinstance(found.get("items"), Mapping):
        found["items"] = _fitted(found["items"], dialect, depth + 1)
    if left and "$ref" not in found:
        said = ", ".join(f"{name}: {to_json(value).decode()}" for name, value in left.items())
        found["description"] = "\n".join(filter(None, [found.get("description"), f"({said})"]))
    return found


def _rename(schema: dict[str, Any], dialect: DialectName) -> None:
    if dialect == "gemini" and "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if dialect == "anthropic" and "oneOf" in schema:
        schema["anyOf"] = schema.pop("oneOf")


def _refuse_old(schema: Schema) -> None:
    """Refuse references in the form of older drafts. Servers do not follow such references."""
    if "definitions" in schema or not str(schema.get("$ref", "#/$defs/")).startswith("#/$defs/"):
        raise _UnfitError


def _refuse_joint(schema: Schema) -> None:
    """Refuse objects that several schemas describe.

    After :func:`_close`, each of these schemas would forbid the properties of the others.
    """
    if "allOf" in schema and (len(schema["allOf"]) > 1 or "properties" in schema):
        raise _UnfitError


def _close(schema: dict[str, Any]) -> None:
    """Forbid additional properties, because Anthropic requires this.

    Raises:
        _UnfitError: the schema describes additional properties, or no properties, or no type.
    """
    if schema.get("type") == "object" or "properties" in schema:
        if schema.get("additionalProperties") not in (None, True, False) or not schema.get(
            "properties"
        ):
            raise _UnfitError
        schema["additionalProperties"] = False
    elif not any(
        name in schema for name in ("type", "enum", "const", "anyOf", "allOf", "$ref")
    ) or (isinstance(schema.get("type"), Sequence) and not isinstance(schema["type"], str)):
        raise _UnfitError


def _unfit_values(schema: dict[str, Any], dialect: DialectName) -> dict[str, Any]:
    if dialect != "anthropic":
        return {}
    left = {}
    if schema.get("minItems", 0) not in (0, 1):
        left["minItems"] = schema.pop("minItems")
    if "format" in schema and schema["format"] not in _ANTHROPIC_FORMATS:
        left["format"] = schema.pop("format")
    return left
