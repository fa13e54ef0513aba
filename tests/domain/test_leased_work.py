"""Leased work of several tenants, some of whose rows hang or fail."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

import pytest

from bottega.errors import UnavailableError
from bottega.events.listener import NotifyListener
from bottega.leased_work import Blame, LeasedWork, WorkLoop
from tests.waiting import until


class ServiceError(Exception):
    """A failure that is blamed on the service."""


class RowError(Exception):
    """A failure that is blamed on the row."""


Row = Mapping[str, Any]


class Rows:
    """A table in memory, in place of ``claim_due``: rows are due until they are done."""

    def __init__(
        self, of_tenants: Mapping[int, int], act: Callable[[Row], Awaitable[None]]
    ) -> None:
        self.due: list[dict[str, Any]] = [
            {"tenant_id": UUID(int=tenant), "number": number}
            for tenant, count in of_tenants.items()
            for number in range(count)
        ]
        self.act = act
        self.put_off: list[tuple[int, float | None]] = []
        self.claims = 0

    async def fetch(self, claim: str, *limits: Any) -> list[Row]:
        _, _, _, most, each, busy, out = limits
        self.claims += 1
        under_way, found = Counter(busy), list[Row]()
        for row in list(self.due):
            tenant = row["tenant_id"]
            if tenant not in out and under_way[tenant] < each and len(found) < most:
                under_way[tenant] += 1
                found.append(row)
                self.due.remove(row)
        return found

    async def fetchval(self, query: str, *limits: Any) -> float | None:
        return 0.0 if any(row["tenant_id"] not in limits[1] for row in self.due) else None

    async def do(self, tenant_id: UUID, rows: Sequence[Row]) -> None:
        for row in rows:
            await self.act(row)

    async def postpone(
        self, tenant_id: UUID, rows: Sequence[Row], error: Exception, pause_s: float | None
    ) -> None:
        self.put_off += [(tenant_id.int, pause_s) for _ in rows]

    def left(self) -> Counter[int]:
        return Counter(row["tenant_id"].int for row in self.due)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def working(rows: Rows, **more: Any) -> LeasedWork:
    return LeasedWork(
        **{
            "pool": rows,
            "name": "any",
            "columns": "number integer",
            "lease_s": 60,
            "share": 4,
            "do": rows.do,
            "blame": lambda error: Blame.ROW if isinstance(error, RowError) else Blame.SERVICE,
            "put_off": rows.postpone,
            "clock": Clock(),
            **more,
        }
    )


async def test_tenants_whose_rows_hang_hold_their_own_places_alone() -> None:
    gate, done = asyncio.Event(), Counter[int]()

    async def act(row: Row) -> None:
        if row["tenant_id"].int < 100:
            await gate.wait()
        done[row["tenant_id"].int] += 1

    rows = Rows({**dict.fromkeys(range(100), 10), 100: 10}, act)
    running = asyncio.ensure_future((work := working(rows)).run())
    await until(lambda: done[100], lambda count: count == 10)
    assert rows.left() == Counter(dict.fromkeys(range(100), 6))
    gate.set()
    await until(lambda: done.total(), lambda count: count == 1010)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not work._busy


async def test_work_with_places_begins_no_more_than_they_are() -> None:
    most, now = 0, 0

    async def act(row: Row) -> None:
        nonlocal most, now
        most, now = max(most, now + 1), now + 1
        await asyncio.sleep(0)
        now -= 1

    rows = Rows(dict.fromkeys(range(5), 10), act)
    running = asyncio.ensure_future(working(rows, places=6).run())
    await until(lambda: (len(rows.due), now), lambda left: left == (0, 0))
    running.cancel()
    assert most == 6


async def test_a_tenant_for_whom_a_service_fails_pauses_alone() -> None:
    async def act(row: Row) -> None:
        if row["tenant_id"].int == 0:
            raise ServiceError

    clock, rows = Clock(), Rows({0: 20, 1: 12}, act)
    work = working(rows, clock=clock, batch=4)
    for number, pause_s in enumerate((1, 2, 4)):
        assert await work.do_due() == pause_s
        assert rows.put_off == [(0, 2.0**each) for each in range(number + 1) for _ in range(4)]
        clock.now += pause_s
    assert rows.left() == {0: 8}


async def test_a_success_makes_the_next_pause_the_shortest() -> None:
    fails = iter((True, True, False, True))

    async def act(row: Row) -> None:
        if next(fails):
            raise ServiceError

    clock, rows = Clock(), Rows({0: 4}, act)
    work = working(rows, clock=clock, share=1)
    for pause_s in (1, 2, 0, 1):
        assert await work.do_due() == pause_s
        clock.now += pause_s


async def test_a_row_that_fails_is_found_among_its_batch() -> None:
    done: list[int] = []

    async def act(row: Row) -> None:
        if row["number"] == 2:
            raise RowError
        done.append(row["number"])

    rows = Rows({0: 4}, act)
    assert await working(rows, batch=4).do_due() == 0
    assert rows.put_off == [(0, None)]
    assert set(done) == {0, 1, 3}


async def test_a_tenant_rests_as_long_as_its_batch_took() -> None:
    clock = Clock()

    async def act(row: Row) -> None:
        clock.now += 3

    rows = Rows({0: 2}, act)
    work = working(rows, clock=clock, share=1, longest_rest_s=2.0)
    assert await work.do_due() == 2
    assert await work.start_due() == 2
    assert rows.left() == {0: 1}
    clock.now += 2
    await work.start_due()
    assert not rows.due


async def test_work_that_is_not_due_is_not_claimed() -> None:
    async def act(row: Row) -> None:
        pass

    rows = Rows({0: 1}, act)
    work = working(rows)
    assert [await work.start_due() for _ in range(2)] == [0, float("inf")]
    assert rows.claims == 1


def test_a_loop_does_not_act_because_its_process_rests() -> None:
    loop = WorkLoop("any", pytest.fail)
    loop.rests = lambda: True
    loop.on_notice(None)
    assert not loop._awake.is_set()
    loop.on_notice("")
    assert loop._awake.is_set()


async def test_a_loop_acts_when_its_process_stops_resting() -> None:
    listener, loop = NotifyListener(pytest.fail), WorkLoop("any", pytest.fail)
    loop.rests = listener.rests
    listener.subscribe("any", loop.on_notice)
    listener.need(is_needed=False)
    assert not loop._awake.is_set()
    listener.need(is_needed=True)
    assert loop._awake.is_set()


async def test_what_comes_in_within_half_a_second_is_done_together() -> None:
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
    assert times[2] - times[1] > 0.4
    running.cancel()


async def test_a_loop_pauses_twice_as_long_while_its_service_is_down() -> None:
    outcomes = iter((None, None, 7.0, None))

    async def act() -> float:
        if (left_s := next(outcomes)) is None:
            raise UnavailableError("away")
        return left_s

    loop = WorkLoop("any", act)
    assert [await loop.act_or_pause() for _ in range(4)] == [1, 2, 7, 1]
