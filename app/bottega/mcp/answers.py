"""Answers of MCP servers, read piece by piece: what cannot be read costs nothing else. Pure."""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from bottega.agents.parts import Part, PartType, text_of
from bottega.errors import InvalidInputError
from bottega.mcp.schemas import MOST_BYTES_OF_TOOLS, MOST_TOOLS, Patterns, tool_schema
from bottega.mcp.servers import McpToolSchema
from bottega.tools.media import HEAD_BYTES, is_text, media_type_of

_KINDS: dict[str, PartType] = {
    "image": "image",
    "audio": "audio",
    "application/pdf": "document",
}


@dataclass(frozen=True, slots=True)
class McpResult:
    """The result of a call.

    Attributes:
        parts: texts, images and other content, in the server's order.
        structured: content as JSON; ``None``: there is none.
        secrets: values that were sent to the server and must not be shown.
    """

    parts: tuple[Part, ...]
    is_error: bool = False
    structured: JsonValue = None
    secrets: tuple[str, ...] = ()

    @property
    def value(self) -> JsonValue:
        """The result for a model: text, and the JSON unless the text says the same."""
        text = text_of(self.parts)
        if self.structured is None or _says(text, self.structured):
            return text
        return f"{text}\n{_json(self.structured)}" if text else self.structured


def result_of(answer: Mapping[str, Any], secrets: tuple[str, ...] = ()) -> McpResult:
    """Read the answer to a call. A part in an unknown form becomes its JSON.

    The tool has run: only a clear ``isError`` says that it failed.
    """
    content = answer.get("content")
    blocks = content if isinstance(content, list) else [] if content is None else [content]
    return McpResult(
        tuple(map(_part, blocks)),
        is_error=answer.get("isError") is True,
        structured=answer.get("structuredContent"),
        secrets=secrets,
    )


def usable(listed: Iterable[Any]) -> tuple[list[McpToolSchema], list[str]]:
    """Return the tools of a server's list that can be used, and what was changed or left out."""
    known: dict[str, McpToolSchema] = {}
    warnings = []
    left, patterns = MOST_BYTES_OF_TOOLS, Patterns()
    for number, item in enumerate(listed):
        if number == MOST_TOOLS:
            warnings.append(f"only the first {MOST_TOOLS} tools are used")
            break
        name = item.get("name") if isinstance(item, dict) else None
        shown = f"the tool {name[:100]!r}" if isinstance(name, str) else f"the tool {number + 1}"
        try:
            tool = _tool(item, patterns)
        except InvalidInputError as error:
            warnings.append(f"{shown} was left out: {error.detail}")
            continue
        if tool.name in known:
            warnings.append(f"{shown} was left out: another one before it has the same name")
            continue
        left -= len(tool.description) + len(json.dumps(tool.input_schema))
        if left < 0:
            warnings.append(
                f"{shown} and those after it were left out: the server's tools have more than "
                f"{MOST_BYTES_OF_TOOLS} bytes"
            )
            break
        warnings += [f"{shown}: {warning}" for warning in tool.warnings]
        known[tool.name] = tool
    return list(known.values()), warnings


def _tool(item: Any, patterns: Patterns) -> McpToolSchema:
    from mcp.shared.inbound import find_invalid_x_mcp_header

    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise InvalidInputError("it has no name")
    schema, description = item.get("inputSchema"), item.get("description")
    if not isinstance(schema, dict):
        raise InvalidInputError("its inputSchema is not an object")
    said = description if isinstance(description, str) else ""
    tool = tool_schema(item["name"], said, schema, patterns)
    if (fault := find_invalid_x_mcp_header(schema)) is not None:
        raise InvalidInputError(fault)
    return tool


def _part(block: Any) -> Part:
    match block:
        case str(text) | {"type": "text", "text": str(text)}:
            return Part("text", text=text)
        case {"type": "image" | "audio", "data": str(data)}:
            return _media(data, block.get("mimeType"))
        case {"type": "resource_link", "uri": str(uri)}:
            name = block.get("name")
            return Part("text", text=f"{name}: {uri}" if isinstance(name, str) else uri)
        case {"type": "resource", "resource": {"text": str(text)}}:
            return Part("text", text=text)
        case {"type": "resource", "resource": {"blob": str(data)}}:
            return _media(data, block["resource"].get("mimeType"))
    return Part("text", text=_json(block))


def _media(encoded: str, declared: Any) -> Part:
    """Return base64 as a part, of the type that its bytes have."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return Part("text", text="[content that is not valid base64]")
    known = declared if isinstance(declared, str) else None
    media_type = media_type_of(data[:HEAD_BYTES], known)
    if is_text(media_type):
        return Part("text", text=data.decode(errors="replace"))
    kind = _KINDS.get(media_type) or _KINDS.get(media_type.partition("/")[0], "file")
    return Part(kind, data=data, media_type=media_type)


def _says(text: str, structured: JsonValue) -> bool:
    """Return true if a text is JSON of the same value."""
    try:
        said = from_json(text)
    except ValueError:
        return False
    return json.dumps(said, sort_keys=True) == json.dumps(structured, sort_keys=True)


def _json(value: Any) -> str:
    return to_json(value, inf_nan_mode="null").decode()
