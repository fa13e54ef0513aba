"""Bodies of OpenAI's responses, as chat completions. Pure.

Texts of fields are OpenAI's; see their API reference, *Create a model response*.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints

from bottega.api.routes.openai.requests import ChatMessage, ChatRequest, Lenient
from bottega.errors import InvalidInputError

_ID = re.compile(r"resp_([0-9a-f]{32})(?:_([0-9]{1,9}))?")
_SAME = ("temperature", "top_p", "parallel_tool_calls", "user", "metadata", "stream")
_TEXTS = ("input_text", "output_text", "text")


class Reasoning(Lenient):
    effort: str | None = None


class TextOptions(Lenient):
    format: dict[str, JsonValue] | None = None
    verbosity: str | None = None


class ResponsesRequest(BaseModel):
    """A body of ``POST /responses``. Fields that are not here are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    input: str | Annotated[list[dict[str, JsonValue]], Field(min_length=1, max_length=500)]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, JsonValue] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = False
    tools: Annotated[list[dict[str, JsonValue]], Field(max_length=128)] | None = None
    tool_choice: JsonValue = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None
    metadata: dict[str, JsonValue] | None = None
    # What has no effect here may have no other value.
    top_logprobs: Literal[0] | None = None
    max_tool_calls: None = None
    truncation: Literal["disabled", "auto"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Hints for a server's cache and its own records.
    include: list[str] | None = None
    stream_options: dict[str, JsonValue] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


def response_id(run_id: UUID, after: int) -> str:
    """Return the id of a response; ``after``: ``seq`` after which the run's events are it."""
    return f"resp_{run_id.hex}" + (f"_{after}" if after else "")


def run_of_response(response: str) -> tuple[UUID, int] | None:
    """Return the run of a response, and the ``seq`` of :func:`response_id`; ``None``: no id."""
    match = _ID.fullmatch(response)
    return None if match is None else (UUID(hex=match[1]), int(match[2] or 0))


def chat_of(asked: ResponsesRequest) -> ChatRequest:
    """Return the chat completion that asks for the same.

    Raises:
        InvalidInputError: what a run cannot honour; ``pointer`` names the field.
    """
    items: Sequence[Mapping[str, Any]] = (
        [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    )
    messages = [] if not asked.instructions else [_message("developer", asked.instructions)]
    text = asked.text or TextOptions()
    return ChatRequest(
        model=asked.model,
        messages=[*messages, *_messages(items)],
        tools=[_tool(tool, n) for n, tool in enumerate(asked.tools or ())] or None,
        tool_choice=_choice(asked.tool_choice),
        response_format=_format(text.format),
        verbosity=text.verbosity,
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        max_completion_tokens=asked.max_output_tokens,
        **{name: getattr(asked, name) for name in _SAME},
    )


def _message(role: Any, content: Any, **more: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **more)


def _messages(items: Sequence[Mapping[str, Any]]) -> Iterator[ChatMessage]:
    """Yield messages; function calls that follow each other are one message."""
    calls: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if item.get("type") == "function_call":
            calls.append(_call(item, number))
            continue
        if calls:
            yield _message("assistant", None, tool_calls=calls)
            calls = []
        if item.get("type") != "reasoning":
            yield _one(item, number)
    if calls:
        yield _message("assistant", None, tool_calls=calls)


def _call(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    match item:
        case {"call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            return {"id": call_id, "function": {"name": name, "arguments": arguments}}
    raise _refused(number, "a function_call has call_id, name and arguments")


def _one(item: Mapping[str, Any], number: int) -> ChatMessage:
    match item:
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            return _message("tool", _content(output, number), tool_call_id=call_id)
        case {"role": "user" | "assistant" | "system" | "developer" as role, "content": content}:
            return _message(role, _content(content, number))
    raise _refused(number, "takes messages, function_call, function_call_output and reasoning")


def _content(content: Any, number: int) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(number, "the content is a text or a list of parts")
    return [_part(part, number) for part in content]


def _part(part: Any, number: int) -> dict[str, Any]:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "input_image" | "input_file", "file_id": str(file)}:
            return {"type": "file", "file": {"file_id": file}}
        case {"type": "input_file", "file_data": str(data), **more}:
            return {"type": "file", "file": {"file_data": data, "filename": more.get("filename")}}
    raise _refused(number, "takes the parts input_text, output_text, input_image and input_file")


def _tool(tool: Mapping[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidInputError(
            "takes tools of the type 'function': all others are the agent's own",
            pointer=f"/tools/{number}",
        )
    function = {name: tool.get(name) for name in ("name", "description", "parameters")}
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return choice


def _format(wanted: Mapping[str, JsonValue] | None) -> dict[str, Any] | None:
    match wanted:
        case {"type": "json_schema", **schema}:
            return {"type": "json_schema", "json_schema": schema}
    return None if wanted is None else dict(wanted)


def _refused(number: int, why: str) -> InvalidInputError:
    return InvalidInputError(why, pointer=f"/input/{number}")
