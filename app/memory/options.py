"""How episodes are looked for, and what age does to them: what an operator may choose. Pure."""

from dataclasses import dataclass, field

from app.memory.scoring import ScoringOptions
from app.memory.stages import Ages


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What an operator may choose.

    Attributes:
        candidates: how many are scored for a query, at least.
        aged_cosine: what has aged is found only if it is as near as that.
        embed_within_s: how long a query may take to be embedded; then words alone count.
        consolidate_cosine: those that become one are nearer to each other than that.
        consolidate_days: and ended within so many days.
        tend_every_s: how long a tenant's are left alone before they are looked after again.
        scoring: what each term of a score weighs.
        ages: when episodes have aged.
    """

    candidates: int = 20
    aged_cosine: float = 0.8
    embed_within_s: float = 2.0
    consolidate_cosine: float = 0.95
    consolidate_days: float = 7.0
    tend_every_s: float = 3600.0
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    ages: Ages = field(default_factory=Ages)
