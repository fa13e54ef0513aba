"""Stages of an episode by its age. Pure.

Age moves an episode to the next stage, and never deletes it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from bottega.errors import InvalidInputError


class AgeStage(StrEnum):
    """The stage of an episode's life."""

    ACTIVE = "active"
    MATURE = "mature"
    """Similar episodes may be consolidated."""
    AGED = "aged"
    """The trace is in cold storage; only queries with a near vector find it."""
    ARCHIVED = "archived"
    """Not searchable; readable by id."""


@dataclass(frozen=True, slots=True)
class AgeThresholds:
    """The greatest age of each stage, and the retention of deleted episodes, in days.

    Raises:
        InvalidInputError: they do not rise, or are negative.
    """

    active_days: float = 30.0
    mature_days: float = 180.0
    aged_days: float = 365.0
    deleted_days: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.active_days <= self.mature_days <= self.aged_days:
            raise InvalidInputError(
                "the ages of mature, aged and archived episodes must rise: "
                f"{self.active_days:g}, {self.mature_days:g}, {self.aged_days:g} days"
            )
        if self.deleted_days < 0:
            raise InvalidInputError("deleted episodes must be kept for at least 0 days")

    def stage(self, at: datetime, now: datetime) -> AgeStage:
        """Return the stage of an episode that ended ``at``; a future time is active."""
        age = now - at
        if age <= timedelta(days=self.active_days):
            return AgeStage.ACTIVE
        if age <= timedelta(days=self.mature_days):
            return AgeStage.MATURE
        return AgeStage.AGED if age <= timedelta(days=self.aged_days) else AgeStage.ARCHIVED

    def begins(self, stage: AgeStage, now: datetime) -> datetime:
        """Return the time before which episodes of ``stage``, or a later one, ended."""
        days = {
            AgeStage.ACTIVE: 0.0,
            AgeStage.MATURE: self.active_days,
            AgeStage.AGED: self.mature_days,
            AgeStage.ARCHIVED: self.aged_days,
        }
        return now - timedelta(days=days[stage])

    def purged(self, deleted_at: datetime, now: datetime) -> bool:
        """Return true if an episode deleted then must be removed for good."""
        return now - deleted_at > timedelta(days=self.deleted_days)
