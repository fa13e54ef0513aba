"""Growth and shrinking of the pool."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.subagents.limits import SchedulerOptions, resized

OPTIONS = SchedulerOptions(min_workers=2, max_workers=20)
shares = st.floats(0, 1)


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, SchedulerOptions]:
    """Draw a pool's size, and options whose bounds contain it."""
    least, size, most = sorted(draw(st.tuples(*[st.integers(1, 500)] * 3)))
    low, high = sorted(draw(st.tuples(shares, shares)))
    return size, replace(
        OPTIONS,
        min_workers=least,
        max_workers=most,
        scale_down_threshold=low,
        scale_up_threshold=high,
    )


@pytest.mark.parametrize(
    ("size", "busy", "then"),
    [
        (10, 9, 15),
        (10, 8, 10),  # exactly 80 %
        (5, 4, 5),
        (15, 12, 15),
        (15, 13, 20),  # 23 without the maximum
        (20, 20, 20),
        (2, 2, 3),
        (3, 3, 5),
        (10, 3, 10),  # exactly 30 %
        (20, 6, 20),
        (20, 5, 15),
        (10, 2, 7),
        (3, 0, 2),
        (2, 0, 2),
        (10, 5, 10),
        (10, 11, 15),  # after it shrank below the number of held slots
    ],
)
def test_pool_grows_above_and_shrinks_below_the_thresholds(size: int, busy: int, then: int) -> None:
    assert resized(size, busy, OPTIONS) == then


@given(pools(), st.integers(0, 600))
def test_pool_stays_within_bounds_and_changes_by_a_half_or_a_quarter_at_most(
    pool: tuple[int, SchedulerOptions], busy: int
) -> None:
    size, options = pool
    then = resized(size, busy, options)
    assert options.min_workers <= then <= options.max_workers
    assert size * 0.75 - 1 < then < size * 1.5 + 1
    if then > size:
        assert busy / size > options.scale_up_threshold
    if then < size:
        assert busy / size < options.scale_down_threshold


@given(pools(), st.integers(0, 600), st.integers(0, 600))
def test_more_work_never_shrinks_the_pool(
    pool: tuple[int, SchedulerOptions], one: int, other: int
) -> None:
    size, options = pool
    less, more = sorted((one, other))
    assert resized(size, less, options) <= resized(size, more, options)


@given(st.integers(1, 50), st.integers(0, 450))
def test_pool_reaches_its_bounds_under_full_load_and_without_load(least: int, more: int) -> None:
    options = replace(OPTIONS, min_workers=least, max_workers=least + more)
    size = least
    for _ in range(20):
        size = resized(size, size, options)
    assert size == options.max_workers
    for _ in range(40):
        size = resized(size, 0, options)
    assert size == options.min_workers


@given(st.integers(0, 100))
def test_pool_is_constant_when_minimum_and_maximum_are_equal(busy: int) -> None:
    assert resized(50, busy, replace(OPTIONS, min_workers=50, max_workers=50)) == 50
