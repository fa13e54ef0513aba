"""The clock of a node's try, with a fake time."""

import asyncio

import pytest

from bottega.engine.waiting import NodeClock


async def test_a_clock_stands_still_while_people_think(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, now = asyncio.get_running_loop(), 1000.0
    monkeypatch.setattr(loop, "time", lambda: now)
    clock = NodeClock((), 5.0)
    clock.stand(False)
    now += 2
    assert clock.left_s == 3.0
    clock.stand(True)
    now += 3600
    clock.stand(True)  # it stands still already
    clock.stand(False)
    assert clock.left_s == 3.0
    now += 1
    clock.stand(False)  # it goes on already
    assert clock.left_s == 2.0
    clock.stand(True)
    assert not clock.expired.is_set()


async def test_a_clock_without_time_expires() -> None:
    clock = NodeClock((), -1.0)
    clock.stand(False)
    async with asyncio.timeout(10):
        await clock.expired.wait()
