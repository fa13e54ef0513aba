"""Due times of cron expressions in a time zone. Pure."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from croniter import CroniterError, croniter

from bottega.errors import InvalidInputError

_NAMES = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|sun|mon|tue|wed|thu|fri|sat"
_FIELD = rf"(?:[0-9*,/-]|{_NAMES}){{1,100}}"
_CRON = re.compile(rf"{_FIELD}(?: {_FIELD}){{4}}", re.IGNORECASE)
_ALL_HOURS = range(24)
_MOST_YEARS = 8  # from one 29 February to the next
_CHANGE = timedelta(hours=3)  # more than any change of clocks


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


def check_zone(name: str) -> str:
    """Return ``name``, or raise ``InvalidInputError`` if it is no time zone."""
    if name not in _zones():
        raise InvalidInputError(
            f"'{name[:100]}' is not a time zone: use an IANA name such as Europe/Berlin"
        )
    return name


def check_cron(cron: str) -> str:
    """Return the expression in its normal form, or raise ``InvalidInputError``."""
    plain = " ".join(cron.split())
    if not _CRON.fullmatch(plain):
        raise InvalidInputError(
            "a cron expression has five fields (minute, hour, day of month, month, day of week) "
            "of numbers, names, * , - and /, such as '30 8 * * mon-fri'"
        )
    try:
        _local_times(plain, datetime(2000, 1, 1)).get_next(datetime)  # noqa: DTZ001 (any time)
    except CroniterError as error:
        raise InvalidInputError(f"this cron expression is never due: {error}") from None
    return plain


def next_tick(cron: str, zone: str, after: datetime) -> datetime:
    """Return the first due time of a checked ``cron`` in ``zone`` after ``after``, in UTC.

    A local time that the clocks skip is due later by the length of the skip. A local time that
    occurs twice is due the first time, but an expression for every hour is due both times.
    """
    clocks = ZoneInfo(zone)
    here = after.astimezone(clocks)
    local: datetime = _local_times(cron, here).get_next(datetime)
    tick = local.replace(tzinfo=clocks)
    before = (after - _CHANGE).astimezone(clocks)
    offsets = {before.utcoffset(), here.utcoffset(), tick.utcoffset()}
    if len(offsets) == 1 and _shown(tick) == local:
        return tick.astimezone(UTC)
    # The clocks change about now: check all local times nearby, each as often as it occurs.
    every_hour = set(_ALL_HOURS) <= set(_hours(cron))
    times = _local_times(cron, here - _CHANGE)
    found: list[datetime] = []
    while not found or local < _shown(min(found).astimezone(clocks)) + _CHANGE:
        local = times.get_next(datetime)
        moments = [local.replace(tzinfo=clocks)]
        if every_hour and _shown(again := local.replace(tzinfo=clocks, fold=1)) == local:
            moments.append(again)
        found += [utc for moment in moments if (utc := moment.astimezone(UTC)) > after]
    return min(found)


def previous_tick(cron: str, until: datetime) -> datetime:
    """Return the last due time of a checked ``cron`` up to ``until`` (inclusive), in UTC."""
    second = until.astimezone(UTC).replace(microsecond=0) + timedelta(seconds=1)
    local: datetime = _local_times(cron, second).get_prev(datetime)
    return local.replace(tzinfo=UTC)


def _hours(cron: str) -> Sequence[int | str]:
    """Return the hours of an expression, however it says them."""
    hours = croniter.expand(cron)[0][1]
    return _ALL_HOURS if hours == ["*"] else hours


def _local_times(cron: str, after: datetime) -> croniter:
    return croniter(cron, after.replace(tzinfo=None), max_years_between_matches=_MOST_YEARS)


def _shown(moment: datetime) -> datetime:
    """Return the local time of a moment in its zone."""
    return moment.astimezone(UTC).astimezone(moment.tzinfo).replace(tzinfo=None, fold=0)
