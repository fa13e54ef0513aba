"""Elicitations: what an MCP client asks a person for an interrupt. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from bottega.api.schemas.interrupts import NewDecision
from bottega.api.shared.followed import checked
from bottega.errors import InvalidInputError

_SHOWN = 2000
"""Most characters of a call's arguments that a person is shown."""
_TYPES = ("string", "number", "integer", "boolean")
_KEPT = frozenset(
    (
        *("type", "title", "description", "default", "enum", "oneOf", "items"),
        *("minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems"),
    )
)
_ANSWER = "answer"
_APPROVAL = {
    "type": "object",
    "properties": {
        "decision": {"type": "string", "title": "Decision", "enum": ["approve", "deny"]},
        "comment": {
            "type": "string",
            "title": "Comment",
            "description": "The agent reads that of a denial.",
            "maxLength": 2000,
        },
    },
    "required": ["decision"],
}


def elicitation(interrupt: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the request that asks a person; ``None``: a form of MCP cannot ask it."""
    if interrupt["kind"] == "approval":
        return _request(_of_approval(interrupt), _APPROVAL)
    if interrupt["kind"] == "question" and (form := _form(interrupt["schema"])) is not None:
        server, question = interrupt["server"], interrupt["question"] or "The agent asks."
        return _request(f"The MCP server {server} asks: {question}" if server else question, form)
    return None


def _request(message: str, form: Mapping[str, Any]) -> dict[str, Any]:
    params = {"mode": "form", "message": message, "requestedSchema": form}
    return {"method": "elicitation/create", "params": params}


def _of_approval(interrupt: Mapping[str, Any]) -> str:
    arguments = json.dumps(interrupt["arguments"], ensure_ascii=False)
    if len(arguments) > _SHOWN:
        arguments = f"{arguments[:_SHOWN]}… ({len(arguments)} characters)"
    why = f"\nReason: {interrupt['reason']}" if interrupt["reason"] else ""
    return f"{interrupt['agent']} wants to call {interrupt['tool']} with {arguments}{why}"


def _form(schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the form for an answer: an object whose properties are not nested."""
    if schema is None or schema.get("type") != "object":
        field = _field({"type": "string"} if schema is None else schema)
        if field is None:
            return None
        return {"type": "object", "properties": {_ANSWER: field}, "required": [_ANSWER]}
    fields = {name: _field(each) for name, each in schema.get("properties", {}).items()}
    if not fields or None in fields.values():
        return None
    required = [name for name in schema.get("required", ()) if name in fields]
    return {"type": "object", "properties": fields, "required": required}


def _field(schema: Any) -> dict[str, Any] | None:
    if not isinstance(schema, dict):
        return None
    if schema.get("type") == "array":
        items = schema.get("items")
        if not isinstance(items, dict) or not ("enum" in items or "anyOf" in items):
            return None
    elif schema.get("type") not in _TYPES:
        return None
    return {name: value for name, value in schema.items() if name in _KEPT}


def decision(interrupt: Mapping[str, Any], response: Any) -> NewDecision | None:
    """Return what a person decided; ``None``: nobody wants the run any longer.

    A question that is declined has no answer. An approval that is declined is denied.

    Raises:
        InvalidInputError: it is no answer to what was asked.
    """
    match response:
        case {"action": "accept", "content": dict(content)}:
            return _accepted(interrupt, content)
        case {"action": "decline"} if interrupt["kind"] == "approval":
            return NewDecision(decision="deny")
        case {"action": "decline" | "cancel"}:
            return None
    raise InvalidInputError("an answer has an 'action', and with 'accept' its 'content'")


def _accepted(interrupt: Mapping[str, Any], content: Mapping[str, Any]) -> NewDecision:
    if interrupt["kind"] == "question":
        schema = interrupt["schema"]
        whole = schema is not None and schema.get("type") == "object"
        said: dict[str, Any] = {"answer": content if whole else content.get(_ANSWER)}
    else:
        said = {name: content[name] for name in ("decision", "comment") if content.get(name)}
    return checked(NewDecision, said)
