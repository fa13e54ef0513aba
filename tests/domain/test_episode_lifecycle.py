"""Lifecycle stages of episodes, by age."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import InvalidInputError
from bottega.memory.episodes.lifecycle import AgeStage, AgeThresholds

NOW = datetime(2026, 11, 21, tzinfo=UTC)
AGES = AgeThresholds()


@pytest.mark.parametrize(
    ("days", "stage"),
    [
        (-1, AgeStage.ACTIVE),
        (0, AgeStage.ACTIVE),
        (30, AgeStage.ACTIVE),
        (30.01, AgeStage.MATURE),
        (180, AgeStage.MATURE),
        (180.01, AgeStage.AGED),
        (365, AgeStage.AGED),
        (365.01, AgeStage.ARCHIVED),
        (40_000, AgeStage.ARCHIVED),
    ],
)
def test_age_determines_the_stage(days: float, stage: AgeStage) -> None:
    assert AGES.stage(NOW - timedelta(days=days), NOW) is stage


@given(st.timedeltas(timedelta(0), timedelta(days=1000)))
def test_stage_begins_at_its_age(age: timedelta) -> None:
    order = list(AgeStage)
    reached = order.index(AGES.stage(NOW - age, NOW))
    for place, stage in enumerate(order[1:], 1):
        assert (NOW - age < AGES.begins(stage, NOW)) == (reached >= place)


def test_deleted_episode_is_kept_for_a_while() -> None:
    assert not AGES.purged(NOW - timedelta(days=30), NOW)
    assert AGES.purged(NOW - timedelta(days=30, seconds=1), NOW)


@pytest.mark.parametrize("days", [(31.0, 30.0, 365.0), (30.0, 400.0, 365.0), (-1.0, 30.0, 365.0)])
def test_ages_that_do_not_rise_are_refused(days: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidInputError, match="must rise"):
        AgeThresholds(*days)


def test_negative_retention_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        AgeThresholds(deleted_days=-1)
