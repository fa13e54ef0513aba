"""Pages of lists, with ``limit``, ``order``, and an opaque ``cursor`` for the next page.

A page has fewer items than ``limit`` if more items would exceed ``PAGE_BYTES``; see
:mod:`bottega.db.pages`.
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
    ConfigDict,
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
"""Number of items that are encoded without a pause; then other requests may run."""
LINK = 'The next page, as `<path>; rel="next"`; absent on the last page.'


class Window(TypedDict):
    """The limits of a page in a list; ``after`` is the result of :meth:`PageQuery.place`."""

    after: Any
    descending: bool
    limit: int


class PageQuery(BaseModel):
    model_config = ConfigDict(defer_build=True)

    limit: Annotated[int, Field(ge=1, le=200, description="Items on a page.")] = 50
    cursor: Annotated[
        str | None, Field(max_length=500, description="`next_cursor` of the previous page.")
    ] = None
    order: Annotated[
        Literal["asc", "desc"],
        Field(description="`asc`: oldest first, or by name; `desc`: the reverse."),
    ] = "asc"

    @property
    def descending(self) -> bool:
        return self.order == "desc"

    def place(self, kind: Any) -> Any:
        """Return the cursor's position, of type ``kind``; ``None``: the request has no cursor.

        Raises:
            InvalidInputError: ``invalid_cursor``: the cursor is malformed, or was made for a
                different list.
        """
        if self.cursor is None:
            return None
        try:
            order, value = from_json(urlsafe_b64decode(self.cursor.encode() + b"=="))
            if order != self.order:
                raise ValueError
            check_storable(value)
            key = TypeAdapter(kind).validate_python(value, strict=False)
            # Integer columns of the database have this range.
            if isinstance(key, int) and not 0 <= key <= 2**31 - 1:
                raise ValueError
            return key
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
                "this cursor does not belong to this list: send the next_cursor of the list's "
                "previous page, with the same order",
                code="invalid_cursor",
            ) from None

    def window(self, kind: Any) -> Window:
        """Return the limits of the page that the request wants.

        Raises:
            InvalidInputError: ``invalid_cursor``, see :meth:`place`.
        """
        return {"after": self.place(kind), "descending": self.descending, "limit": self.limit}

    def page(
        self,
        request: Request,
        response: Response,
        rows: PageItems[Any],
        key_of: Callable[[Any], Any],
    ) -> dict[str, Any]:
        """Return the response for a page's items.

        Args:
            key_of: a function that returns an item's position, which the cursor stores.
        """
        if not rows.more:
            return {"items": rows, "next_cursor": None}
        raw = to_json([self.order, key_of(rows[-1])])
        cursor = urlsafe_b64encode(raw).decode().rstrip("=")
        link = request.url.include_query_params(cursor=cursor)
        response.headers["Link"] = f'<{link.path}?{link.query}>; rel="next"'
        return {"items": rows, "next_cursor": cursor}


async def encoded_page(page: dict[str, Any], item: type[BaseModel], of: Response) -> Response:
    """Return the response for a page with large items; the event loop runs after every few items.

    FastAPI would encode the whole page at once, which would stop the event loop for milliseconds.

    Args:
        page: the result of :meth:`PageQuery.page`.
        item: schema of an item.
        of: a response; the returned response gets its headers.
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
        Field(description="`full`: items with their bodies; `summary`: items without bodies."),
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
    """Add the items of another source to a page, in the order of names. Pure.

    Args:
        others: items that come from a different source than the page's items. If both sources have
            an item with the same name, the result has the page's item.
        order: names of all items, in the order of the list.
    """
    positions = {name: number for number, name in enumerate(order)}
    first = -1 if after is None else positions[after]
    last = positions[page[-1]["name"]] if page.more else len(order)
    found = {each["name"]: each for each in others if first < positions[each["name"]] < last}
    found |= {each["name"]: each for each in page}
    items = sorted(found.values(), key=lambda item: positions[item["name"]])
    return PageItems(items[:limit], more=page.more or len(items) > limit)


T = TypeVar("T")

Seq = Annotated[int, Field(ge=0, le=2**62)]
MessagePart = Annotated[int, Field(ge=0, le=10_000)]


def storable(value: T) -> T:
    """Return the value if the database can store it.

    Raises:
        PydanticCustomError: the database cannot store the value; see :func:`check_storable`.
    """
    check_storable(value)
    return value


QueriedUser = Annotated[
    UserName | None,
    AfterValidator(storable),
    Field(description="Only items of this user. Required if the key must name a user."),
]
OwnerNamed = Annotated[
    UserName | None,
    AfterValidator(storable),
    Query(
        description=(
            "The user that the request acts for. 409 `session_user`: the changed resource belongs "
            "to another user, or to no user. Without it, owners are not compared. Required if the "
            "key must name a user."
        )
    ),
]
MetadataPairs = Annotated[
    list[Annotated[str, StringConstraints(pattern=r"^[^:]{1,64}:.{0,200}$")]],
    AfterValidator(storable),
    Field(
        default_factory=list,
        max_length=5,
        description=(
            "`key:value`, up to five times: only items whose metadata has all these pairs. A "
            "value may be a text, a number, `true`, `false` or `null`."
        ),
    ),
]


def pairs_of(entries: Sequence[str]) -> list[tuple[str, str]]:
    """Split parameters of the form ``key:value``."""
    pairs = [entry.partition(":") for entry in entries]
    return [(key, value) for key, _, value in pairs]


_BREAKS = {
    "\N{NEXT LINE}".encode(): rb"\u0085",
    "\N{LINE SEPARATOR}".encode(): rb"\u2028",
    "\N{PARAGRAPH SEPARATOR}".encode(): rb"\u2029",
}
"""Characters that many readers treat as the end of a line, with their escapes in JSON."""


async def escaped_lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Escape all line breaks except line feeds in chunks of JSON, each with whole characters.

    Closing this generator also closes ``chunks``, which frees the source after a disconnect.
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
