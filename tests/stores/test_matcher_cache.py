"""A process's cache of patterns, and its notices about changes by other processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID, uuid4

import asyncpg
import pytest

from bottega.clock import utcnow
from bottega.db.pool import Database, acting_as, open_database
from bottega.db.tables import DEFAULT_TENANT
from bottega.events.listener import NotifyListener
from bottega.memory.patterns.cache import PatternCache
from bottega.memory.patterns.pattern import Category, Content, ContentKind, Pattern, PatternState
from bottega.memory.patterns.store import CHANNEL, PatternStore
from bottega.services import background
from tests.waiting import until

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
WITHIN_S = 20


@asynccontextmanager
async def hearing(database: Database) -> AsyncIterator[PatternCache]:
    """Yield a cache that listens for changes from now on."""
    await database.trust.signals.sent()
    listener = NotifyListener(database.connect)
    cache = PatternCache(database.pool, listener, utcnow)
    async with background(listener.run):
        await until_listening(cache)
        yield cache


async def until_listening(cache: PatternCache, *, is_listening: bool = True) -> None:
    async with asyncio.timeout(WITHIN_S):
        await until(lambda: cache.listener.hears(CHANNEL) is is_listening)


async def add(
    database: Database, state: str = "VALIDATED", tenant: UUID = DEFAULT_TENANT, name: str = "one"
) -> UUID:
    """Write a pattern as another process does."""
    content = Content(ContentKind.HEURISTIC, {"action": str(uuid4())})
    new = Pattern(name, Category.STRATEGIC, content)
    async with acting_as(database.pool, tenant) as connection:
        store = PatternStore(connection, tenant, NOW)
        stored = (await store.add(new)).key
        await connection.execute("UPDATE patterns SET state = $2 WHERE id = $1", stored, state)
        await store.notify()
    return stored


async def found(cache: PatternCache, tenant: UUID = DEFAULT_TENANT) -> list[UUID]:
    return [each.pattern.key for each in (await cache.matcher(tenant)).find({}, now=NOW)]


async def until_found(cache: PatternCache, expected: list[UUID]) -> None:
    async with asyncio.timeout(WITHIN_S):
        await until(lambda: found(cache), lambda seen: seen == expected)


async def test_a_matcher_is_loaded_once_with_the_live_patterns(database: Database) -> None:
    live = [await add(database), await add(database, "CANDIDATE")]
    for state in (PatternState.IN_REVIEW, PatternState.DEPRECATED):
        await add(database, state)
    async with hearing(database) as cache:
        first, second = await asyncio.gather(*(cache.matcher(DEFAULT_TENANT) for _ in range(2)))
        assert first is second is await cache.matcher(DEFAULT_TENANT)
        assert len(first) == 2
        assert [
            each.pattern.key for each in first.ranked(PatternState.CANDIDATE, {}, now=NOW)
        ] == live[1:]
        assert await found(cache) == live[:1]


async def test_a_change_by_another_process_is_noticed(
    database: Database, database_url: str
) -> None:
    async with hearing(database) as cache, open_database(database_url) as other:
        assert await found(cache) == []
        first = await add(other)
        await until_found(cache, [first])
        async with acting_as(other.pool, DEFAULT_TENANT) as connection:
            await connection.execute("UPDATE patterns SET state = 'IN_REVIEW'")
            await cache.store(connection, DEFAULT_TENANT).notify()
        await until_found(cache, [])


async def test_a_change_concerns_one_tenant(database: Database, owner: asyncpg.Pool) -> None:
    tenant = uuid4()
    await owner.execute("INSERT INTO tenants (id, name) VALUES ($1, 'other')", tenant)
    theirs = await add(database, tenant=tenant)
    async with hearing(database) as cache:
        kept = await cache.matcher(tenant)
        mine = await add(database)
        await until_found(cache, [mine])
        assert await cache.matcher(tenant) is kept
        assert await found(cache, tenant) == [theirs]


async def test_nothing_is_cached_while_the_listener_is_disconnected(
    database: Database, owner: asyncpg.Pool
) -> None:
    async with hearing(database) as cache:
        kept = await cache.matcher(DEFAULT_TENANT)
        await owner.execute("""
            SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND query LIKE 'LISTEN %'
        """)
        await until_listening(cache, is_listening=False)
        assert await cache.matcher(DEFAULT_TENANT) is not await cache.matcher(DEFAULT_TENANT)
        await until_listening(cache)
        assert await cache.matcher(DEFAULT_TENANT) is not kept


async def test_a_process_that_does_not_listen_reads_each_time(database: Database) -> None:
    cache = PatternCache(database.pool, NotifyListener(database.connect), utcnow)
    assert await found(cache) == []
    added = await add(database)
    assert await found(cache) == [added]


async def test_a_change_during_loading_is_not_missed(database: Database) -> None:
    async with hearing(database) as cache:
        loading = asyncio.ensure_future(cache.matcher(DEFAULT_TENANT))
        await until(lambda: cache._loading)
        cache.forget(DEFAULT_TENANT)
        old = await loading
        assert await cache.matcher(DEFAULT_TENANT) is not old


async def test_a_database_that_fails_is_asked_again(
    database: Database, owner: asyncpg.Pool
) -> None:
    async with hearing(database) as cache:
        await owner.execute("ALTER TABLE patterns RENAME TO elsewhere")
        with pytest.raises(asyncpg.UndefinedTableError):
            await cache.matcher(DEFAULT_TENANT)
        await owner.execute("ALTER TABLE elsewhere RENAME TO patterns")
        assert await found(cache) == []


async def test_loading_goes_on_when_its_caller_is_cancelled(database: Database) -> None:
    async with hearing(database) as cache:
        loading = asyncio.ensure_future(cache.matcher(DEFAULT_TENANT))
        await until(lambda: cache._loading)
        loading.cancel()
        async with asyncio.timeout(WITHIN_S):
            await until(lambda: cache._matchers)
