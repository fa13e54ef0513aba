"""Base classes of all bodies, and the bodies' texts, parts of contents, and files.

Bodies have strict types, no unknown fields, storable texts, and size limits.
"""

import math
import re
import unicodedata
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar
from uuid import UUID

from pydantic import (
    AfterValidator,
    AliasPath,
    AwareDatetime,
    BaseModel,
    ConfigDict,
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
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from typing_extensions import is_typeddict

from bottega.errors import InvalidInputError
from bottega.events import data
from bottega.events.data import ContentPart
from bottega.json_schema.described import DescribedModel, described
from bottega.json_schema.values import WHOLE
from bottega.tools.egress import checked_url
from bottega.tools.http import LONGEST_URL

for _each in filter(is_typeddict, vars(data).values()):
    described(_each)

MAX_VALUES = 100_000
_SHORT = 1000  # number of characters

NAME_PATTERN = r"^[a-z][a-z0-9_-]{0,63}$"
Name = Annotated[
    str,
    StringConstraints(pattern=NAME_PATTERN),
    Field(description="Lower-case letters, digits, `_` and `-`; starts with a letter."),
]
VersionNumber = Annotated[
    int,
    Field(
        ge=1,
        le=2**31 - 1,
        description="Version of the agent, or of the graph if no agent is named; null: the current "
        "version. Sub-agents always run in their current versions.",
    ),
    WHOLE,
]
PlaceInTime = Annotated[
    AwareDatetime,
    Field(ge=datetime(2000, 1, 1, tzinfo=UTC), le=datetime(9000, 1, 1, tzinfo=UTC)),
    AfterValidator(lambda moment: moment.astimezone(UTC)),
]
"""Time that a client sent, in UTC; PostgreSQL refuses offsets of 16 hours and more."""


_UNSEEN = frozenset(("Cc", "Cf", "Zl", "Zp", "Zs"))


def names_nobody(name: str) -> bool:
    """Return true for a name without visible characters."""
    return all(unicodedata.category(each) in _UNSEEN for each in name)


def _of_somebody(name: str) -> str:
    if names_nobody(name):
        raise PydanticCustomError("blank", "a user's name needs at least one visible character")
    return name


UserName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=128),
    AfterValidator(_of_somebody),
    Field(description="Your own name for your end user: an id, an address, any text."),
]
OwnUser = Annotated[
    UserName | None,
    Field(
        description=(
            "The user that the request acts for. 409 `session_user`: the changed resource belongs "
            "to another user, or to no user. Null: owners are not compared. Required if the key "
            "must name a user."
        )
    ),
]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], JsonValue],
    Field(max_length=50, description="Your own data, up to 50 keys. Models never see it."),
]


class Part(DescribedModel):
    """A part of a body; the types of its fields must allow only small, storable values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Body(Part):
    """A request body; unknown fields are refused.

    Attributes:
        deep: fields that may be nested deeper, because these fields check their depth themselves.
    """

    deep: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        if isinstance(value, dict) and (deep := cls.deep & value.keys()):
            for name in deep:
                check_storable(value[name], most_depth=40)
            check_storable({name: each for name, each in value.items() if name not in deep})
        else:
            check_storable(value)
        return value


class Answer(DescribedModel):
    """A response body."""

    model_config = ConfigDict(extra="ignore", from_attributes=True, validate_by_name=True)


def taken_from(*path: str) -> Any:
    """Return the annotation of a response's field whose value comes from a nested attribute.

    The annotation also reads a stored response, in which the value has the field's name.
    """
    return Field(validation_alias=AliasPath(*path))


def named_examples(content: type[BaseModel], *names: str) -> JsonDict:
    """Return the examples of a definition's content, each with a name."""
    bodies: Any = content.model_config["json_schema_extra"]
    pairs = zip(names, bodies["examples"], strict=True)
    return {"examples": [{"name": name, **body} for name, body in pairs]}


T = TypeVar("T")


class Page(Answer, Generic[T]):
    """One page of a list."""

    items: list[T]
    """The items of this page."""
    next_cursor: str | None = None
    """Send this value as `cursor` to get the next page; null: this page is the last."""


def check_storable(value: Any, most_depth: int = 16) -> None:
    """Refuse values that the database cannot store, or that are too large to read.

    The check of a body delays the event loop. Therefore, the function checks all values of one
    depth together: for thousands of small values, this takes a third of the time.

    Raises:
        PydanticCustomError: a value has NUL characters, lone surrogates, NaN or infinity, is nested
            deeper than ``most_depth``, or has more than ``MAX_VALUES`` values.
    """
    level, depth, count = [value], 1, 0
    while level:
        count += len(level)
        if count > MAX_VALUES:
            raise PydanticCustomError("too_many_values", f"more than {MAX_VALUES} values")
        if set(map(type, level)) == {str}:
            _check_texts(level)
            return
        _check_texts([item for item in level if isinstance(item, str)])
        if not all(map(math.isfinite, [item for item in level if isinstance(item, float)])):
            raise PydanticCustomError("not_finite", "NaN and infinity are not JSON numbers")
        objects = [item for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, list)]
        if depth > most_depth and (objects or lists):
            raise PydanticCustomError("too_deep", f"nested deeper than {most_depth} levels")
        parts = (*objects, *(item.values() for item in objects), *lists)
        level, depth = list(chain.from_iterable(parts)), depth + 1


def _check_texts(texts: list[str]) -> None:
    _check_text("".join([text for text in texts if len(text) < _SHORT]))
    for text in texts:
        if len(text) >= _SHORT:  # joining long texts costs more than checking each text
            _check_text(text)


def _check_text(text: str) -> None:
    if "\x00" in text:
        raise PydanticCustomError("nul", "the character NUL (U+0000) cannot be stored: remove it")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError(
                "surrogate", "lone surrogates (U+D800 to U+DFFF) are not text: remove them"
            ) from None


Text = Annotated[str, StringConstraints(min_length=1, max_length=500_000)]
MOST_BODY_BYTES = 1_048_576
"""Bytes of a request's body, if it has no files and no data in base64."""
LONGEST_DATA = -(-20_000_000 // 3) * 4
"""Maximum number of base64 characters of one part: 20 MB decoded."""
_SOURCES = ("url", "data", "file")


_HOST = r"^[Hh][Tt][Tt][Pp][Ss]?://[^\s/?#@\\]+"
_WEB_ADDRESS = rf"{_HOST}([/?#]\S*)?$"
_WITHOUT_FRAGMENT = rf"{_HOST}([/?][^\s#]*)?$"


def _web_address(url: str) -> str:
    try:
        checked_url(url)
    except InvalidInputError as error:
        raise PydanticCustomError("url", "{why}", {"why": error.detail}) from None
    if not re.fullmatch(_WEB_ADDRESS, url):
        raise PydanticCustomError("url", "a URL may not have blanks: encode them")
    return url


def _without_fragment(url: str) -> str:
    if "#" in url:
        raise PydanticCustomError("url", "a fragment (#…) is never sent: leave it out")
    return url


def _shown(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "maxLength": LONGEST_URL, "pattern": pattern})


WebAddress = Annotated[
    str,
    StringConstraints(max_length=LONGEST_URL),
    AfterValidator(_web_address),
    _shown(_WEB_ADDRESS),
]
"""An http(s) URL with a host, without user, password or blanks."""
WebhookUrl = Annotated[WebAddress, AfterValidator(_without_fragment), _shown(_WITHOUT_FRAGMENT)]


class SetFields(BaseModel):
    """Base class that leaves out unset fields, so that clients can send a shown message again."""

    @model_serializer(mode="wrap")
    def _set_fields(self, dump: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        """Leave out fields that are null. (A return annotation would replace the schema.)"""
        return {name: value for name, value in dump(self).items() if value is not None}


class TextPart(Body):
    """A part that is text."""

    type: Literal["text"]
    text: Text
    """The text of the part."""


class MediaPart(Body):
    """A part that is not text; its content is exactly one of `url`, `data` and `file`."""

    type: Literal["image", "audio", "document", "file"]
    """Kind of the part; `file`: the media type decides."""
    url: WebAddress | None = None
    """URL that the model's server reads; this server never reads the URL."""
    data: Annotated[str | None, Field(max_length=LONGEST_DATA)] = None
    """Content in base64, at most 20 MB; the server stores it as a file. Needs `media_type`."""
    file: Annotated[UUID | None, Field(strict=False)] = None
    """Id of an uploaded file."""
    media_type: Annotated[
        str | None, StringConstraints(pattern=r"^[a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,100}$")
    ] = None
    """Media type; for an uploaded file, the server finds the type from the bytes."""
    name: Annotated[str | None, StringConstraints(min_length=1, max_length=255)] = None
    """File name, which the model reads."""
    size_tokens: Annotated[int, WHOLE] | None = None
    """Estimate of the part's tokens in a prompt; the server sets it."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(sources) != 1:
            raise PydanticCustomError(
                "one_source",
                "a part needs exactly one of url, data and file, found {count}",
                {"count": len(sources)},
            )
        if self.data is not None and self.media_type is None:
            raise PydanticCustomError("media_type", "data needs its media_type")
        return self


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "text part" if kind == "text" else "media part"


# Paths of validation errors contain these tags. A tag has a blank, so it is never a field's name.
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


Role = Literal["system", "user", "assistant", "tool"]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class InputCall(Body):
    """A tool call in a message of the role `assistant`."""

    id: CallId
    """Id that the model gave the call; the call's answer has this id as `tool_call_id`."""
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    """Name of the tool."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


_CALLS = "Tool calls of the message; the next messages must answer them in the same order."


class InputMessage(SetFields, Body):
    """A message of a run's input."""

    role: Role
    """Author of the message; `tool`: the answer to a tool call."""
    content: Content = ""
    """Content of the message; you may omit it if the message calls tools."""
    tool_calls: Annotated[
        list[InputCall] | None, Field(min_length=1, max_length=128, description=_CALLS)
    ] = None
    tool_call_id: CallId | None = None
    """The tool call that a message of the role `tool` answers."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "only the role 'assistant' may have tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError(
                "tool_call_id",
                "the role 'tool' needs a tool_call_id, and other roles may have none",
            )
        if not self.content and self.tool_calls is None:
            raise PydanticCustomError("content", "the content is missing")
        return self


ShownPart = Annotated[
    ContentPart,
    AfterValidator(lambda part: {key: each for key, each in part.items() if each is not None}),
]
"""A part without fields that are null, so that clients can send a shown message again."""


class ShownCall(Answer):
    """A tool call in a message of the role `assistant`."""

    id: str
    """Id that the model gave the call."""
    name: str
    """Name of the tool."""
    arguments: dict[str, Any]


class ShownMessage(SetFields, Answer):
    """A message of a run's input in its stored form: a file replaces `data`."""

    role: Role
    """Author of the message; `tool`: the answer to a tool call."""
    content: str | list[ShownPart]
    """A text, or parts; a file replaces `data`."""
    tool_calls: list[ShownCall] | None = None
    """Tool calls of the message."""
    tool_call_id: str | None = None


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
        raise PydanticCustomError("user_message", "at least one message must have the role 'user'")
    _check_calls(value)
    asking = [message.role for message in value if message.role != "system"]
    if asking[-1] == "assistant" or (users > 1 and value[-1].role == "system"):
        raise PydanticCustomError(
            "last_user_message",
            "the last message must have the role 'user', or 'tool' after a tool call",
        )
    return value


def _check_calls(messages: list[InputMessage]) -> None:
    """Check that the messages after tool calls answer the calls in the calls' order."""
    unanswered: list[str] = []
    for number, message in enumerate(messages):
        if message.role == "tool":
            if not unanswered or unanswered.pop(0) != message.tool_call_id:
                raise PydanticCustomError(
                    "tool_call_id",
                    "message {number} must answer the oldest tool call without an answer",
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
    """Id of the file, which parts of messages use."""
    name: str | None
    """Name of the file; null: the file has no name."""
    size: int
    """Size in bytes."""
    sha256: str
    """SHA-256 of the bytes, in hexadecimal."""
    media_type: str
    """Media type that the server found in the bytes."""
    tokens: int
    """Estimate of the file's tokens in a prompt."""
    session_id: str | None
    """The session to which the file belongs; the file is deleted with it; null: no session."""
    created_at: datetime
    """Time of the upload."""


_Said = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=500)]], Field(max_length=10)
]
_GOALS = "Goals that the input does not name. Models read them word for word."
_CONSTRAINTS = "Rules for the work. Models read them word for word."
_CRITERIA = "Signs of a good result. Models read them word for word; nothing checks them."


class Demands(Body):
    """Goals, constraints and criteria that a run has in addition to its input."""

    goals: Annotated[_Said, Field(description=_GOALS)] = Field(default_factory=list)
    constraints: Annotated[_Said, Field(description=_CONSTRAINTS)] = Field(default_factory=list)
    success_criteria: Annotated[_Said, Field(description=_CRITERIA)] = Field(default_factory=list)


class ShownDemands(Answer):
    """Goals, constraints and criteria of a run, as they are in the request for the run."""

    shows = Demands

    goals: list[str] = Field(default_factory=list)
    constraints: list[str] = Field(default_factory=list)
    success_criteria: list[str] = Field(default_factory=list)
