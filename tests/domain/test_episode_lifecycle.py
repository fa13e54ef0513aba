"""Lifecycle stages of episodes, by age."""

from datetime import UTC, datetime, timedelta

from bottega.memory.episodes.episode import StorageState, ended_before

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def test_stage_begins_at_its_age() -> None:
    begins = [
        ended_before(stage, NOW)
        for stage in (StorageState.MATURE, StorageState.AGED, StorageState.ARCHIVED)
    ]
    assert begins == [NOW - timedelta(days=days) for days in (30, 180, 365)]
