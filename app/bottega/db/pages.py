"""Pages of lists, with a limited number of items and a limited size in bytes."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    or_,
    select,
    text,
    tuple_,
)
from sqlalchemy.sql.selectable import LateralFromClause

from bottega.db.pool import AsyncConnection

T = TypeVar("T")
Query = TypeVar("Query", bound=Select[Any])

FIRST_PLACE = (datetime.min.replace(tzinfo=UTC), UUID(int=0))
"""Position before all rows of a list by time and id."""
PAGE_BYTES = 512 * 1024
"""Maximum size of a page's rows as text, in bytes. A larger row is alone on its page."""
_ROW_BYTES = 1000
"""Bytes that are added to each row's size, for the field names in JSON."""
MOST_SKEW = timedelta(hours=1)
"""Longest time from a row's ``created_at`` to the time in the row's id (UUIDv7)."""
_MEASURES = ("page_rows", "page_row", "page_bytes")
_MOST = "page_most"
_BYTES = "page_bytes_most"
# The planner expects few rows of a tenant, so it would read and sort all of them for each page. If
# sorts are switched off, the planner reads the rows by an index.
_BY_INDEX = "SELECT set_config('enable_sort', 'off', true)"


class PageItems(list[T]):
    """The items of a page.

    Attributes:
        more: true if more items follow.
    """

    def __init__(self, items: Iterable[T] = (), *, more: bool) -> None:
        super().__init__(items)
        self.more = more


def paged(query: Query, *columns: ColumnElement[Any], after: Any, descending: bool) -> Query:
    """Return a query that is sorted by columns. Together, the columns' values must be unique.

    Args:
        after: the columns' values in the last row of the previous page (for one column, only the
            value); ``None``: begin with the first row.
    """
    if after is not None:
        single = len(columns) == 1
        place: Any = columns[0] if single else tuple_(*columns)
        there: Any = after if single else tuple_(*after)
        query = query.where(place < there if descending else place > there)
    return query.order_by(*(each.desc() if descending else each for each in columns))


def lateral_rows(table: Table, which: ColumnElement[bool], *columns: str) -> LateralFromClause:
    """Return a lateral subquery with columns of the table's rows that meet ``which``.

    PostgreSQL reads these rows by index for each row of the outer query. A plain join might compare
    all rows of the tenant with each other.
    """
    own = select(*(table.c[name] for name in columns)).where(which).correlate_except(table)
    return own.offset(literal_column("0")).lateral(f"of_{table.name}")


def measured(query: Select[Any]) -> Select[Any]:
    """Limit a sorted query to the first rows that fit on a page; see :func:`fetch_page`."""
    page = query.limit(bindparam(_MOST, type_=Integer)).subquery("page")
    size = func.octet_length(cast(literal_column("page"), Text)) + _ROW_BYTES
    each = select(
        page,
        func.count().over().label("page_rows"),
        func.row_number().over().label("page_row"),
        func.sum(size).over(rows=(None, 0)).label("page_bytes"),
    ).subquery("measured")
    most = bindparam(_BYTES, type_=BigInteger)
    return select(each).where(or_(each.c.page_row == 1, each.c.page_bytes <= most))


async def fetch_page(
    connection: AsyncConnection,
    query: Select[Any],
    limit: int,
    *,
    by_index: bool = True,
    values: Mapping[str, object] | None = None,
) -> PageItems[dict[str, Any]]:
    """Fetch the first rows of a sorted query, within ``limit`` and the maximum size of a page.

    Args:
        values: parameters of a query that :func:`measured` has returned; ``None``: the query does
            not come from :func:`measured`.
        by_index: true: until the end of the transaction, read rows in the order of an index, so all
            pages cost the same. False: sort the rows; this is cheaper if few rows match.
    """
    if by_index:
        await connection.execute(text(_BY_INDEX))
    if values is None:
        query, values = measured(query), {}
    found = await connection.execute(query, {**values, _MOST: limit + 1, _BYTES: PAGE_BYTES})
    return _part(found.mappings().all(), limit)


async def fetch_rows(
    connection: asyncpg.Connection,
    query: str,
    *arguments: Any,
    limit: int,
    descending: bool = False,
    by_index: bool = False,
) -> PageItems[dict[str, Any]]:
    """Fetch a page by SQL with arguments. The limit is added as the last argument.

    Args:
        query: SQL that sorts by ``{order}``, and compares by ``{than}`` with the previous page's
            last row; the function replaces both.
        by_index: see :func:`fetch_page`.
    """
    than, order = ("<", "DESC") if descending else (">", "ASC")
    query = query.replace("{than}", than).replace("{order}", order)
    if by_index:
        await connection.execute(_BY_INDEX)
    first = f"""
        SELECT * FROM (
            SELECT page.*, count(*) OVER () AS page_rows, row_number() OVER () AS page_row,
                   sum(octet_length(page::text) + {_ROW_BYTES})
                       OVER (ROWS UNBOUNDED PRECEDING) AS page_bytes
            FROM ({query}) AS page
        ) AS measured WHERE page_row = 1 OR page_bytes <= {PAGE_BYTES}
    """  # noqa: S608 (texts of ours)
    return _part(await connection.fetch(first, *arguments, limit + 1), limit)


def _part(rows: Sequence[Any], limit: int) -> PageItems[dict[str, Any]]:
    there = rows[0]["page_rows"] if rows else 0
    items = [
        {name: value for name, value in row.items() if name not in _MEASURES}
        for row in rows[:limit]
    ]
    return PageItems(items, more=there > len(items))


def first_id(moment: datetime) -> UUID:
    """Return a lower bound of all UUIDv7s that are made at or after a moment."""
    return UUID(int=int(moment.timestamp() * 1000) << 80)
