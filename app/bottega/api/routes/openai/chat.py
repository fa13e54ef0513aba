"""Bodies of OpenAI's chat completions. Pure.

Texts of fields are OpenAI's; see their API reference, *Create chat completion*.

Chat completions, whole and in chunks. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

from pydantic import ConfigDict, Field, JsonValue, StringConstraints

from bottega.api.routes.openai.answers import ClientCall, RoundAnswer, created_at, event
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
from bottega.errors import InvalidInputError

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
MOST_MESSAGES = 2048
"""Of a request; more of what says something is refused by the run."""
T = TypeVar("T")
Nothing = Annotated[float, Field(ge=0, le=0)]
_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning_effort",
    "verbosity": "verbosity",
    "seed": "seed",
    "stop": "stop",
    "parallel_tool_calls": "parallel_tool_calls",
}
_ROLES: dict[str, Role] = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class StreamOptions(Lenient):
    include_usage: bool | None = False


class Request(NamedUser):
    """Fields of both forms of a request. Fields that are not here are refused.

    A field that has no effect on the answer is ignored, whatever it says.
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
    # What has no effect here may have no other value.
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Nothing | None = None
    frequency_penalty: Nothing | None = None
    logit_bias: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    function_call: Literal["none", "auto"] | None = None


def without_nothing(body: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without fields that are null, and unknown ones that are empty."""
    empty: tuple[Any, ...] = ([], {}, "")
    return {
        name: value
        for name, value in body.items()
        if value is not None and (name in known or value not in empty)
    }


def read_chat(sent: ChatRequest) -> ModelRequest:
    """Return what a chat completion asks for.

    Raises:
        InvalidInputError: what a run cannot honour; ``pointer`` names the field.
    """
    params = {
        ours: (value, f"/{name}")
        for name, ours in _PARAMS.items()
        if (value := getattr(sent, name)) is not None
    }
    if "stop" in params:
        stop = [sent.stop] if isinstance(sent.stop, str) else sent.stop or []
        params["stop"] = [each for each in stop if each], "/stop"
        if not params["stop"][0]:
            del params["stop"]
    return ModelRequest(
        model=sent.model,
        messages=list(_messages(sent.messages)),
        messages_at="/messages",
        metadata=sent.metadata,
        tools=tools_of(sent.tools, nested=True),
        choice=choice_of(sent.tool_choice),
        params=params,
        schema=schema_of(sent.response_format, "/response_format"),
        schema_at="/response_format",
    )


def tools_of(tools: Sequence[Any] | None, *, nested: bool) -> list[Tool]:
    """Return the client's tools; ``nested``: their fields are below ``function``.

    Raises:
        InvalidInputError: a tool is no function, or lacks its name.
    """
    return [_tool(each, f"/tools/{number}", nested) for number, each in enumerate(tools or ())]


def _tool(tool: Any, place: str, nested: bool) -> Tool:
    if not (isinstance(tool, Mapping) and tool.get("type") == "function"):
        raise InvalidInputError(
            "takes tools of the type 'function': all others are the agent's own",
            pointer=f"{place}/type" if nested else place,
        )
    fields, at = (tool.get("function"), f"{place}/function") if nested else (tool, place)
    sent = fields if isinstance(fields, Mapping) else {}

    def field(name: str, kind: type[T], absent: T) -> T:
        value = sent.get(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidInputError(f"the {name} is no {kind.__name__}", pointer=f"{at}/{name}")
        return absent if value is None else value

    name, purpose = field("name", str, ""), field("description", str, "")
    return Tool(name, purpose, field("parameters", dict, {}), at)


def choice_of(choice: Any) -> str | dict[str, str] | None:
    """Return a choice of tools; ``None``: the model's own."""
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
        "takes 'auto', 'none', 'required', or a function by its name", pointer="/tool_choice"
    )


def schema_of(wanted: Mapping[str, Any] | None, place: str) -> Any:
    """Return the JSON Schema of an answer; ``None``: it is a text."""
    match wanted or {"type": "text"}:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_schema", "schema": dict(schema)}:
            return schema
    raise InvalidInputError(
        "takes the types text, json_object, and json_schema with a name and a schema",
        pointer=place,
    )


def _messages(messages: Sequence[Any]) -> Iterator[HistoryMessage]:
    for number, message in enumerate(messages):
        place = f"/messages/{number}"
        if message is None:
            continue
        if not isinstance(message, Mapping):
            raise InvalidInputError("a message is an object", pointer=place)
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise InvalidInputError(
                "takes the roles developer, system, user, assistant and tool",
                pointer=f"{place}/role",
            )
        is_history = role != "user"
        content, parts = content_of(
            message.get("content"), f"{place}/content", is_history=is_history
        )
        if role == "assistant" and not content and isinstance(message.get("refusal"), str):
            content = message["refusal"]
        calls = list(_calls(message, place)) if role == "assistant" else []
        answers = None
        if role == "tool":
            answers = str(message.get("tool_call_id") or "")
        yield HistoryMessage(role, content, place, calls, answers, parts)


def _calls(message: Mapping[str, Any], place: str) -> Iterator[Call]:
    sent = message.get("tool_calls") or []
    if old := message.get("function_call"):
        sent, place = [{"id": f"{place}/function_call", "function": old}], f"{place}/function_call"
    elif not isinstance(sent, list):
        raise InvalidInputError("is a list of calls", pointer=f"{place}/tool_calls")
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
                    "a call has an id, and a function with name and arguments",
                    pointer=f"{place}/tool_calls/{number}",
                )
        text = (
            arguments
            if isinstance(arguments, str)
            else as_json(arguments)
            if arguments is not None
            else ""
        )
        yield Call(str(call.get("id") or ""), name, text)


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request, under way or complete.

    Attributes:
        after: ``seq`` after which the run's events are the answer.
        model: as the client named it.
    """

    run_id: UUID
    after: int
    model: str

    def whole(self, answer: RoundAnswer) -> dict[str, Any]:
        """Return a ``chat.completion``."""
        content = (answer.text or None) if answer.calls else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [_call(each) for each in answer.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
        return self._head("chat.completion") | {"choices": [choice], "usage": usage_of(answer)}

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        """Return a ``chat.completion.chunk`` as a server-sent event."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def last_chunks(self, answer: RoundAnswer, *, with_usage: bool) -> list[bytes]:
        """Return what follows the text."""
        made = []
        if answer.calls:
            numbered = [{"index": n, **_call(each)} for n, each in enumerate(answer.calls)]
            made.append(self.chunk({"tool_calls": numbered}))
        made.append(self.chunk({}, answer.finish))
        if with_usage:
            usage: dict[str, Any] = {"choices": [], "usage": usage_of(answer)}
            made.append(event(self._head("chat.completion.chunk") | usage))
        return [*made, DONE]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.run_id.hex}" + (f"-{self.after}" if self.after else ""),
            "object": kind,
            "created": created_at(self.run_id),
            "model": self.model,
        }


def usage_of(answer: RoundAnswer) -> dict[str, Any] | None:
    """Return the tokens of an answer; ``None``: not known yet."""
    used = answer.usage
    if used is None:
        return None
    return {
        "prompt_tokens": used["input"],
        "completion_tokens": used["output"],
        "total_tokens": used["input"] + used["output"],
        "prompt_tokens_details": {"cached_tokens": used.get("cached", 0)},
        "completion_tokens_details": {"reasoning_tokens": used.get("reasoning", 0)},
    }


def _call(call: ClientCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
