"""Pure choices of pace: when a worker counts as busy, and how often streams read."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.events.run_streams import LONGEST_POLL_S, POLL_S, TEXT_S, pause_of
from bottega.execution.load import leases
from bottega.execution.load.leases import Load, is_strained, spare_of

FEW = st.integers(0, 300)
SHARE = st.floats(0, 2)


@given(FEW, st.integers(1, 300), FEW, FEW)
def test_a_worker_gets_as_many_runs_as_it_has_places(
    runs: int, places: int, begun: int, usual: int
) -> None:
    spare = spare_of(runs, places, begun, usual, strained=False)
    assert spare >= 0
    if spare:
        assert runs + spare <= places
        assert begun + spare <= max(20, 2 * usual)
    assert spare_of(runs, places, begun, usual, strained=True) == 0


def test_a_worker_gets_on_as_many_runs_as_did_not_strain_it() -> None:
    assert spare_of(0, 200, 20, 0, strained=False) == 0
    assert spare_of(0, 200, 20, 30, strained=False) == 40


@given(st.integers(1, 300))
def test_an_idle_worker_gets_runs(places: int) -> None:
    assert spare_of(0, places, 0, 0, strained=False) >= 1


@given(SHARE, SHARE)
def test_a_strained_worker_rests_before_it_gets_runs_again(share: float, later: float) -> None:
    strained = is_strained(False, share)
    if strained and not is_strained(strained, later):
        assert later < share
    assert is_strained(False, 1.0)
    assert not is_strained(True, 0.1)


async def test_runs_that_rest_are_counted_in_the_thread_of_the_event_loop_only() -> None:
    counted: set[int] = set()

    def resting() -> int:
        counted.add(threading.get_ident())
        return 3

    load = Load(2, resting)
    assert load.room(4) == 1
    assert not await asyncio.to_thread(load.is_busy, 3)
    assert counted == {threading.get_ident()}


async def test_a_full_worker_has_half_as_many_places_in_reserve() -> None:
    load = Load(5, lambda: 1)
    assert [load.reserve(runs) for runs in (6, 7, 8, 9, 10)] == [3, 2, 1, 0, 0]


async def test_runs_that_strained_a_worker_are_not_its_usual_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, used = [0.0], [0.0]
    monkeypatch.setattr(leases, "monotonic", lambda: now[0])
    monkeypatch.setattr(leases, "time", SimpleNamespace(thread_time=lambda: used[0]))
    load = Load(1000)

    def window(begun: int, share: float) -> int:
        load.begin(begun)
        now[0], used[0] = now[0] + 1, used[0] + share
        return load.spare(0)

    assert window(10, 0.1) == 20
    assert window(40, 0.1) == 80
    assert window(40, 0.9) == 0
    assert window(0, 0.1) == 20


async def test_a_worker_that_stops_is_busy() -> None:
    load = Load(2)
    assert not load.is_busy(0)
    await asyncio.sleep(0)
    assert not load.is_busy(0)
    load.stop()
    await asyncio.sleep(0)
    assert load.is_busy(0)


@given(st.integers(0, 2000), st.data())
def test_streams_read_less_often_the_more_runs_only_show_text(
    awake: int, data: st.DataObject
) -> None:
    quiet, streaming = (data.draw(st.integers(0, awake)) for _ in range(2))
    pause_s = pause_of(awake, quiet, streaming)
    assert POLL_S <= pause_s <= LONGEST_POLL_S
    assert pause_s >= pause_of(awake, quiet, 0)


def test_runs_that_all_show_text_are_read_as_often_as_their_text() -> None:
    assert pause_of(1, 0, 1) == TEXT_S
    assert pause_of(1, 0, 0) == POLL_S
