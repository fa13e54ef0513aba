"""Query parameters that several lists have."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from fastapi import Query
from pydantic import AfterValidator, Field, StringConstraints

from bottega.api.schemas.base import UserName, check_storable

T = TypeVar("T")

Seq = Annotated[int, Field(ge=0, le=2**62)]
MessagePart = Annotated[int, Field(ge=0, le=10_000)]


def storable(value: T) -> T:
    """Return a value that the database can store.

    Raises:
        PydanticCustomError: see :func:`check_storable`.
    """
    check_storable(value)
    return value


QueriedUser = Annotated[
    UserName | None,
    AfterValidator(storable),
    Field(description="Only this user's. A key that must name a user needs it."),
]
OwnerNamed = Annotated[
    UserName | None,
    AfterValidator(storable),
    Query(
        description="The user that this acts for; 409 `session_user` if it belongs to another one, "
        "or to none. Without it is not compared, unless the key must name a user."
    ),
]
MetadataPairs = Annotated[
    list[Annotated[str, StringConstraints(pattern=r"^[^:]{1,64}:.{0,200}$")]],
    AfterValidator(storable),
    Field(
        default_factory=list,
        max_length=5,
        description=(
            "`key:value`, up to five times: only those with all of these in their metadata. A "
            "value may be a text, or a number, `true`, `false` or `null`."
        ),
    ),
]


def pairs_of(entries: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs that such parameters spell."""
    pairs = [entry.partition(":") for entry in entries]
    return [(key, value) for key, _, value in pairs]
