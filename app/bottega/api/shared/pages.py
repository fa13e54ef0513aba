"""Pages of lists: ``limit``, ``order``, and an opaque ``cursor`` for the next page.

A page ends early if its items exceed ``PAGE_BYTES``, see :mod:`bottega.db.pages`.
"""

import asyncio
import binascii
import functools
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from fastapi import Query, Request, Response
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError, from_json, to_json

from bottega.api.schemas.base import UserName, check_storable
from bottega.db.pages import PageItems
from bottega.errors import InvalidInputError

_SLICE = 8
"""Items of a page that are encoded without a break for other requests."""
LINK = 'The next page, as `<path>; rel="next"`; absent on the last.'


class Window(TypedDict):
    """The part of a list that a page shows; ``after``: a place, see :meth:`PageQuery.place`."""

    after: Any
    descending: bool
    limit: int


class PageQuery(BaseModel):
    """Query parameters of every list."""

    limit: Annotated[int, Field(ge=1, le=200, description="Items on a page.")] = 50
    cursor: Annotated[
        str | None, Field(max_length=500, description="`next_cursor` of the page before.")
    ] = None
    order: Annotated[
        Literal["asc", "desc"],
        Field(description="`asc`: oldest first, or by name; `desc`: the reverse."),
    ] = "asc"

    @property
    def descending(self) -> bool:
        return self.order == "desc"

    def place(self, kind: Any) -> Any:
        """Return the place in the cursor, checked to be of the list's type.

        Raises:
            InvalidInputError: ``invalid_cursor``: malformed, or of another list.
        """
        if self.cursor is None:
            return None
        try:
            order, value = from_json(urlsafe_b64decode(self.cursor.encode() + b"=="))
            if order != self.order:
                raise ValueError
            check_storable(value)
            found = TypeAdapter(kind).validate_python(value, strict=False)
            if isinstance(found, int) and not 0 <= found <= 2**31 - 1:  # a column's integer
                raise ValueError
            return found
        except (
            PydanticCustomError,
            OverflowError,
            ValueError,
            TypeError,
            binascii.Error,
            ValidationError,
            UnicodeError,
        ):
            raise InvalidInputError(
                "this cursor is not of this list: pass the next_cursor of its previous page, "
                "with the same order",
                code="invalid_cursor",
            ) from None

    def window(self, kind: Any) -> Window:
        """Return the part of a list that is asked for.

        Raises:
            InvalidInputError: ``invalid_cursor``, see :meth:`place`.
        """
        return {"after": self.place(kind), "descending": self.descending, "limit": self.limit}

    def page(
        self,
        request: Request,
        response: Response,
        found: PageItems[Any],
        place: Callable[[Any], Any],
    ) -> dict[str, Any]:
        """Return the response for a page's items.

        Args:
            place: maps an item to the place that a cursor holds.
        """
        if not found.more:
            return {"items": found, "next_cursor": None}
        raw = to_json([self.order, place(found[-1])])
        cursor = urlsafe_b64encode(raw).decode().rstrip("=")
        link = request.url.include_query_params(cursor=cursor)
        response.headers["Link"] = f'<{link.path}?{link.query}>; rel="next"'
        return {"items": found, "next_cursor": cursor}


async def encoded_page(page: dict[str, Any], item: type[BaseModel], of: Response) -> Response:
    """Return the response for a page whose items are large: encode them a few at a time.

    FastAPI encodes a page at once, which holds the event loop for milliseconds.

    Args:
        page: of :meth:`PageQuery.page`.
        item: schema of an item.
        of: response with the headers to send.
    """
    adapter = _adapter(item)
    parts: list[bytes] = []
    for first in range(0, len(page["items"]), _SLICE):
        some = adapter.validate_python(page["items"][first : first + _SLICE])
        parts.append(adapter.dump_json(some)[1:-1])
        await asyncio.sleep(0)
    cursor = to_json(page["next_cursor"])
    body = b'{"items":[%b],"next_cursor":%b}' % (b",".join(parts), cursor)
    return Response(body, headers=dict(of.headers), media_type="application/json")


@functools.cache
def _adapter(item: type[BaseModel]) -> TypeAdapter[list[Any]]:
    return TypeAdapter(list[item])  # type: ignore[valid-type]


class ViewQuery(PageQuery):
    """Query parameters of a list whose items have bodies."""

    view: Annotated[
        Literal["summary", "full"],
        Field(description="`full`: items with their bodies; `summary`: without."),
    ] = "summary"

    @property
    def full(self) -> bool:
        return self.view == "full"


def merged(
    page: PageItems[dict[str, Any]],
    others: Sequence[dict[str, Any]],
    after: str | None,
    limit: int,
    order: Sequence[str],
) -> PageItems[dict[str, Any]]:
    """Return a page with those of the other items that belong on it. Pure.

    Args:
        order: all names, in the order of the list.
    """
    place = {name: number for number, name in enumerate(order)}
    first = -1 if after is None else place[after]
    last = place[page[-1]["name"]] if page.more else len(order)
    found = {each["name"]: each for each in others if first < place[each["name"]] < last}
    found |= {each["name"]: each for each in page}
    items = sorted(found.values(), key=lambda item: place[item["name"]])
    return PageItems(items[:limit], more=page.more or len(items) > limit)


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


_BREAKS = {
    "\N{NEXT LINE}".encode(): rb"\u0085",
    "\N{LINE SEPARATOR}".encode(): rb"\u2028",
    "\N{PARAGRAPH SEPARATOR}".encode(): rb"\u2029",
}
"""Characters that many readers take for an end of line, and how JSON escapes them."""


async def escaped_lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield chunks of JSON, each of whole characters, in which only line feeds end lines.

    Closes ``chunks`` with itself: a reader that is cut off must not stay a reader.
    """
    try:
        async for chunk in chunks:
            if not chunk.isascii():
                for character, escape in _BREAKS.items():
                    chunk = chunk.replace(character, escape)
            yield chunk
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()
