"""How episodes are looked for, and what age does to them: what an operator may choose. Pure."""

from dataclasses import dataclass, field

from bottega.memory.scoring import ScoringOptions
from bottega.memory.stages import Ages


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What an operator may choose.

    Attributes:
        candidates: how many are scored for a query, at least.
        aged_cosine: what has aged is found only if it is as near as that.
        vector_deadline_ms: how long a query may take to be embedded; then words alone count.
        consolidate_cosine: those that become one are nearer to each other than that.
        consolidate_days: and ended within so many days.
        tend_every_s: how long a tenant's are left alone before they are looked after again.
        scoring: what each term of a score weighs.
        ages: when episodes have aged.
    """

    candidates: int = 20
    aged_cosine: float = 0.8
    vector_deadline_ms: float = 300.0
    consolidate_cosine: float = 0.95
    consolidate_days: float = 7.0
    tend_every_s: float = 3600.0
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    ages: Ages = field(default_factory=Ages)


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """What an operator may choose of how runs are learned from (spec page 4, M22 to M24).

    Attributes:
        trial_share: of the runs that a candidate applies to, which are given it.
        withheld_share: of the runs that a validated pattern applies to, which are not given it.
        min_applications: fewer say nothing.
        min_rate: of the applications that must have gone well.
        significance: the p-value of the verdict must be below that.
        min_confidence: from which a pattern is validated.
        promotion_e: the e-value that a candidate is promoted from.
        fdr: false discovery rate of the set that a night's report names.
        fdr_required: whether only patterns of that set are promoted.
        evidence_days: how far back the verdict looks.
        decline_p: below that a pattern that did worse is reviewed.
        decline_each: applications that each side of such a comparison must have.
    """

    trial_share: float = 0.5
    withheld_share: float = 0.1
    min_applications: int = 5
    min_rate: float = 0.6
    significance: float = 0.05
    min_confidence: float = 0.7
    promotion_e: float = 20.0
    fdr: float = 0.05
    fdr_required: bool = False
    evidence_days: float = 90.0
    decline_p: float = 0.01
    decline_each: int = 10
