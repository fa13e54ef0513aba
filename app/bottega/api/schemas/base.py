"""Base classes of all bodies: strict types, no unknown fields, storable text, size limits."""

import math
import unicodedata
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import (
    AfterValidator,
    AliasPath,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from typing_extensions import is_typeddict

from bottega.events import data
from bottega.json_schema.described import DescribedModel, described
from bottega.json_schema.values import WHOLE

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
    level, depth, seen = [value], 1, 0
    while level:
        seen += len(level)
        if seen > MAX_VALUES:
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
