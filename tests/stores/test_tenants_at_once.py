"""Statements about runs of many tenants at once: their cost grows with the number of runs."""

from benchmarks.engine_statements import fill, measure

_RUNS = 1000
_MOST = 8
"""Times the cost for one tenant. Arrays that are filtered once for each tenant take 10 to 100."""


async def test_no_statement_filters_its_arrays_for_each_tenant(database_url: str) -> None:
    await fill(database_url, _RUNS)
    if await _slow(database_url, rounds=3):  # or the machine was busy
        assert await _slow(database_url, rounds=15) == {}


async def _slow(url: str, rounds: int) -> dict[str, tuple[float, float]]:
    took = await measure(url, rounds)
    return {name: (one, many) for name, (one, many) in took.items() if many > _MOST * one}
