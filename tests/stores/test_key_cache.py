"""The API process's cache of keys: lifetime and cost."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from bottega.db.pool import Database
from bottega.errors import UnavailableError
from bottega.events.listener import NotifyListener
from bottega.services import background
from bottega.tenants import keys
from bottega.tenants.keys import BELIEVED_S, KeyCache
from tests.tenants import ApiKey, holder
from tests.waiting import until

UNKNOWN = "btg_aaaaaaaa_" + "A" * 43
# A look-up of this unknown key waits until the test releases a lock.
SLOW_FOR_STRANGERS = """
CREATE OR REPLACE FUNCTION find_key(p_hash bytea)
RETURNS TABLE (tenant_id uuid, id uuid, prefix text, scopes text[], expires_at timestamptz,
               require_user boolean, limits jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT k.tenant_id, k.id, k.prefix, k.scopes, k.expires_at, k.require_user, k.limits
    FROM api_keys k
    WHERE k.key_hash = p_hash AND k.revoked_at IS NULL;
    IF NOT FOUND THEN
        PERFORM pg_advisory_xact_lock_shared(42);
    END IF;
END $$
"""


class Time:
    """A monotonic clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def ring(database: Database, time: Time) -> KeyCache:
    """A key ring without a background task: it asks only when called."""
    return KeyCache(database.pool, NotifyListener(database.connect), local=True, ticks=time)


@pytest.fixture
async def held(database_url: str) -> ApiKey:
    return await holder(database_url)


async def revoke(owner: asyncpg.Pool, held: ApiKey) -> None:
    await owner.execute("UPDATE api_keys SET revoked_at = now() WHERE id = $1", held.key_id)


@pytest.fixture
async def strangers_wait(owner: asyncpg.Pool) -> AsyncIterator[None]:
    await owner.execute(SLOW_FOR_STRANGERS)
    async with owner.acquire() as connection:
        await connection.execute("SELECT pg_advisory_lock(42)")
        yield
        await connection.execute("SELECT pg_advisory_unlock(42)")


async def test_a_key_is_cached_for_seconds_only(
    ring: KeyCache, time: Time, held: ApiKey, owner: asyncpg.Pool
) -> None:
    found = await ring.find(held.key)
    assert found is not None
    assert (found.tenant_id, found.id, found.scopes) == (held.tenant_id, held.key_id, ["admin"])
    await revoke(owner, held)
    time.now += BELIEVED_S
    assert await ring.find(held.key) == found
    time.now += 0.01
    assert await ring.find(held.key) is None
    assert BELIEVED_S < 5


async def test_a_partial_key_is_invalid(ring: KeyCache, held: ApiKey) -> None:
    assert await ring.find(held.key) is not None
    for wrong in (held.key[:-1], f"{held.key}x", held.key.swapcase(), held.prefix, UNKNOWN):
        assert await ring.find(wrong) is None


async def test_a_used_key_is_refreshed_in_the_background(
    database: Database, time: Time, held: ApiKey, owner: asyncpg.Pool
) -> None:
    ring = KeyCache(
        database.pool, NotifyListener(database.connect), local=True, ticks=time, refresh_s=0.01
    )
    async with background(ring.run):
        assert await ring.find(held.key) is not None
        await owner.execute("UPDATE api_keys SET scopes = '{read}' WHERE id = $1", held.key_id)
        await until(
            lambda: ring.find(held.key),
            lambda found: found is not None and found.scopes == ["read"],
        )
        await revoke(owner, held)
        # Though the clock stands still.
        await until(lambda: ring.find(held.key), lambda found: found is None)


async def test_watchers_of_a_key_are_notified(
    database: Database, held: ApiKey, owner: asyncpg.Pool
) -> None:
    ring = KeyCache(database.pool, NotifyListener(database.connect), local=False, refresh_s=0.01)
    other = await holder(str(database.url), "umbrella")
    told: asyncio.Queue[str] = asyncio.Queue()
    async with background(ring.run):
        with (
            ring.watching((held.tenant_id, held.key_id), lambda: told.put_nowait("held")),
            ring.watching((other.tenant_id, other.key_id), lambda: told.put_nowait("other")),
        ):
            await revoke(owner, held)
            assert await told.get() == "held"
            await owner.execute(
                "UPDATE api_keys SET expires_at = now() - interval '1 s' WHERE id = $1",
                other.key_id,
            )
            while await told.get() != "other":
                pass


async def test_a_server_is_open_only_until_the_first_key(
    ring: KeyCache, time: Time, database_url: str, owner: asyncpg.Pool
) -> None:
    assert await ring.is_open()
    await holder(database_url)
    time.now += BELIEVED_S + 0.01
    assert not await ring.is_open()
    await owner.execute("DELETE FROM api_keys")
    time.now += BELIEVED_S + 0.01
    assert not await ring.is_open()
    # It is closed in other processes as well.
    assert await owner.fetchval("SELECT EXISTS (SELECT FROM first_key)")


async def test_clients_admitted_during_closing_are_notified(
    database: Database, database_url: str
) -> None:
    ring = KeyCache(database.pool, NotifyListener(database.connect), local=True, refresh_s=0.01)
    told = asyncio.Event()
    async with background(ring.run):
        assert await ring.is_open()
        await holder(database_url)
        await until(lambda: not ring.may_be_open)
        with ring.watching(None, told.set):
            await told.wait()


async def test_a_server_that_others_can_reach_is_never_open(database: Database) -> None:
    ring = KeyCache(database.pool, NotifyListener(database.connect), local=False)
    assert not await ring.is_open()


async def test_without_the_database_every_key_is_refused(
    database: Database, time: Time, held: ApiKey, database_url: str
) -> None:
    opened = KeyCache(database.pool, NotifyListener(database.connect), local=True, ticks=time)
    ring = KeyCache(database.pool, NotifyListener(database.connect), local=False, ticks=time)
    assert await ring.find(held.key) is not None
    opened._open_seen_at = time.now  # as if there were no key yet
    await database.pool.close()
    assert await ring.find(held.key) is not None
    assert await opened.is_open()
    time.now += BELIEVED_S + 0.01
    for asking in (ring.find(held.key), ring.find(UNKNOWN), opened.is_open()):
        with pytest.raises(asyncpg.InterfaceError):
            await asking


async def test_unknown_keys_delay_no_valid_key(
    ring: KeyCache, time: Time, held: ApiKey, owner: asyncpg.Pool, strangers_wait: None
) -> None:
    assert await ring.find(held.key) is not None
    unknown_keys = [asyncio.ensure_future(ring.find(f"{UNKNOWN}{n}")) for n in range(50)]
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    await until(lambda: owner.fetchval(waiting), lambda seen: seen >= 2)
    time.now += BELIEVED_S + 0.01  # it must be refreshed
    for _ in range(20):
        assert await ring.find(held.key) is not None
        time.now += BELIEVED_S + 0.01
    assert await owner.fetchval(waiting) == 2
    assert not any(stranger.done() for stranger in unknown_keys)
    for stranger in unknown_keys:
        stranger.cancel()
    await asyncio.gather(*unknown_keys, return_exceptions=True)


async def test_too_many_unknown_keys_are_refused(
    ring: KeyCache, strangers_wait: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_STRANGERS_WAITING", 5)
    unknown_keys = [asyncio.ensure_future(ring.find(f"{UNKNOWN}{n}")) for n in range(6)]
    done, waiting = await asyncio.wait(unknown_keys, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    with pytest.raises(UnavailableError):
        await done.pop()
    for stranger in waiting:
        stranger.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_refused_key_is_cached(ring: KeyCache, time: Time, owner: asyncpg.Pool) -> None:
    assert await ring.find(UNKNOWN) is None
    assert ring._refused.maxsize == keys._MOST_KEYS
    await owner.execute("DROP FUNCTION find_key")
    assert await ring.find(UNKNOWN) is None  # it is cached
    with pytest.raises(asyncpg.UndefinedFunctionError):
        await ring.find(f"{UNKNOWN}0")
    time.now += 3
    with pytest.raises(asyncpg.UndefinedFunctionError):
        await ring.find(UNKNOWN)


async def test_concurrent_look_ups_share_one_query(
    ring: KeyCache, held: ApiKey, owner: asyncpg.Pool
) -> None:
    await owner.execute("CREATE SEQUENCE asked")
    await owner.execute("GRANT USAGE ON SEQUENCE asked TO bottega_system")
    await owner.execute(SLOW_FOR_STRANGERS.replace("BEGIN", "BEGIN PERFORM nextval('asked');"))
    found = await asyncio.gather(*(ring.find(held.key) for _ in range(100)))
    assert None not in found
    assert await owner.fetchval("SELECT last_value FROM asked") == 1
