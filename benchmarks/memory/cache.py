"""Hit rate of the cache of hot episodes, for skewed requests."""

import asyncio
import time
from collections import OrderedDict
from datetime import UTC, datetime
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from benchmarks.memory.stage import TENANT
from bottega.memory.episodes.cache import CAPACITY, EpisodeCache
from bottega.memory.episodes.episode import Episode, Outcome, Summary


def shares(episodes: int, exponent: float) -> NDArray[np.float64]:
    """Return the probability of each episode: proportional to rank ** -exponent."""
    weights = np.arange(1, episodes + 1, dtype=np.float64) ** -exponent
    shared: NDArray[np.float64] = weights / weights.sum()
    return shared


def asked(episodes: int, exponent: float, count: int, seed: int) -> NDArray[np.intp]:
    """Draw the requested episodes, in order; ids are independent of popularity."""
    random = np.random.default_rng(seed)
    ids = random.permutation(episodes)
    drawn: NDArray[np.intp] = ids[random.choice(episodes, count, p=shares(episodes, exponent))]
    return drawn


def least_recent(order: NDArray[np.intp], capacity: int, warm: int) -> float:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for place, item in enumerate(order.tolist()):
        if item in kept:
            kept.move_to_end(item)
            hits += place >= warm
            continue
        kept[item] = None
        if len(kept) > capacity:
            kept.popitem(last=False)
    return hits / (len(order) - warm)


async def ours(order: NDArray[np.intp], capacity: int, warm: int) -> tuple[float, float]:
    """Return the hit rate of the service's cache, and the microseconds of a hit."""
    cache = EpisodeCache(capacity=capacity, ttl_s=1e9)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    hits = 0
    for place, item in enumerate(order.tolist()):
        episode_id = UUID(int=item)
        if await cache.get(TENANT, episode_id) is None:
            episode = Episode(at, Outcome.SUCCESS, {}, Summary(task="x"), id=episode_id)
            await cache.put(TENANT, episode)
        else:
            hits += place >= warm
    known = UUID(int=int(order[-1]))
    began = time.perf_counter()
    for _ in range(1_000):
        await cache.get(TENANT, known)
    return hits / (len(order) - warm), (time.perf_counter() - began) * 1e3


def main(
    cases: tuple[tuple[int, float, int], ...] = (
        (10_000, 1.0, 300_000),
        (1_000_000, 1.2, 600_000),
    ),
    capacity: int = CAPACITY,
    seed: int = 1,
) -> None:
    """Print a line for each of ``cases``: episodes, exponent, requests (a third warms up)."""
    print(f"hit rate of {capacity:,} episodes{'':22} ours  perfect     LRU   target   us per hit")
    for episodes, exponent, count in cases:
        order = asked(episodes, exponent, count, seed)
        rate, micros = asyncio.run(ours(order, capacity, count // 3))
        perfect = shares(episodes, exponent)[:capacity].sum()
        lru = least_recent(order, capacity, count // 3)
        print(
            f"  {episodes:9,} episodes, Zipf {exponent}, {count:7,} asked"
            f" {rate:8.3f} {perfect:8.3f} {lru:7.3f}    0.700   {micros:8.2f}"
        )
