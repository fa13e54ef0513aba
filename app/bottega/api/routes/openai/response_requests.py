"""Bodies of OpenAI's responses. Pure.

Texts of fields are OpenAI's; see their API reference, *Create a model response*.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from bottega.api.routes.openai.chat import MOST_MESSAGES, Request, choice_of, schema_of, tools_of
from bottega.api.routes.openai.model_request import (
    Call,
    HistoryMessage,
    Lenient,
    ModelRequest,
    Role,
    as_json,
    content_of,
)
from bottega.api.schemas.runs import SessionName
from bottega.errors import InvalidInputError

_ROLES: dict[str, Role] = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}
_SESSION: TypeAdapter[str] = TypeAdapter(SessionName)


def _session_of(sent: Any) -> str | None:
    """Return the session that ``conversation`` names: by its name, or by an object's ``id``."""
    named = sent["id"] if isinstance(sent, dict) and sent.keys() == {"id"} else sent
    if sent is None or sent == "":
        return None
    try:
        return _SESSION.validate_python(named, strict=True)
    except ValidationError:
        raise PydanticCustomError(
            "conversation",
            "is the name of a session, or an object with it as 'id': letters, digits, '.', '_', "
            "':' and '-', at most 128",
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
    # What has no effect here may have no other value.
    max_tool_calls: None = None
    truncation: Literal["disabled", "auto"] | None = None


def references(sent: ResponsesRequest) -> dict[int, str]:
    """Return the ids of the items that the input only refers to, by their places in it."""
    return {
        number: item["id"]
        for number, item in enumerate(sent.input)
        if isinstance(item, Mapping)
        and item.get("type", "item_reference") == "item_reference"
        and isinstance(item.get("id"), str)
        and item.keys() <= {"type", "id"}
    }


def read_response_request(
    sent: ResponsesRequest, known: Mapping[int, Mapping[str, Any]]
) -> ModelRequest:
    """Return what a response asks for.

    Args:
        known: the items that the input only refers to, by their places.

    Raises:
        InvalidInputError: what a run cannot honour; ``pointer`` names the field.
    """
    text, reasoning = sent.text or TextOptions(), sent.reasoning or Reasoning()
    params = {
        "temperature": (sent.temperature, "/temperature"),
        "top_p": (sent.top_p, "/top_p"),
        "parallel_tool_calls": (sent.parallel_tool_calls, "/parallel_tool_calls"),
        "max_output_tokens": (sent.max_output_tokens, "/max_output_tokens"),
        "reasoning_effort": (reasoning.effort, "/reasoning/effort"),
        "verbosity": (text.verbosity, "/text/verbosity"),
    }
    said: Sequence[HistoryMessage] = (
        [HistoryMessage("user", sent.input, "/input", field="")]
        if isinstance(sent.input, str)
        else list(_joined(_items([known.get(n, item) for n, item in enumerate(sent.input)])))
    )
    return ModelRequest(
        model=sent.model,
        messages=said,
        messages_at="/input",
        metadata=sent.metadata,
        instructions=sent.instructions or None,
        tools=tools_of(sent.tools, nested=False),
        choice=choice_of(sent.tool_choice),
        params={name: each for name, each in params.items() if each[0] is not None},
        schema=schema_of(text.format, "/text/format"),
        schema_at="/text/format",
    )


def _joined(said: Iterator[HistoryMessage]) -> Iterator[HistoryMessage]:
    """Yield messages; a text and the calls that follow it are one message of the model."""
    last: HistoryMessage | None = None
    for one in said:
        if last is not None and one.role == last.role == "assistant" and one.calls:
            last = replace(last, calls=[*last.calls, *one.calls])
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def _items(items: Sequence[Any]) -> Iterator[HistoryMessage]:
    for number, item in enumerate(items):
        place = f"/input/{number}"
        match item:
            case None | {"type": "reasoning"}:
                continue
            case {"type": "function_call", "call_id": str(call), "name": str(name), **more}:
                arguments = more.get("arguments") or ""
                if not isinstance(arguments, str):
                    arguments = as_json(arguments)
                yield HistoryMessage("assistant", "", place, [Call(call, name, arguments)])
            case {"type": "function_call_output", "call_id": str(call), **more}:
                at = f"{place}/output"
                content, parts = content_of(more.get("output"), at, is_history=True)
                yield HistoryMessage("tool", content, place, (), call, parts, field="output")
            case {"role": str(role), **more} if role in _ROLES:
                at = f"{place}/content"
                content, parts = content_of(
                    more.get("content"), at, is_history=_ROLES[role] != "user"
                )
                yield HistoryMessage(_ROLES[role], content, place, parts=parts)
            case {"type": str(kind)} if kind not in _OWN and not kind.startswith("input_"):
                text = as_json(item)
                yield HistoryMessage(
                    "user" if kind.endswith("_output") else "assistant", text, place
                )
            case _:
                raise InvalidInputError(
                    "takes messages, function_call, function_call_output and references to our "
                    "own items",
                    pointer=place,
                )


_OWN = ("message", "function_call", "function_call_output", "item_reference")
