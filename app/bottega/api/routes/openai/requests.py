"""Bodies of OpenAI's chat completions, and the runs that they ask for. Pure.

Texts of fields are OpenAI's; see their API reference, *Create chat completion*.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints

from bottega.errors import InvalidInputError, UnknownAgentError

GRAPH = "graph:"
"""Prefix of the model that runs a graph as a DAG."""
WAY = "openai"
"""What ``expose`` of an agent says if it is a model."""

_CALL_ID = re.compile(r"call_([0-9a-f]{32})")
_DATA_URL = re.compile(r"data:([a-z0-9.+-]+/[a-z0-9.+-]+);base64,(.*)", re.DOTALL)
_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning_effort",
    "verbosity": "verbosity",
    "seed": "seed",
    "parallel_tool_calls": "parallel_tool_calls",
}
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


class Lenient(BaseModel):
    """Part of a request; what it does not name is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Function(Lenient):
    name: str
    arguments: str = "{}"
    description: str = ""
    parameters: dict[str, JsonValue] = Field(default_factory=dict)


class Call(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(Lenient):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[dict[str, JsonValue]] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class StreamOptions(Lenient):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """A body of ``POST /chat/completions``. Fields that are not here are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=500)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: JsonValue = None
    response_format: dict[str, JsonValue] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    store: bool | None = None
    # What has no effect here may have no other value.
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Hints for a server's cache and its own records.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


def run_of(asked: ChatRequest) -> dict[str, Any]:
    """Return the body of ``POST /v1/runs`` for a request.

    Raises:
        UnknownAgentError: no name of an agent or graph.
        InvalidInputError: what a run cannot honour; ``pointer`` names the field.
    """
    body: dict[str, Any] = {"input": list(_messages(asked.messages))}
    if asked.user:
        body["user"] = asked.user
    if asked.metadata:
        body["metadata"] = asked.metadata
    if (schema := _schema(asked.response_format)) is not None:
        body["output_schema"] = schema
    change = _overrides(asked)
    name, version = versioned(asked.model)
    graph = graph_of(name)
    body |= {"version": version}
    if graph is None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", name):
            raise UnknownAgentError(f"there is no agent '{asked.model}'", pointer="/model")
        return body | {"agent": name, "overrides": {name: change} if change else {}}
    if change:
        raise InvalidInputError(
            "a graph takes no parameters and no tools: set them on its agents", pointer="/model"
        )
    return body | {"mode": "dag", "graph": graph}


def versioned(model: str) -> tuple[str, int | None]:
    """Return the name of a model without its version, and that; ``None``: the current one.

    Raises:
        UnknownAgentError: the version is not a number.
    """
    name, at, version = model.partition("@")
    if not at:
        return name, None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", version):
        raise UnknownAgentError(f"there is no model '{model}'", pointer="/model")
    return name, int(version)


def plain(model: str) -> str:
    """Return the name of a model without its version."""
    return model.partition("@")[0]


def graph_of(model: str) -> str | None:
    """Return the graph that a model stands for; ``None``: an agent."""
    return model.removeprefix(GRAPH) if model.startswith(GRAPH) else None


def model_of(run: Mapping[str, Any]) -> str:
    """Return the model that a run's agent or graph is."""
    return str(run["agent"]) if run["agent"] else f"{GRAPH}{run['graph']}"


def call_id(interrupt: UUID) -> str:
    """Return the id that a client sees of a call of its own tool."""
    return f"call_{interrupt.hex}"


def answers_of(messages: Sequence[ChatMessage]) -> dict[UUID, str]:
    """Return the answers at the end of a history by the interrupts that its calls were.

    Empty if one of them answers a call that no run of this service can have made.
    """
    found: dict[UUID, str] = {}
    for message in reversed(messages):
        if message.role != "tool":
            break
        match = _CALL_ID.fullmatch(message.tool_call_id or "")
        if match is None:
            return {}
        found[UUID(hex=match[1])] = _text(message.content)
    return found


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")


def _overrides(asked: ChatRequest) -> dict[str, Any]:
    params = {
        name: value for sent, name in _PARAMS.items() if (value := getattr(asked, sent)) is not None
    }
    if asked.stop is not None:
        params["stop"] = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    if (choice := _tool_choice(asked.tool_choice)) is not None:
        params["tool_choice"] = choice
    tools = [
        {
            "type": "client",
            "name": tool.function.name,
            "description": tool.function.description or tool.function.name,
            "parameters": tool.function.parameters,
        }
        for tool in asked.tools or ()
    ]
    return {**({"params": params} if params else {}), **({"tools": tools} if tools else {})}


def _tool_choice(choice: JsonValue) -> str | dict[str, str] | None:
    match choice:
        case None | "auto":
            return None
        case "required" | "none":
            return str(choice)
        case {"type": "function", "function": {"name": str(name)}}:
            return {"name": name}
    raise InvalidInputError(
        "takes 'auto', 'none', 'required', or {type: 'function', function: {name}}",
        pointer="/tool_choice",
    )


def _schema(wanted: Mapping[str, JsonValue] | None) -> JsonValue:
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise InvalidInputError(
        "takes {type: 'text'}, {type: 'json_object'}, or {type: 'json_schema', json_schema: "
        "{name, schema}}",
        pointer="/response_format",
    )


def _messages(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a run's input; answers in the order of their calls."""
    answers: dict[str, dict[str, Any]] = {}
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        pointer = f"/messages/{number}"
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                raise InvalidInputError(
                    "answers no tool call of the message before", pointer=pointer
                )
            text = _text(message.content) or "(nothing)"
            answers[message.tool_call_id] = {
                "role": "tool",
                "tool_call_id": message.tool_call_id,
                "content": text,
            }
            if len(answers) == len(open_calls):
                yield from (answers[call] for call in open_calls)
                answers, open_calls = {}, []
            continue
        if open_calls:
            raise InvalidInputError(
                f"comes before the answers to all tool calls; '{open_calls[0]}' may lack one",
                pointer=pointer,
            )
        calls = [_call(call, pointer) for call in message.tool_calls or ()]
        open_calls = [call["id"] for call in calls]
        said: dict[str, Any] = {"role": _ROLES[message.role]}
        if content := _content(message.content, pointer):
            said["content"] = content
        yield said | ({"tool_calls": calls} if calls else {})


def _call(call: Call, pointer: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidInputError(
            f"the arguments of the call '{call.id[:60]}' are no JSON object", pointer=pointer
        )
    return {"id": call.id, "name": call.function.name, "arguments": arguments}


def _content(
    content: str | Sequence[Mapping[str, Any]] | None, pointer: str
) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, f"{pointer}/content/{n}") for n, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return {"type": "image", **_source(url)}
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(kind)}}:
            return {"type": "audio", "data": data, "media_type": f"audio/{kind}"}
        case {"type": "file", "file": {"file_data": str(data), **more}}:
            name = more.get("filename")
            return {"type": "document", **_source(data), **({"name": name} if name else {})}
        case {"type": "file", "file": {"file_id": str(file)}}:
            return {"type": "file", "file": file}
    raise InvalidInputError(
        "takes parts of the types text, image_url, input_audio and file", pointer=pointer
    )


def _source(url: str) -> dict[str, str]:
    """Return where a part comes from: the data of a data URL, or an address."""
    if match := _DATA_URL.fullmatch(url):
        return {"media_type": match[1], "data": match[2]}
    return {"url": url}
