"""How old an episode is, and what that means (spec page 4, M15). Pure.

Age moves an episode on and never deletes it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from bottega.errors import InvalidInputError


class Stage(StrEnum):
    """What age makes of an episode."""

    ACTIVE = "active"
    MATURE = "mature"
    """May be merged with others like it."""
    AGED = "aged"
    """Its trace is in cold storage; it is found only by what is close to it."""
    ARCHIVED = "archived"
    """Not found any more; had by its id."""


@dataclass(frozen=True, slots=True)
class Ages:
    """Until what age, in days, an episode is in each stage; and how long one is kept that somebody
    has marked as deleted.

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
                "the ages at which an episode is mature, aged and archived must rise: "
                f"{self.active_days:g}, {self.mature_days:g}, {self.aged_days:g} days"
            )
        if self.deleted_days < 0:
            raise InvalidInputError("deleted episodes cannot be kept for less than 0 days")

    def stage(self, at: datetime, now: datetime) -> Stage:
        """The stage of what ended ``at``. What is yet to come is active."""
        age = now - at
        if age <= timedelta(days=self.active_days):
            return Stage.ACTIVE
        if age <= timedelta(days=self.mature_days):
            return Stage.MATURE
        return Stage.AGED if age <= timedelta(days=self.aged_days) else Stage.ARCHIVED

    def begins(self, stage: Stage, now: datetime) -> datetime:
        """What ended before this is in ``stage``, or in a later one."""
        days = {
            Stage.ACTIVE: 0.0,
            Stage.MATURE: self.active_days,
            Stage.AGED: self.mature_days,
            Stage.ARCHIVED: self.aged_days,
        }
        return now - timedelta(days=days[stage])

    def purged(self, deleted_at: datetime, now: datetime) -> bool:
        """Whether what was marked as deleted then is to go for good."""
        return now - deleted_at > timedelta(days=self.deleted_days)
