"""Rows that a page of a list reads: as many in the middle of a long list as at its ends."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from bottega.db.pages import PageItems
from bottega.db.pool import AsyncConnection, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.files import store as files
from bottega.runs import interrupts, read, sessions
from bottega.tenants import audit
from tests.many import fill, rows_read

_MANY = 3000
_PAGE = 20

Read = Callable[..., Awaitable[PageItems[Any]]]


async def _runs(tx: AsyncConnection, tenant: UUID, **more: Any) -> PageItems[Any]:
    return await read.page(tx, tenant, read.RunFilter(), full=False, **more)


async def _sessions(tx: AsyncConnection, tenant: UUID, **more: Any) -> PageItems[Any]:
    filters = sessions.SessionFilter(user=more.pop("user", None))
    return await sessions.page(tx, tenant, filters, by_time=False, **more)


_LISTS: dict[str, tuple[Read, str, dict[str, Any]]] = {
    "runs": (_runs, "id FROM runs", {}),
    "interrupts": (interrupts.page, "created_at, id FROM interrupts", {"filters": {}}),
    "decisions": (
        interrupts.page,
        "resolved_at, id FROM interrupts WHERE resolved_at IS NOT NULL",
        {"filters": {"status": "resolved"}, "by_decision": True},
    ),
    "deliveries": (read.deliveries_page, "run_id, seq FROM webhooks", {"filters": {}}),
    "audit": (audit.page, "id FROM audit_log", {}),
    "files": (files.page, "id FROM files", {"session_id": None}),
    "sessions": (_sessions, "id FROM sessions", {}),
}


@pytest.fixture(scope="module")
async def owner(module_database_url: str) -> AsyncIterator[asyncpg.Pool]:
    """The owner of a database with long lists, which the tests only read."""
    async with asyncpg.create_pool(module_database_url, min_size=0) as pool:
        await fill(pool, DEFAULT_TENANT, _MANY)
        yield pool


@pytest.fixture
async def tx(owner: asyncpg.Pool, module_database_url: str) -> AsyncIterator[AsyncConnection]:
    async with (
        open_database(module_database_url) as database,
        database.begin(DEFAULT_TENANT) as tx,
    ):
        yield tx


async def _read(tx: AsyncConnection) -> int:
    return await rows_read(tx.driver)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("name", _LISTS)
async def test_a_page_in_the_middle_reads_its_own_rows(
    tx: AsyncConnection, owner: asyncpg.Pool, name: str, descending: bool
) -> None:
    page, places, about = _LISTS[name]
    order = places.partition(" FROM ")[0]
    rows = await owner.fetch(f"SELECT {places} ORDER BY {order}")
    for number in (None, _MANY // 2):
        row = None if number is None else rows[number]
        after = row if row is None else row[0] if len(row) == 1 else tuple(row)
        before = await _read(tx)
        more = {"after": after, "descending": descending, "limit": _PAGE}
        found = await page(tx, DEFAULT_TENANT, **about, **more)
        assert len(found) == _PAGE
        assert found.more
        assert await _read(tx) - before <= 6 * _PAGE


@pytest.mark.parametrize(
    ("page", "about"),
    [
        (interrupts.page, {"filters": {"status": "pending"}}),
        (interrupts.page, {"filters": {"session_id": "7"}}),
        (read.deliveries_page, {"filters": {"status": "pending"}}),
        (files.page, {"session_id": "7"}),
        (files.page, {"session_id": None, "user": "7"}),
        (_sessions, {"user": "7"}),
    ],
)
async def test_a_page_of_few_reads_no_others(
    tx: AsyncConnection, page: Read, about: dict[str, Any]
) -> None:
    found = await page(tx, DEFAULT_TENANT, **about, after=None, descending=True, limit=_PAGE)
    assert len(found) == 1
    assert await _read(tx) <= 2 * _PAGE
