"""Calls of plain tools, when the user's text asks for them."""

import re
from typing import Any

from bottega.llm.demo_model.conversation import (
    STEERING_TOOLS,
    SWARM_TOOLS,
    Conversation,
    DemoCall,
    Tool,
)

_TIME = re.compile(
    r"what(?:'s| is)? (?:the )?(?:current )?(?:time|date|day)|current (?:time|date)|today's date"
    r"|what day|which day",
    re.IGNORECASE,
)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_ARITHMETIC = re.compile(r"(?<![\w.])[-(\s]*\d[\d\s.()+\-*/\u00d7\u00f7^%]*(?:[\d)]|(?<=\d)%)")
_OPERATOR = re.compile(r"\d[\s)]*(?:\*\*|[+*/\u00d7\u00f7^%]|\s-\s|-(?=\d))[\s(-]*\d")
_PATH = re.compile(r"(?<!\S)/\S*[^\s.,;:!?]")
_READ = 4_000
_DEEPEST = 5
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/"})


def next_calls(conversation: Conversation) -> tuple[DemoCall, ...]:
    """Return the tools to call now, each at most once per request unless demanded."""
    called = [outcome.name for outcome in conversation.outcomes]
    calls = []
    for tool in conversation.tools:
        if tool.is_agent or tool.name in SWARM_TOOLS | STEERING_TOOLS:
            continue
        wanted = called.count(tool.name) < conversation.demanded.count(tool.name)
        if wanted or (tool.name not in called and _asks_for(conversation.asked, tool)):
            calls.append(call(tool, conversation.asked))
    return tuple(calls)


def call(tool: Tool, text: str) -> DemoCall:
    return DemoCall(tool.name, arguments(tool, text))


def results(conversation: Conversation) -> str:
    lines = []
    for outcome in conversation.outcomes:
        verb = "failed" if outcome.failed else "says"
        lines.append(f"{outcome.name} {verb}: {outcome.text.removeprefix('Error:').strip()}")
    return "\n".join(lines)


def arithmetic(text: str) -> str | None:
    """Find the first arithmetic expression, with ``*``, ``/`` and ``**`` as operators."""
    for found in _ARITHMETIC.finditer(_DATE.sub(" ", text[:_READ])):
        expression = found[0].strip()
        if _OPERATOR.search(expression):
            return expression.translate(_SIGNS).replace("^", "**")
    return None


def arguments(tool: Tool, text: str) -> dict[str, Any]:
    """Make arguments for the tool's required properties, else for its only one.

    A ``path`` is the text's first word that begins with a slash, if there is one.
    """
    required = tool.parameters.get("required")
    names = required if isinstance(required, list) else []
    if not names and len(tool.properties) == 1:
        names = list(tool.properties)
    about = arithmetic(text) if "calc" in tool.name.lower() else None
    path = _PATH.search(text[:_READ])
    special = {"path": path[0]} if path else {}
    return {
        name: _value(tool.properties.get(name), special.get(name) or about or text, tool.parameters)
        for name in names
    }


def _asks_for(text: str, tool: Tool) -> bool:
    name = tool.name.lower()
    words = " ".join(re.split(r"[_-]+", name))
    if re.search(rf"\b(?:{re.escape(name)}|{re.escape(words)})\b", text.lower()):
        return True
    if "calc" in name:
        return arithmetic(text) is not None
    return ("time" in name or "date" in name) and _TIME.search(text) is not None


def _value(schema: Any, text: str, whole: dict[str, Any], depth: int = 0) -> Any:
    """Make a value of the schema's type, from the text if possible.

    Args:
        whole: the schema with the definitions that ``schema`` may refer to.
    """
    schema = _resolved(schema, whole)
    if not isinstance(schema, dict):
        return text
    if choices := schema.get("enum"):
        return next((choice for choice in choices if str(choice) in text), choices[0])
    if "default" in schema:
        return schema["default"]
    kind = schema.get("type")
    number = re.search(r"-?\d+(?:\.\d+)?", text)
    if kind == "integer":
        return int(float(number[0])) if number else 1
    if kind == "number":
        return float(number[0]) if number else 1.0
    if kind == "object" and depth < _DEEPEST:
        known, required = schema.get("properties"), schema.get("required")
        if isinstance(known, dict) and isinstance(required, list):
            return {name: _value(known.get(name), text, whole, depth + 1) for name in required}
    empty: dict[Any, Any] = {"boolean": False, "array": [], "object": {}, "null": None}
    return empty.get(kind, text) if isinstance(kind, str) else text


def _resolved(schema: Any, whole: dict[str, Any]) -> Any:
    """Return the definition that a schema refers to, or the schema."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    definitions = whole.get("$defs")
    if not isinstance(reference, str) or not isinstance(definitions, dict):
        return schema
    return definitions.get(reference.removeprefix("#/$defs/"))
