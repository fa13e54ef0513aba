"""How often the cache of hot episodes has what is asked for, when few are asked for often."""

import asyncio
import time
from collections import OrderedDict
from datetime import UTC, datetime
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from benchmarks.memory.stage import TENANT
from bottega.memory.episode import Episode, Outcome, Summary
from bottega.memory.hot import CAPACITY, HotEpisodes


def shares(episodes: int, exponent: float) -> NDArray[np.float64]:
    """How likely each is asked for: the n-th most popular n ** -exponent, in all 1."""
    weights = np.arange(1, episodes + 1, dtype=np.float64) ** -exponent
    shared: NDArray[np.float64] = weights / weights.sum()
    return shared


def asked(episodes: int, exponent: float, count: int, seed: int) -> NDArray[np.intp]:
    """Which episodes are asked for, in turn; ids say nothing of popularity."""
    random = np.random.default_rng(seed)
    ids = random.permutation(episodes)
    drawn: NDArray[np.intp] = ids[random.choice(episodes, count, p=shares(episodes, exponent))]
    return drawn


def least_recent(order: NDArray[np.intp], capacity: int, warm: int) -> float:
    """The rate of a cache that lets go of what was not asked for longest."""
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
    """The rate of the service's cache, and microseconds per question that it answers."""
    cache = HotEpisodes(capacity=capacity, ttl_s=1e9)
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
    """``cases``: episodes, exponent, questions; the first third warms the cache up."""
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
