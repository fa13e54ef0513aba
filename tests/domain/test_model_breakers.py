"""Circuit breakers of models, of one worker's calls."""

import asyncio
from uuid import uuid4

import pytest

from bottega.clock import utcnow
from bottega.errors import ModelError
from bottega.llm import gates
from bottega.llm.errors import ErrorMapper
from bottega.llm.gates import LEAST_CALLS, WINDOW_S, ModelBreakers, ModelKey
from bottega.llm.limits import ServerKey

KEY = ModelKey(ServerKey(uuid4(), False, "vendor"), "m")
DOWN = ModelError("it is down", code="model_unavailable", retryable=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gates, "monotonic", clock)
    return clock


@pytest.fixture
def breakers() -> ModelBreakers:
    return ModelBreakers(lambda: 1.0)


def break_down(breakers: ModelBreakers, key: ModelKey = KEY) -> None:
    for _ in range(LEAST_CALLS):
        breakers.failed(key, DOWN, was_probe=False)


def test_repeated_failures_open_a_breaker(breakers: ModelBreakers, clock: Clock) -> None:
    for _ in range(LEAST_CALLS - 1):
        breakers.failed(KEY, DOWN, was_probe=False)
    assert breakers.held_s(KEY) == 0
    breakers.failed(KEY, DOWN, was_probe=False)
    assert breakers.held_s(KEY) > 1
    assert breakers.cause(KEY) == "it is down"
    assert breakers.held_s(KEY._replace(model="another")) == 0
    stranger = KEY._replace(server=KEY.server._replace(tenant_id=uuid4()))
    assert breakers.held_s(stranger) == 0
    breakers.succeeded(KEY)  # of a call that began before
    assert not breakers.is_open(KEY)


def test_the_cause_quotes_nothing_of_another_call(breakers: ModelBreakers, clock: Clock) -> None:
    mapper = ErrorMapper("https://models.example", "")
    error = mapper.refused(500, {"error": {"message": "cannot do: my PIN is 1234"}}, {}, utcnow())
    assert "1234" in error.detail
    for _ in range(LEAST_CALLS):
        breakers.failed(KEY, error, was_probe=False)
    assert "HTTP 500" in breakers.cause(KEY)
    assert "1234" not in breakers.cause(KEY)


@pytest.mark.parametrize(("well", "opens"), [(3, True), (4, False)])
def test_half_of_the_recent_calls_open_a_breaker(
    breakers: ModelBreakers, clock: Clock, well: int, opens: bool
) -> None:
    breakers.failed(KEY, DOWN, was_probe=False)  # long ago
    clock.now += WINDOW_S + 1
    for _ in range(well):
        breakers.succeeded(KEY)
    for _ in range(2):
        breakers.failed(KEY, DOWN, was_probe=False)
    assert not breakers.is_open(KEY)
    breakers.failed(KEY, DOWN, was_probe=False)
    assert breakers.is_open(KEY) is opens


def test_one_call_probes_an_open_breaker(breakers: ModelBreakers, clock: Clock) -> None:
    break_down(breakers)
    assert not breakers.begin_call(KEY._replace(model="another"))
    clock.now += (first_s := breakers.held_s(KEY))
    assert breakers.held_s(KEY) == 0
    assert breakers.begin_call(KEY)
    assert breakers.held_s(KEY) > 0, "another call is the probe"
    assert [state["state"] for _, state in breakers.states()] == ["half_open"]
    breakers.failed(KEY, DOWN, was_probe=False)  # began before: the probe decides
    assert [state["state"] for _, state in breakers.states()] == ["half_open"]
    breakers.failed(KEY, DOWN, was_probe=True)
    assert breakers.held_s(KEY) > first_s, "each failed probe lengthens the pause"
    assert [state["state"] for _, state in breakers.states()] == ["open"]

    clock.now += breakers.held_s(KEY)
    assert breakers.begin_call(KEY)
    breakers.abandoned(KEY)  # the run was handed back meanwhile
    assert breakers.held_s(KEY) == 0
    assert breakers.begin_call(KEY)
    breakers.succeeded(KEY)
    assert not breakers.is_open(KEY)


def test_a_probe_that_the_server_refuses_closes_the_breaker(
    breakers: ModelBreakers, clock: Clock
) -> None:
    break_down(breakers)
    breakers.begin_call(KEY)
    breakers.failed(KEY, ModelError("no", code="model_bad_request"), was_probe=True)
    assert not breakers.is_open(KEY)


def test_a_wait_that_the_server_asks_for_opens_its_breaker_at_once(
    breakers: ModelBreakers, clock: Clock
) -> None:
    busy = ModelError("busy", code="model_rate_limited", retryable=True, retry_after_s=20)
    breakers.failed(KEY, busy, was_probe=False)
    assert 19 < breakers.held_s(KEY) < 21
    quick = KEY._replace(model="quick")
    for code in ("model_rate_limited", "model_bad_request", "model_unauthorized"):
        for _ in range(LEAST_CALLS + 1):
            breakers.failed(quick, ModelError("no", code=code), was_probe=False)
    assert not breakers.is_open(quick)


@pytest.mark.parametrize("closes", [True, False])
async def test_waiting_calls_hear_of_a_close_and_of_a_cancelled_probe(
    breakers: ModelBreakers, closes: bool
) -> None:
    break_down(breakers)
    waiting = asyncio.ensure_future(breakers.wait_closed(KEY, 60.0))
    await asyncio.sleep(0)
    breakers.begin_call(KEY)
    if closes:
        breakers.succeeded(KEY)
    else:
        breakers.abandoned(KEY)
    async with asyncio.timeout(5):
        await waiting
