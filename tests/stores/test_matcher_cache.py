"""A process's cache of patterns, and its notices about changes by other processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.db.base import DEFAULT_TENANT
from bottega.db.engine import Database, acting_as, open_database
from bottega.events.listener import NotifyListener
from bottega.events.wakeups import background
from bottega.memory.patterns import rows
from bottega.memory.patterns.matcher_cache import MatcherCache
from bottega.memory.patterns.pattern import Category, Content, ContentKind, Pattern, PatternState
from tests.waiting import until

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
WITHIN_S = 20


@asynccontextmanager
async def hearing(database: Database) -> AsyncIterator[MatcherCache]:
    """Yield matchers that listen for changes."""
    listener = NotifyListener(database.connect)
    matchers = MatcherCache(database.pool, listener)
    async with background(listener.run):
        await until_listening(matchers)
        yield matchers


async def until_listening(matchers: MatcherCache, *, is_listening: bool = True) -> None:
    async with asyncio.timeout(WITHIN_S):
        await until(lambda: matchers.is_listening is is_listening)


async def add(
    database: Database, state: str = "VALIDATED", tenant: UUID = DEFAULT_TENANT, name: str = "one"
) -> UUID:
    """Write a pattern as another process does."""
    new = Pattern(name, Category.STRATEGIC, Content(ContentKind.HEURISTIC))
    async with acting_as(database.pool, tenant) as connection:
        stored = await rows.insert(connection, tenant, new, NOW)
        assert stored is not None
        await connection.execute("UPDATE patterns SET state = $2 WHERE id = $1", stored, state)
        await rows.notify_change(connection, tenant)
    return stored


async def found(matchers: MatcherCache, tenant: UUID = DEFAULT_TENANT) -> list[UUID]:
    return [each.pattern.key for each in (await matchers.of(tenant)).find({}, now=NOW)]


async def until_found(matchers: MatcherCache, expected: list[UUID]) -> None:
    async with asyncio.timeout(WITHIN_S):
        await until(lambda: found(matchers), lambda seen: seen == expected)


async def test_a_matcher_is_loaded_once_with_the_live_patterns(database: Database) -> None:
    live = [await add(database), await add(database, "CANDIDATE")]
    for state in (PatternState.IN_REVIEW, PatternState.DEPRECATED):
        await add(database, state)
    async with hearing(database) as matchers:
        first, second = await asyncio.gather(*(matchers.of(DEFAULT_TENANT) for _ in range(2)))
        assert first is second is await matchers.of(DEFAULT_TENANT)
        assert len(first) == 2
        assert [each.pattern.key for each in first.candidates({}, now=NOW)] == live[1:]
        assert await found(matchers) == live[:1]


async def test_a_change_by_another_process_is_noticed(
    database: Database, database_url: str
) -> None:
    async with hearing(database) as matchers, open_database(database_url) as other:
        assert await found(matchers) == []
        first = await add(other)
        await until_found(matchers, [first])
        async with acting_as(other.pool, DEFAULT_TENANT) as connection:
            await connection.execute("UPDATE patterns SET state = 'IN_REVIEW'")
            await rows.notify_change(connection, DEFAULT_TENANT)
        await until_found(matchers, [])


async def test_a_change_concerns_one_tenant(database: Database, owner: asyncpg.Pool) -> None:
    tenant = uuid4()
    await owner.execute("INSERT INTO tenants (id, name) VALUES ($1, 'other')", tenant)
    theirs = await add(database, tenant=tenant)
    async with hearing(database) as matchers:
        kept = await matchers.of(tenant)
        mine = await add(database)
        await until_found(matchers, [mine])
        assert await matchers.of(tenant) is kept
        assert await found(matchers, tenant) == [theirs]


async def test_nothing_is_cached_while_the_listener_is_disconnected(
    database: Database, owner: asyncpg.Pool
) -> None:
    async with hearing(database) as matchers:
        kept = await matchers.of(DEFAULT_TENANT)
        await owner.execute("""
            SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND query LIKE 'LISTEN %'
        """)
        await until_listening(matchers, is_listening=False)
        assert await matchers.of(DEFAULT_TENANT) is not await matchers.of(DEFAULT_TENANT)
        await until_listening(matchers)
        assert await matchers.of(DEFAULT_TENANT) is not kept


async def test_a_process_that_does_not_listen_reads_each_time(database: Database) -> None:
    matchers = MatcherCache(database.pool, NotifyListener(database.connect))
    assert await found(matchers) == []
    added = await add(database)
    assert await found(matchers) == [added]


async def test_a_change_during_loading_is_not_missed(database: Database) -> None:
    async with hearing(database) as matchers:
        loading = asyncio.ensure_future(matchers.of(DEFAULT_TENANT))
        await until(lambda: matchers._kept)
        matchers.forget(DEFAULT_TENANT)
        old = await loading
        assert await matchers.of(DEFAULT_TENANT) is not old


async def test_a_database_that_fails_is_asked_again(
    database: Database, owner: asyncpg.Pool
) -> None:
    async with hearing(database) as matchers:
        await owner.execute("ALTER TABLE patterns RENAME TO elsewhere")
        with pytest.raises(asyncpg.UndefinedTableError):
            await matchers.of(DEFAULT_TENANT)
        await owner.execute("ALTER TABLE elsewhere RENAME TO patterns")
        assert await found(matchers) == []
