"""Answers of the demo model about images, and in the form of a schema."""

import json
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bottega.llm.demo_model.conversation import Answer, Conversation, DemoCall, Tool
from bottega.llm.dialects.schemas import ANSWER_TOOL, BY_TEXT

_PNG = b"\x89PNG\r\n\x1a\n"
_DEEPEST = 32
_FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "email": "demo@example.org",
    "uri": "https://example.org",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def images(messages: Sequence[Mapping[str, Any]]) -> str:
    """Describe the images since the last answer; empty without images."""
    found: list[str] = []
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            found.clear()
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        found += [_image(p["image_url"]["url"]) for p in parts if p.get("type") == "image_url"]
    return f"I see {' and '.join(found)}." if found else ""


def demanded(request: Mapping[str, Any], conversation: Conversation) -> Any:
    """Return the schema that the answer is to fit, however it was sent; ``None``: there is none."""
    form = request.get("response_format")
    if isinstance(form, dict) and isinstance(form.get("json_schema"), dict):
        return form["json_schema"].get("schema")
    for tool in conversation.tools:
        if tool.name == ANSWER_TOOL:
            return tool.parameters
    for text in conversation.system:
        _, found, schema = text.rpartition(BY_TEXT)
        if found:
            try:
                return json.JSONDecoder().raw_decode(schema)[0]
            except ValueError:
                return None
    return None


def without_answer_tool(conversation: Conversation) -> Conversation:
    others: tuple[Tool, ...] = tuple(t for t in conversation.tools if t.name != ANSWER_TOOL)
    return replace(conversation, tools=others)


def filled_in(schema: Any, text: str, *, by_tool: bool) -> Answer:
    """Return the answer that fits a schema; its texts say what the plain answer says."""
    value = _fill(schema, text, schema, 0)
    if by_tool and isinstance(value, dict):
        return Answer(calls=(DemoCall(ANSWER_TOOL, value),))
    return Answer(json.dumps(value, ensure_ascii=False))


def _image(url: str) -> str:
    head, data, encoded = url.partition(";base64,")
    if not data:
        return f"the image at {url}"
    try:
        content = b64decode(encoded)
    except NotBase64:
        return "an image that I cannot read"
    kind = head.removeprefix("data:")
    if content.startswith(_PNG) and len(content) >= 24:
        width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
        return f"an image of {width} x {height} pixels ({kind})"
    return f"an image of {len(content)} bytes ({kind})"


def _fill(schema: Any, text: str, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return text
    if isinstance(ref := schema.get("$ref"), str):
        return _fill(_at(root, ref), text, root, depth + 1)
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else schema["enum"][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return _fill(schema[name][0], text, root, depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    match kind:
        case "object":
            properties = schema.get("properties") or {}
            wanted = schema.get("required") or () if depth > _DEEPEST // 2 else properties
            return {name: _fill(properties.get(name), text, root, depth + 1) for name in wanted}
        case "array":
            count = max(1, schema.get("minItems", 1)) if depth <= _DEEPEST // 2 else 0
            return [_fill(schema.get("items"), text, root, depth + 1)] * count
    return _plain(schema, kind, text)


def _plain(schema: Mapping[str, Any], kind: Any, text: str) -> Any:
    match kind:
        case "integer" | "number":
            return _number(schema)
        case "boolean":
            return True
        case "null":
            return None
    said = _FORMATS.get(str(schema.get("format")), text)
    return said.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]


def _number(schema: Mapping[str, Any]) -> Any:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + 1
    if low is not None:
        return low
    return 1 if high is None or high >= 1 else high


def _at(root: Any, ref: str) -> Any:
    """Return the part of a schema that a local reference names."""
    found = root
    for name in ref.removeprefix("#").split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found
