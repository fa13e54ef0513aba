"""Options of retrieval and learning that an operator may set. Pure."""

from dataclasses import dataclass, field

from bottega.memory.episodes.scoring import ScoringOptions


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of retrieval; the settings ``memory_…`` describe them."""

    vector_deadline_ms: float = 300.0
    scoring: ScoringOptions = field(default_factory=ScoringOptions)


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
