"""Pages of lists, bounded by items and by bytes; rows are measured within the database."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import Select, Text, cast, func, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

T = TypeVar("T")

PAGE_BYTES = 1024 * 1024
"""Of a page's rows as text. One larger row is a page of its own."""
_ROW_BYTES = 1000
"""Added to each row, for the names of its fields in JSON."""
_MEASURES = ("page_rows", "page_row", "page_bytes")


class Part(list[T]):
    """The items of a page.

    Attributes:
        more: others follow.
    """

    def __init__(self, items: Iterable[T] = (), *, more: bool) -> None:
        super().__init__(items)
        self.more = more


async def fetch_page(
    connection: AsyncConnection, query: Select[Any], limit: int
) -> Part[dict[str, Any]]:
    """Fetch the first rows of an ordered query: ``limit`` at most, and as many as fit in a page."""
    page = query.limit(limit + 1).subquery("page")
    size = func.octet_length(cast(literal_column("page"), Text)) + _ROW_BYTES
    measured = select(
        page,
        func.count().over().label("page_rows"),
        func.row_number().over().label("page_row"),
        func.sum(size).over(rows=(None, 0)).label("page_bytes"),
    ).subquery("measured")
    fits = or_(measured.c.page_row == 1, measured.c.page_bytes <= PAGE_BYTES)
    rows = (await connection.execute(select(measured).where(fits))).mappings().all()
    return _part(rows, limit)


async def fetch_rows(
    connection: asyncpg.Connection, query: str, *arguments: Any, limit: int
) -> Part[dict[str, Any]]:
    """Do the same with SQL and its arguments; the last parameter, a ``LIMIT``, is added."""
    measured = f"""
        SELECT * FROM (
            SELECT page.*, count(*) OVER () AS page_rows, row_number() OVER () AS page_row,
                   sum(octet_length(page::text) + {_ROW_BYTES})
                       OVER (ROWS UNBOUNDED PRECEDING) AS page_bytes
            FROM ({query}) AS page
        ) AS measured WHERE page_row = 1 OR page_bytes <= {PAGE_BYTES}
    """  # noqa: S608 (texts of ours)
    return _part(await connection.fetch(measured, *arguments, limit + 1), limit)


def _part(rows: Sequence[Any], limit: int) -> Part[dict[str, Any]]:
    there = rows[0]["page_rows"] if rows else 0
    items = [
        {name: value for name, value in row.items() if name not in _MEASURES}
        for row in rows[:limit]
    ]
    return Part(items, more=there > len(items))
