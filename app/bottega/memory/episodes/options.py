"""Options of retrieval, ageing and learning that an operator may set. Pure."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from bottega.errors import InvalidInputError
from bottega.memory.episodes.episode import StorageState
from bottega.memory.episodes.scoring import ScoringOptions

MOST_TENDED = 20_000
"""Episodes of a tenant that each step of a night handles, so that other tenants get their turn."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of retrieval and ageing; the settings ``memory_…`` describe them.

    Raises:
        InvalidInputError: the ages do not rise, or are negative.
    """

    candidates: int = 20
    aged_cosine: float = 0.8
    vector_deadline_ms: float = 300.0
    consolidate_cosine: float = 0.95
    consolidate_days: float = 7.0
    active_days: float = 30.0
    mature_days: float = 180.0
    aged_days: float = 365.0
    deleted_days: float = 30.0
    scoring: ScoringOptions = field(default_factory=ScoringOptions)

    def __post_init__(self) -> None:
        if not 0 <= self.active_days <= self.mature_days <= self.aged_days:
            raise InvalidInputError(
                "the ages of mature, aged and archived episodes must rise: "
                f"{self.active_days:g}, {self.mature_days:g}, {self.aged_days:g} days"
            )

    def begins(self, stage: StorageState, now: datetime) -> datetime:
        """Return the time before which episodes of ``stage``, or a later one, ended."""
        days = {
            StorageState.MATURE: self.active_days,
            StorageState.AGED: self.mature_days,
            StorageState.ARCHIVED: self.aged_days,
        }
        return now - timedelta(days=days[stage])


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """Options of learning from runs; the settings ``learning_…`` describe them."""

    trial_share: float = 0.1
    withheld_share: float = 0.1
    min_applications: int = 5
    min_rate: float = 0.6
    significance: float = 0.05
    min_confidence: float = 0.7
    promotion_e: float = 20.0
    evidence_days: float = 90.0
    decline_p: float = 0.01
    decline_each: int = 10
