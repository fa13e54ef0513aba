"""Bodies of OpenAI's chat completions and responses. Pure.

The same functions read both bodies, because each shared field has the same meaning in both.
OpenAI's API reference describes the fields: *Create chat completion*, *Create a model response*.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from bottega.api.routes.openai.model_request import (
    Call,
    HistoryMessage,
    Lenient,
    ModelRequest,
    NamedUser,
    Role,
    Tool,
    as_json,
    content_of,
)
from bottega.api.schemas.runs import SessionName
from bottega.errors import InvalidInputError

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
MOST_MESSAGES = 2048
"""Maximum number of messages of a request, including empty messages; a run has its own limit."""
T = TypeVar("T")
Nothing = Annotated[float, Field(ge=0, le=0)]
_ROLES: dict[str, Role] = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_SESSION: TypeAdapter[str] = TypeAdapter(SessionName)


class StreamOptions(Lenient):
    include_usage: bool | None = False


class Request(NamedUser):
    """Fields that chat completions and responses share. Unknown fields are refused.

    Known fields that do not affect the answer are ignored, whatever their values are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelName
    stream: bool | None = False
    store: bool | None = None
    tools: Annotated[list[Any], Field(max_length=128)] | None = None
    tool_choice: JsonValue = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Literal[0] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonValue = None


class ChatRequest(Request):
    """A body of ``POST /chat/completions``."""

    messages: Annotated[list[Any], Field(min_length=1, max_length=MOST_MESSAGES)]
    stream_options: StreamOptions | None = None
    response_format: dict[str, JsonValue] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    prediction: JsonValue = None
    # Unsupported parameters: the server accepts only the values that have no effect.
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Nothing | None = None
    frequency_penalty: Nothing | None = None
    logit_bias: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    function_call: Literal["none", "auto"] | None = None


def _session_of(sent: Any) -> str | None:
    session = sent["id"] if isinstance(sent, dict) and sent.keys() == {"id"} else sent
    if sent is None or sent == "":
        return None
    try:
        return _SESSION.validate_python(session, strict=True)
    except ValidationError:
        raise PydanticCustomError(
            "conversation",
            "must be the name of a session, or an object with this name as 'id'; a name has at "
            "most 128 letters, digits, '.', '_', ':' and '-'",
        ) from None


class Reasoning(Lenient):
    effort: str | None = None


class TextOptions(Lenient):
    format: dict[str, JsonValue] | None = None
    verbosity: str | None = None


class ResponsesRequest(Request):
    """A body of ``POST /responses``."""

    input: str | Annotated[list[Any], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[str | None, BeforeValidator(_session_of)] = None
    background: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    stream_options: JsonValue = None
    # Unsupported parameters: the server accepts only the values that have no effect.
    max_tool_calls: None = None
    truncation: Literal["disabled", "auto"] | None = None


def without_nothing(body: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without null fields, and without empty unknown fields."""
    empty: tuple[Any, ...] = ([], {}, "")
    return {
        name: value
        for name, value in body.items()
        if value is not None and (name in known or value not in empty)
    }


def referred_items(request: ResponsesRequest) -> dict[int, str]:
    """Return the ids of the input's item references, by the indexes of the references."""
    return {
        number: item["id"]
        for number, item in enumerate(request.input)
        if isinstance(item, Mapping)
        and item.get("type", "item_reference") == "item_reference"
        and isinstance(item.get("id"), str)
        and item.keys() <= {"type", "id"}
    }


def read_chat(body: ChatRequest) -> ModelRequest:
    """Convert the body of ``POST /openai/v1/chat/completions`` to a model request.

    Raises:
        InvalidInputError: the body has a field that a run does not support (see ``pointer``).
    """
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    params = {
        "max_output_tokens": (getattr(body, limit), f"/{limit}"),
        "reasoning_effort": (body.reasoning_effort, "/reasoning_effort"),
        "verbosity": (body.verbosity, "/verbosity"),
        "seed": (body.seed, "/seed"),
        "stop": ([each for each in stop if each] or None, "/stop"),
    }
    messages = list(_messages(body.messages, "/messages"))
    return _request(body, messages, "/messages", params, body.response_format, "/response_format")


def read_response_request(
    request: ResponsesRequest, known: Mapping[int, Mapping[str, Any]]
) -> ModelRequest:
    """Convert the body of ``POST /openai/v1/responses`` to a model request.

    Args:
        known: the items to which the input refers, by the indexes of the references.

    Raises:
        InvalidInputError: the body has a field that a run does not support (see ``pointer``).
    """
    text, reasoning = request.text or TextOptions(), request.reasoning or Reasoning()
    params = {
        "max_output_tokens": (request.max_output_tokens, "/max_output_tokens"),
        "reasoning_effort": (reasoning.effort, "/reasoning/effort"),
        "verbosity": (text.verbosity, "/text/verbosity"),
    }
    if isinstance(request.input, str):
        messages = [HistoryMessage("user", request.input, "/input", field="")]
    else:
        items = [known.get(number, item) for number, item in enumerate(request.input)]
        messages = list(_joined(_messages(items, "/input")))
    made = _request(request, messages, "/input", params, text.format, "/text/format")
    return replace(made, instructions=request.instructions or None)


def _request(
    request: Request,
    messages: Sequence[HistoryMessage],
    messages_at: str,
    params: Mapping[str, tuple[Any, str]],
    answer_format: Mapping[str, JsonValue] | None,
    format_at: str,
) -> ModelRequest:
    same = ("temperature", "top_p", "parallel_tool_calls")
    params = {**{name: (getattr(request, name), f"/{name}") for name in same}, **params}
    return ModelRequest(
        model=request.model,
        messages=messages,
        messages_at=messages_at,
        metadata=request.metadata,
        tools=[_tool(each, f"/tools/{number}") for number, each in enumerate(request.tools or ())],
        choice=_choice(request.tool_choice),
        params={name: each for name, each in params.items() if each[0] is not None},
        schema=_schema(answer_format, format_at),
        schema_at=format_at,
    )


def _tool(tool: Any, path: str) -> Tool:
    if not (isinstance(tool, Mapping) and tool.get("type") == "function"):
        raise InvalidInputError(
            "only tools of the type 'function' are accepted: define other tools in the agent",
            pointer=f"{path}/type",
        )
    fields, at = (tool["function"], f"{path}/function") if "function" in tool else (tool, path)
    definition = fields if isinstance(fields, Mapping) else {}

    def field(name: str, kind: type[T], absent: T) -> T:
        value = definition.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidInputError(f"the {name} must be a {kind.__name__}", pointer=f"{at}/{name}")
        return absent if value is None else value

    name, purpose = field("name", str, ""), field("description", str, "")
    return Tool(name, purpose, field("parameters", dict, {}), at)


def _choice(choice: Any) -> str | dict[str, str] | None:
    """Parse ``tool_choice``; ``None``: the model decides."""
    match choice or "auto":
        case "auto":
            return None
        case "required" | "none":
            return str(choice)
        case {"type": "function", "function": {"name": str(name)}}:
            return {"name": name}
        case {"type": "function", "name": str(name)}:
            return {"name": name}
    raise InvalidInputError(
        "must be 'auto', 'none', 'required', or a function by its name", pointer="/tool_choice"
    )


def _schema(text_format: Mapping[str, JsonValue] | None, pointer: str) -> Any:
    match text_format or {"type": "text"}:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
    raise InvalidInputError(
        "must have the type text, json_object, or json_schema with a name and a schema",
        pointer=pointer,
    )


def _joined(messages: Iterator[HistoryMessage]) -> Iterator[HistoryMessage]:
    last: HistoryMessage | None = None
    for one in messages:
        if last is not None and one.role == last.role == "assistant" and one.calls:
            last = replace(last, calls=[*last.calls, *one.calls])
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def _messages(messages: Sequence[Any], messages_at: str) -> Iterator[HistoryMessage]:
    for number, item in enumerate(messages):
        pointer = f"{messages_at}/{number}"
        match item:
            case None | {"type": "reasoning"}:
                continue
            case {"type": "function_call", "call_id": str(call), "name": str(name), **more}:
                arguments = _arguments(more.get("arguments") or "")
                yield HistoryMessage("assistant", "", pointer, [Call(call, name, arguments)])
            case {"type": "function_call_output", "call_id": str(call), **more}:
                at = f"{pointer}/output"
                content, parts = content_of(more.get("output"), at, is_history=True)
                yield HistoryMessage("tool", content, pointer, (), call, parts, field="output")
            case {"role": str(role)} if role in _ROLES:
                yield _message(_ROLES[role], item, pointer)
            case {"role": _}:
                roles = ", ".join(name for name in _ROLES if name != "function")
                raise InvalidInputError(f"must be one of {roles}", pointer=f"{pointer}/role")
            case {"type": str(kind)} if kind not in _OWN and not kind.startswith("input_"):
                role_of_text: Role = "user" if kind.endswith("_output") else "assistant"
                yield HistoryMessage(role_of_text, as_json(item), pointer)
            case _:
                raise InvalidInputError(
                    "must be a message, a function_call, a function_call_output, or a reference to "
                    "an item of this service",
                    pointer=pointer,
                )


_OWN = ("message", "function_call", "function_call_output", "item_reference")


def _message(role: Role, message: Mapping[str, Any], pointer: str) -> HistoryMessage:
    at = f"{pointer}/content"
    content, parts = content_of(message.get("content"), at, is_history=role != "user")
    if role == "assistant" and not content and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    calls = list(_calls(message, pointer)) if role == "assistant" else []
    answers = str(message.get("tool_call_id") or "") if role == "tool" else None
    return HistoryMessage(role, content, pointer, calls, answers, parts)


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else as_json(arguments)


def _calls(message: Mapping[str, Any], path: str) -> Iterator[Call]:
    sent = message.get("tool_calls") or []
    if old := message.get("function_call"):
        sent, path = [{"id": f"{path}/function_call", "function": old}], f"{path}/function_call"
    elif not isinstance(sent, list):
        raise InvalidInputError("must be a list of calls", pointer=f"{path}/tool_calls")
    for number, call in enumerate(sent):
        match call:
            case None:
                continue
            case {"function": {"name": str(name), **more}}:
                arguments = more.get("arguments")
            case {"type": "custom", "custom": {"name": str(name), **more}}:
                arguments = more.get("input")
            case _:
                raise InvalidInputError(
                    "a call needs an id, and a function with name and arguments",
                    pointer=f"{path}/tool_calls/{number}",
                )
        text = "" if arguments is None else _arguments(arguments)
        yield Call(str(call.get("id") or ""), name, text)
