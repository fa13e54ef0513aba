"""The limit of requests per second: at most the burst and the time's allowance pass."""

import math
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.tenants.ratelimit import Rate, RateLimits, decide

RATES = st.builds(Rate, st.floats(0.01, 10_000), st.integers(1, 1000))
GAPS = st.lists(st.floats(0, 100), max_size=200)
A, B = UUID(int=1), UUID(int=2)


@given(RATES, st.floats(0, 10**9), GAPS)
def test_never_more_than_the_burst_and_the_times_allowance_pass(
    rate: Rate, start: float, gaps: list[float]
) -> None:
    now, paid_at, let_through = start, 0.0, []
    for gap in gaps:
        now += gap
        decision = decide(rate, paid_at, now)
        paid_at = decision.paid_at
        if decision.allowed:
            let_through.append(now)
        assert 0 <= decision.remaining <= rate.burst
        assert decision.whole_s <= rate.window_s * 1.01 + 0.01 / rate.per_s
    for first, since in enumerate(let_through):
        within = [at for at in let_through[first:] if at - since <= rate.window_s]
        assert len(within) <= 2 * rate.burst + 1


@given(RATES, st.floats(0, 10**6))
def test_burst_passes_and_the_next_request_passes_after_retry_after(rate: Rate, now: float) -> None:
    paid_at = 0.0
    for left in reversed(range(rate.burst)):
        decision = decide(rate, paid_at, now)
        assert decision.allowed
        assert decision.remaining == left
        paid_at = decision.paid_at
    refused = decide(rate, paid_at, now)
    assert not refused.allowed
    assert refused.remaining == 0
    assert math.isclose(refused.paid_at, paid_at)
    assert refused.retry_after_s == pytest.approx(1 / rate.per_s, rel=0.01)
    assert decide(rate, paid_at, now + refused.retry_after_s).allowed
    assert not decide(rate, paid_at, now + refused.retry_after_s / 2).allowed
    assert decide(rate, paid_at, now + rate.window_s).remaining == rate.burst - 1


def test_clients_are_independent_and_the_oldest_are_forgotten() -> None:
    now = 0.0
    limits: RateLimits[UUID] = RateLimits(Rate(1, 2), lambda: now)
    assert [limits.take(A).allowed for _ in range(3)] == [True, True, False]
    assert limits.take(B).allowed
    now = 1.0
    assert limits.take(A).allowed
    for number in range(20_001):
        limits.take(UUID(int=number + 10))
    assert len(limits._paid_at) == 20_000
    assert A not in limits._paid_at


@given(RATES, st.integers(1, 100), st.floats(0, 10**6))
def test_what_is_charged_delays_the_next_requests(rate: Rate, charged: int, start: float) -> None:
    now = start
    limits: RateLimits[UUID] = RateLimits(rate, lambda: now)
    limits.charge(A, rate.burst + charged)
    refused = limits.take(A)
    assert (refused.allowed, refused.remaining) == (False, 0)
    assert refused.retry_after_s == pytest.approx((1 + charged) / rate.per_s, rel=0.01)
    assert limits.take(B).allowed
    now += refused.retry_after_s
    assert limits.take(A).allowed
