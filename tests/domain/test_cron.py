"""Due times of schedules, on clocks that are put forward and back."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter
from hypothesis import given
from hypothesis import strategies as st

from bottega.background.schedules import check_cron, check_zone, next_tick, previous_tick
from bottega.errors import InvalidInputError

BERLIN = "Europe/Berlin"  # 2026: forward on 29 March at 2:00, back on 25 October at 3:00


def ticks(cron: str, zone: str, start: str, count: int) -> list[str]:
    """Return the next ticks after ``start`` (a local time), as local times with their offset."""
    moment = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    found = []
    for _ in range(count):
        later = next_tick(cron, zone, moment)
        assert later > moment
        assert later.tzinfo is UTC
        moment = later
        found.append(moment.astimezone(ZoneInfo(zone)).isoformat(timespec="minutes")[5:])
    return found


def test_next_ticks_on_ordinary_days() -> None:
    assert ticks("30 8 * * mon-fri", BERLIN, "2026-11-20T08:29", 3) == [
        "11-20T08:30+01:00",
        "11-23T08:30+01:00",
        "11-24T08:30+01:00",
    ]
    assert ticks("*/20 * * * *", "UTC", "2026-11-20T08:20", 2) == [
        "11-20T08:40+00:00",
        "11-20T09:00+00:00",
    ]
    assert ticks("0 0 29 2 *", "UTC", "2026-01-01T00:00", 1) == ["02-29T00:00+00:00"]
    assert ticks("0 12 * * *", "Asia/Kathmandu", "2026-01-01T12:00", 1) == ["01-02T12:00+05:45"]


def test_local_time_stays_across_a_change_of_the_clocks() -> None:
    assert ticks("0 9 * * *", BERLIN, "2026-03-28T08:00", 2) == [
        "03-28T09:00+01:00",
        "03-29T09:00+02:00",
    ]
    assert ticks("0 9 1 * *", BERLIN, "2026-01-01T09:00", 4)[2:] == [
        "04-01T09:00+02:00",
        "05-01T09:00+02:00",
    ]


def test_skipped_time_comes_once_after_the_gap() -> None:
    assert ticks("30 2 * * *", BERLIN, "2026-03-28T02:00", 3) == [
        "03-28T02:30+01:00",
        "03-29T03:30+02:00",
        "03-30T02:30+02:00",
    ]
    assert ticks("0,30 2,3 * * *", BERLIN, "2026-03-29T00:00", 3) == [
        "03-29T03:00+02:00",
        "03-29T03:30+02:00",
        "03-30T02:00+02:00",
    ]
    assert ticks("30 * * * *", BERLIN, "2026-03-29T00:45", 3) == [
        "03-29T01:30+01:00",
        "03-29T03:30+02:00",
        "03-29T04:30+02:00",
    ]
    # Here the clocks go forward by half an hour.
    assert ticks("10,35 2 * * *", "Australia/Lord_Howe", "2026-10-04T00:00", 3) == [
        "10-04T02:35+11:00",
        "10-05T02:10+11:00",
        "10-05T02:35+11:00",
    ]
    assert ticks("30 1,2 * * *", BERLIN, "2026-03-29T00:00", 2) == [
        "03-29T01:30+01:00",
        "03-30T01:30+02:00",
    ]


def test_repeated_time_comes_once_unless_it_is_one_of_several() -> None:
    assert ticks("30 2 * * *", BERLIN, "2026-10-24T03:00", 2) == [
        "10-25T02:30+02:00",
        "10-26T02:30+01:00",
    ]
    assert ticks("*/30 1-3 * * *", BERLIN, "2026-10-25T01:15", 8) == [
        "10-25T01:30+02:00",
        "10-25T02:00+02:00",
        "10-25T02:30+02:00",
        "10-25T02:00+01:00",
        "10-25T02:30+01:00",
        "10-25T03:00+01:00",
        "10-25T03:30+01:00",
        "10-26T01:00+01:00",
    ]
    # Begun within the hour that repeats.
    second = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)
    assert next_tick("30 2 * * *", BERLIN, second) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize("zone", [BERLIN, "America/New_York", "Australia/Lord_Howe"])
@pytest.mark.parametrize("month", [3, 4, 10, 11])
@pytest.mark.parametrize("cron", ["*/15 0-4 * * *", "0,30 1,2,3 * * *", "5-10 2 * * *"])
def test_lists_and_ranges_are_due_as_often_as_the_clock_shows(
    cron: str, month: int, zone: str
) -> None:
    clocks, minutes = ZoneInfo(zone), 31 * 24 * 60
    start = datetime(2026, month, 1, tzinfo=UTC)
    due = croniter.expand(cron)[0]
    shown = [
        moment
        for moment in (start + timedelta(minutes=n) for n in range(1, minutes))
        if (local := moment.astimezone(clocks)).minute in due[0] and local.hour in due[1]
    ]
    found = [start]
    while len(found) <= len(shown):
        found.append(next_tick(cron, zone, found[-1]))
    assert found[1:] == shown


def test_hourly_schedule_runs_in_both_repeated_hours() -> None:
    assert ticks("*/30 * * * *", BERLIN, "2026-10-25T01:30", 5) == [
        "10-25T02:00+02:00",
        "10-25T02:30+02:00",
        "10-25T02:00+01:00",
        "10-25T02:30+01:00",
        "10-25T03:00+01:00",
    ]


@pytest.mark.parametrize(
    "hours",
    ["*", "*/1", "0-23", "0-23/1", "0,1-23", "12-23,0-11", ",".join(map(str, range(24)))],
)
def test_every_hour_is_due_twice_however_it_is_written(hours: str) -> None:
    cron = f"*/30 {hours} * * *"
    assert ticks(cron, BERLIN, "2026-10-25T01:30", 5) == ticks(
        "*/30 * * * *", BERLIN, "2026-10-25T01:30", 5
    )


@given(
    cron=st.sampled_from(["* * * * *", "7 * * * *", "*/15 * * * *", "59 23 * * *"]),
    zone=st.sampled_from([BERLIN, "America/New_York", "Australia/Lord_Howe", "UTC"]),
    hours=st.integers(0, 366 * 24),
    minutes=st.integers(0, 59),
)
def test_next_tick_is_never_far(cron: str, zone: str, hours: int, minutes: int) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=hours, minutes=minutes)
    gap = {"* * * * *": 1, "7 * * * *": 90, "*/15 * * * *": 45, "59 23 * * *": 1500}[cron]
    after = next_tick(cron, zone, start)
    assert start < after <= start + timedelta(minutes=gap)
    # Nothing lies between: from any moment in between the next tick is the same.
    assert next_tick(cron, zone, start + (after - start) / 2) == after


@pytest.mark.parametrize(
    "cron",
    [
        *("", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *"),
        *("* * * * 8", "*/0 * * * *", "5-1-2 * * * *", "x * * * *", "@daily", "H * * * *"),
        *("R * * * *", "* * L * *", "* * * * mon#2", "0 0 30 2 *", "0 0 31 2,4 *", "a" * 500),
        "1," * 200 + "1 * * * *",
    ],
)
def test_invalid_or_never_due_expression_is_refused(cron: str) -> None:
    with pytest.raises(InvalidInputError):
        check_cron(cron)


def test_expression_is_stored_in_normal_form() -> None:
    assert check_cron("  0\t8  * * MON ") == "0 8 * * MON"
    assert ticks("0 8 * * MON", "UTC", "2026-11-20T00:00", 1) == ["11-23T08:00+00:00"]


@pytest.mark.parametrize("zone", ["", "Mars/Olympus", "../etc/passwd", "/UTC", "europe", "CEST+9"])
def test_invalid_time_zone_is_refused(zone: str) -> None:
    with pytest.raises(InvalidInputError):
        check_zone(zone)


def test_last_tick_may_be_now_but_never_later() -> None:
    at = datetime(2026, 11, 20, 3, tzinfo=UTC)
    assert previous_tick("0 3 * * *", at) == at
    assert previous_tick("0 3 * * *", at + timedelta(microseconds=1)) == at
    assert previous_tick("0 3 * * *", at - timedelta(microseconds=1)) == at - timedelta(days=1)
    leap = datetime(2024, 2, 29, tzinfo=UTC)
    assert previous_tick("0 0 29 2 *", at) == leap


@given(
    st.sampled_from(["0 3 * * *", "*/7 * * * *", "30 8 * * mon-fri", "0 0 1 * *"]),
    st.integers(0, 10 * 365 * 86_400),
)
def test_no_tick_lies_between_the_last_and_the_next(cron: str, seconds: int) -> None:
    at = datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    last = previous_tick(cron, at)
    assert last <= at < next_tick(cron, "UTC", last) == next_tick(cron, "UTC", at)
