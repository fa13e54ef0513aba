"""A run's input, the parts of a message's content, and files, on the wire."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bottega.api.schemas.base import Answer, Body
from bottega.errors import InvalidInputError
from bottega.tools.egress import checked_url

Text = Annotated[str, StringConstraints(min_length=1, max_length=500_000)]
LONGEST_DATA = -(-20_000_000 // 3) * 4
"""Characters of one part in base64: 20 MB decoded."""
_SOURCES = ("url", "data", "file")


_HOST = r"^[Hh][Tt][Tt][Pp][Ss]?://[^\s/?#@\\]+"
_WEB_ADDRESS = rf"{_HOST}([/?#]\S*)?$"
_WITHOUT_FRAGMENT = rf"{_HOST}([/?][^\s#]*)?$"
_LONGEST_URL = 2000


def _web_address(url: str) -> str:
    try:
        checked_url(url)
    except InvalidInputError as error:
        raise PydanticCustomError("url", "{why}", {"why": error.detail}) from None
    if not re.fullmatch(_WEB_ADDRESS, url):
        raise PydanticCustomError("url", "a URL has no blanks: encode them")
    return url


def _without_fragment(url: str) -> str:
    if "#" in url:
        raise PydanticCustomError("url", "a fragment (#…) is never sent: leave it out")
    return url


def _shown(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "maxLength": _LONGEST_URL, "pattern": pattern})


WebAddress = Annotated[
    str,
    StringConstraints(max_length=_LONGEST_URL),
    AfterValidator(_web_address),
    _shown(_WEB_ADDRESS),
]
"""An http(s) URL with a host, without user, password or blanks."""
WebhookUrl = Annotated[WebAddress, AfterValidator(_without_fragment), _shown(_WITHOUT_FRAGMENT)]


class TextPart(Body):
    """A part that is text."""

    type: Literal["text"]
    text: Text


class MediaPart(Body):
    """A part that is not text, from exactly one of `url`, `data` and `file`."""

    type: Literal["image", "audio", "document", "file"]
    url: Annotated[
        WebAddress | None,
        Field(description="Passed on to the model's server, which reads it; we never do."),
    ] = None
    data: Annotated[
        str | None,
        Field(
            max_length=LONGEST_DATA,
            description="At most 20 MB in base64; it is stored as a file. Needs `media_type`.",
        ),
    ] = None
    file: Annotated[UUID | None, Field(strict=False, description="Id of an uploaded file.")] = None
    media_type: Annotated[
        str | None,
        StringConstraints(pattern=r"^[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,100}$"),
        Field(description="Of a file it is found in its bytes."),
    ] = None
    name: Annotated[
        str | None,
        StringConstraints(min_length=1, max_length=255),
        Field(description="File name, for the model."),
    ] = None
    size_tokens: Annotated[
        int | None,
        Field(description="Estimate of its tokens in a prompt; the server sets it."),
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise PydanticCustomError(
                "one_source",
                "a part needs exactly one of url, data and file, found {count}",
                {"count": len(given)},
            )
        if self.data is not None and self.media_type is None:
            raise PydanticCustomError("media_type", "data needs its media_type")
        return self


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "text part" if kind == "text" else "media part"


# Names of no field: errors have them in their paths.
InputPart = Annotated[
    Annotated[TextPart, Tag("text part")] | Annotated[MediaPart, Tag("media part")],
    Discriminator(_kind),
]
Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[InputPart], Field(min_length=1, max_length=100), Tag("parts")],
    Discriminator(lambda value: "parts" if isinstance(value, list) else "text"),
]
"""Content of a message: a text, or parts."""


class ContentPart(Answer):
    """A part of a message's content."""

    type: Literal["text", "image", "audio", "document", "file"]
    text: str | None = None
    url: str | None = None
    file: Annotated[str | None, Field(description="Id of a file.")] = None
    media_type: str | None = None
    name: str | None = None
    size_tokens: Annotated[int | None, Field(description="Estimate of its tokens in a prompt.")] = (
        None
    )

    @model_serializer(mode="wrap")
    def _set_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unset fields, so that a message can be sent again as it is shown."""
        return {name: value for name, value in dump(self).items() if value is not None}


CallId = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class InputCall(Body):
    """A call of a tool, in a message of the role `assistant`."""

    id: CallId
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


_CALLS = "Tool calls of the message; the messages after it answer them, in their order."


class InputMessage(Body):
    """A message of a run's input."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[
        Content, Field(description="May be left out if the message calls tools.")
    ] = ""
    tool_calls: Annotated[
        list[InputCall] | None, Field(min_length=1, max_length=128, description=_CALLS)
    ] = None
    tool_call_id: Annotated[
        CallId | None, Field(description="The call that a message of the role `tool` answers.")
    ] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "only the role 'assistant' calls tools")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError(
                "tool_call_id", "the role 'tool', and no other, has a tool_call_id"
            )
        if not self.content and self.tool_calls is None:
            raise PydanticCustomError("content", "the content is missing")
        return self

    @model_serializer(mode="wrap")
    def _set_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class ShownCall(Answer):
    """A call of a tool, in a message of the role `assistant`."""

    id: str
    name: str
    arguments: dict[str, Any]


class ShownMessage(Answer):
    """A message of a run's input, as it is stored: data became files."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart]
    tool_calls: list[ShownCall] | None = None
    tool_call_id: str | None = None

    @model_serializer(mode="wrap")
    def _set_fields(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


_MAX_MESSAGES = 500
_QUESTION: dict[str, JsonValue] = {
    "maxItems": _MAX_MESSAGES,
    "contains": {"properties": {"role": {"const": "user"}}},
    "minContains": 1,
}


def _asks(value: list[InputMessage]) -> list[InputMessage]:
    if len(value) > _MAX_MESSAGES:
        raise PydanticCustomError("too_long", f"at most {_MAX_MESSAGES} messages")
    users = sum(message.role == "user" for message in value)
    if users == 0:
        raise PydanticCustomError("user_message", "one message must have the role 'user'")
    _check_calls(value)
    asking = [message.role for message in value if message.role != "system"]
    if asking[-1] == "assistant" or (users > 1 and value[-1].role == "system"):
        raise PydanticCustomError(
            "last_user_message",
            "the last message must have the role 'user', or 'tool' after a tool call",
        )
    return value


def _check_calls(messages: list[InputMessage]) -> None:
    """Check that the answers to a message's tool calls follow it, in their order."""
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        if message.role == "tool":
            if not unanswered or unanswered.pop(0) != message.tool_call_id:
                raise PydanticCustomError(
                    "tool_call_id",
                    "message {number} answers a call that is not the next one without an answer",
                    {"number": number},
                )
        elif unanswered:
            break
        unanswered += [call.id for call in message.tool_calls or ()]
    if unanswered:
        raise PydanticCustomError(
            "tool_calls", "the tool call '{id}' has no answer", {"id": unanswered[0]}
        )


RunInput = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[
        list[InputMessage],
        AfterValidator(_asks),
        Field(json_schema_extra=_QUESTION),
        Tag("list"),
    ],
    Discriminator(lambda value: "list" if isinstance(value, list) else "text"),
]


class File(Answer):
    """A stored file."""

    id: UUID
    name: str | None
    size: Annotated[int, Field(description="In bytes.")]
    sha256: Annotated[str, Field(description="Of its bytes, in hexadecimal.")]
    media_type: Annotated[str, Field(description="Found in its bytes.")]
    tokens: Annotated[int, Field(description="Estimate of its tokens in a prompt.")]
    session_id: Annotated[str | None, Field(description="The session that it is deleted with.")]
    created_at: datetime


_Said = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=500)]], Field(max_length=10)
]
_GOALS = "What is to be done, if the input does not say it all. Models read it word for word."
_CONSTRAINTS = "What the work must keep to. Models read it word for word."
_CRITERIA = "How to tell that it was done well. Models read it word for word; nothing checks it."


class Demands(Body):
    """Demands of a request for a run, beside its input."""

    goals: Annotated[_Said, Field(description=_GOALS)] = Field(default_factory=list)
    constraints: Annotated[_Said, Field(description=_CONSTRAINTS)] = Field(default_factory=list)
    success_criteria: Annotated[_Said, Field(description=_CRITERIA)] = Field(default_factory=list)


class ShownDemands(Answer):
    """Demands of a run, as its request has them."""

    goals: list[str] = Field(default_factory=list)
    constraints: list[str] = Field(default_factory=list)
    success_criteria: list[str] = Field(default_factory=list)
