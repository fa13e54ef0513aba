"""Leased work of several tenants while a service fails for some of them, or for all."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any
from uuid import UUID

import pytest

from bottega.leased_work import Blame, LeasedWork, Outage, WorkLoop
from tests.waiting import until

AT_ONCE = 4


class ServiceError(Exception):
    """A failure that is blamed on the service."""


class RowError(Exception):
    """A failure that is blamed on the row."""


class Rows:
    """A table in memory: each tenant has one due row until it is done."""

    def __init__(self, tenants: int, fails: Callable[[int], Exception | None]) -> None:
        self.due = [*range(tenants)]
        self.fails = fails
        self.tried: list[int] = []
        self.put_off: list[int] = []

    async def fetch(self, claim: str, *limits: float) -> list[Mapping[str, Any]]:
        return [{"tenant_id": UUID(int=number)} for number in self.due]

    async def do(self, tenant_id: UUID, rows: Collection[Any]) -> None:
        self.tried.append(tenant_id.int)
        if error := self.fails(tenant_id.int):
            raise error
        self.due.remove(tenant_id.int)

    async def postpone(self, tenant_id: UUID, rows: Collection[Any], error: Exception) -> None:
        self.put_off.append(tenant_id.int)


def working(rows: Rows, clock: Callable[[], float]) -> LeasedWork:
    return LeasedWork(
        pool=rows,
        claim="",
        limits=(),
        next_s="",
        do=rows.do,
        blame=lambda error: Blame.ROW if isinstance(error, RowError) else Blame.SERVICE,
        put_off=rows.postpone,
        outage=Outage("service.unavailable", clock),
        tenants_at_once=AT_ONCE,
        clock=clock,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def failing_for(tenants: Collection[int]) -> Callable[[int], Exception | None]:
    return lambda tenant: ServiceError() if tenant in tenants else None


async def test_a_service_that_is_down_is_not_used_for_each_tenant() -> None:
    rows = Rows(10, failing_for(range(10)))

    assert await working(rows, Clock()).do_due() == 1

    assert rows.tried == [0, 1, 2, 3]
    assert sorted(rows.put_off) == rows.due == [*range(10)]


async def test_a_service_that_fails_for_one_tenant_is_used_for_the_others() -> None:
    rows = Rows(10, failing_for({0}))

    assert await working(rows, Clock()).do_due() == 1

    assert rows.due == rows.put_off == [0]


@pytest.mark.parametrize("first", [0, 2, 4, 8])
async def test_tenants_for_whom_a_service_fails_do_not_keep_others_waiting(first: int) -> None:
    failing = [*range(first, first + AT_ONCE)]
    clock, rows = Clock(), Rows(12, failing_for(failing))
    work = working(rows, clock)
    for _ in range(2):
        clock.now += await work.do_due()

    assert rows.due == failing


async def test_after_failures_the_tenants_take_turns() -> None:
    clock, rows = Clock(), Rows(12, failing_for(range(12)))
    work = working(rows, clock)
    for _ in range(4):
        clock.now += await work.do_due()

    assert rows.tried == [*range(12), 0, 1, 2, 3]


async def test_a_row_that_fails_does_not_hide_that_the_service_is_down() -> None:
    rows = Rows(16, lambda tenant: ServiceError() if tenant else RowError())

    assert await working(rows, Clock()).do_due() == 1

    assert rows.tried == [*range(2 * AT_ONCE)]
    assert sorted(rows.put_off) == [*range(16)]


async def test_what_comes_in_within_a_second_is_done_together() -> None:
    times: list[float] = []

    async def act() -> float:
        times.append(asyncio.get_running_loop().time())
        return float("inf")

    loop = WorkLoop("any", act)
    running = asyncio.ensure_future(loop.run())
    await until(lambda: len(times), lambda count: count == 1)
    loop.wake_soon()
    await until(lambda: len(times), lambda count: count == 2)  # the first one does not wait
    for _ in range(5):
        loop.wake_soon()
    await until(lambda: len(times), lambda count: count == 3)
    assert times[2] - times[1] > 0.9
    running.cancel()
