"""Lifecycle stages of episodes, by age."""

from datetime import UTC, datetime, timedelta

import pytest

from bottega.errors import InvalidInputError
from bottega.memory.episodes.episode import StorageState
from bottega.memory.episodes.options import MemoryOptions

NOW = datetime(2026, 11, 21, tzinfo=UTC)
OPTIONS = MemoryOptions()


def test_stage_begins_at_its_age() -> None:
    begins = [
        OPTIONS.begins(stage, NOW)
        for stage in (StorageState.MATURE, StorageState.AGED, StorageState.ARCHIVED)
    ]
    assert begins == [NOW - timedelta(days=days) for days in (30, 180, 365)]


@pytest.mark.parametrize("days", [(31.0, 30.0, 365.0), (30.0, 400.0, 365.0), (-1.0, 30.0, 365.0)])
def test_ages_that_do_not_rise_are_refused(days: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidInputError, match="must rise"):
        MemoryOptions(active_days=days[0], mature_days=days[1], aged_days=days[2])
