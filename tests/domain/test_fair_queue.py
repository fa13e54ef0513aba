"""Turns of tenants on a worker's event loop."""

import asyncio
from collections.abc import Iterable
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from bottega.engine.recorder import FairQueue

BUSY, QUIET = UUID(int=1), UUID(int=2)


async def begun(fair: FairQueue, tenants: Iterable[UUID]) -> list[UUID]:
    """Let a piece of work of each tenant become ready at once; return their order."""
    order: list[UUID] = []

    async def work(tenant: UUID) -> None:
        await fair.enter(tenant)
        order.append(tenant)

    await asyncio.gather(*map(work, tenants))
    return order


async def test_a_tenant_with_little_work_does_not_wait_for_one_with_much() -> None:
    order = await begun(FairQueue(), [BUSY] * 400 + [QUIET] * 2)
    assert [place for place, tenant in enumerate(order) if tenant == QUIET][-1] < 80
    assert len(order) == 402


async def test_work_that_comes_later_waits_for_one_pass_of_the_loop() -> None:
    fair = FairQueue()
    busy = asyncio.ensure_future(begun(fair, [BUSY] * 400))
    await asyncio.sleep(0)
    passes = 0

    def count() -> None:
        nonlocal passes
        passes += 1
        asyncio.get_running_loop().call_soon(count)

    count()
    await fair.enter(QUIET)
    assert passes <= 3
    assert not busy.done()
    await busy


@given(st.lists(st.integers(0, 4).map(lambda n: UUID(int=n)), max_size=100))
def test_all_work_begins_once_and_in_order_within_a_tenant(tenants: list[UUID]) -> None:
    async def check() -> None:
        fair = FairQueue()
        assert sorted(await begun(fair, tenants)) == sorted(tenants)
        assert sorted(await begun(fair, tenants)) == sorted(tenants)

    asyncio.run(check())


async def test_cancelled_work_keeps_nobody_waiting() -> None:
    fair = FairQueue()
    waiting = [asyncio.ensure_future(fair.enter(BUSY)) for _ in range(300)]
    await asyncio.sleep(0)
    for each in waiting[80:140]:
        each.cancel()
    await asyncio.wait(waiting)
    assert [each.cancelled() for each in waiting].count(True) == 60
    await fair.enter(QUIET)
