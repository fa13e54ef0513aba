"""Evidence for a pattern from its applications. Pure.

Runs count by assignment, not by adherence: a run may ignore a pattern because the pattern is bad.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import fsum, sqrt
from typing import NamedTuple
from uuid import UUID

from bottega.memory.episodes.options import LearningOptions
from bottega.memory.patterns.pattern import APPLIED, Arm, Baseline, Evidence, PatternState
from bottega.memory.patterns.validation import (
    BettingEvidence,
    Tally,
    Verdict,
    following,
    judged,
    worse,
)

_MANY = 20
"""Similar tasks that suffice for a reliable baseline."""


class Group(NamedTuple):
    """Equal applications of one version: by arm, success and baseline."""

    arm: Arm
    good: bool
    baseline: Baseline
    n: int
    lately: int  # of them, in the time that the verdict counts
    timed: int = 0  # number with a known duration
    seconds: float = 0.0  # sum of durations
    counted: int = 0  # number with known tokens
    tokens: float = 0.0  # sum of tokens


@dataclass(frozen=True, slots=True)
class WeighedEvidence:
    """Summary of the applications of a pattern's current version.

    Attributes:
        e_value: over all applications that were given it, each against its baseline, but no less
            than the rate of runs without it.
        time_saved_s, tokens_saved: mean, against runs that were not given it; ``None``: unknown.
    """

    lately: Tally = Tally()  # given it, in the time that the verdict counts
    baseline: Baseline = Baseline()  # mean of these
    e_value: float = 1.0
    given: Tally = Tally()  # given it at any time
    latest: Tally = Tally()  # the last few of these
    used: Tally = Tally()
    withheld: Tally = Tally()
    time_saved_s: float | None = None
    tokens_saved: float | None = None


def weigh(groups: Iterable[Group], latest: Tally | None = None) -> WeighedEvidence:
    """Summarise applications; ``latest`` are the last few that were given the pattern."""
    groups = list(groups)
    given = [each for each in groups if each.arm in APPLIED]
    others = [each for each in groups if each.arm not in APPLIED]
    lately = [each._replace(n=each.lately) for each in given]
    least = _cautious_rate(_tally(others))
    evidence = BettingEvidence()
    for each in given:
        name, rate, n = each.baseline.name, each.baseline.rate, each.baseline.n
        if name != "like_tasks" or n < _MANY:
            rate = max(rate, least)
        if each.arm is Arm.REPORTED:  # lower ones are unverified
            rate = max(rate, Baseline().rate)
        evidence = evidence.after(each.good, rate, each.n)
    return WeighedEvidence(
        lately=_tally(lately),
        baseline=_baseline(lately),
        e_value=evidence.e_value,
        given=_tally(given),
        latest=latest or Tally(),
        used=_tally([each for each in groups if each.arm is Arm.USED]),
        withheld=_tally([each for each in groups if each.arm is Arm.WITHHELD]),
        time_saved_s=_difference(
            *(_mean((each.seconds, each.timed) for each in side) for side in (others, given))
        ),
        tokens_saved=_difference(
            *(_mean((each.tokens, each.counted) for each in side) for side in (others, given))
        ),
    )


def _cautious_rate(without: Tally) -> float:
    """Return the success rate of runs without it, plus one standard error; 0 without any.

    Early baselines are shrunk towards 0.5, which makes a pattern look good if nearly every task
    succeeds. A higher baseline makes bets win less.
    """
    if not without.n:
        return 0.0
    rate = (without.good + 1) / (without.n + 2)
    return rate + sqrt(rate * (1 - rate) / (without.n + 3))


def _tally(groups: Iterable[Group]) -> Tally:
    groups = list(groups)
    return Tally(sum(each.n for each in groups if each.good), sum(each.n for each in groups))


def _baseline(groups: Sequence[Group]) -> Baseline:
    """Return the mean baseline of applications, with the commonest name."""
    names: Counter[str] = Counter()
    for each in groups:
        names[each.baseline.name] += each.n
    rate = _mean((each.baseline.rate * each.n, each.n) for each in groups)
    tasks = _mean((each.baseline.n * each.n, each.n) for each in groups)
    if rate is None or tasks is None:
        return Baseline()
    return Baseline(min(names, key=lambda each: (-names[each], each)), rate, round(tasks))


def _mean(sums: Iterable[tuple[float, int]]) -> float | None:
    """Return the mean of several sums, each with its number; ``None`` if there are none."""
    sums = list(sums)
    number = sum(n for _, n in sums)
    return fsum(total for total, _ in sums) / number if number else None


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of a pattern's validation."""

    pattern_id: UUID
    version: int
    was: PatternState
    state: PatternState
    verdict: Verdict
    good: int  # of the applications in the time that counts
    applications: int
    success_rate: float | None
    p_value: float
    confidence: float
    e_value: float
    baseline: Baseline
    reason: str | None = None


def validated(
    pattern_id: UUID,
    version: int,
    state: PatternState,
    weighed: WeighedEvidence,
    options: LearningOptions,
) -> Validation:
    """Validate a pattern."""
    verdict, p_value, confidence = judged(weighed.lately, weighed.baseline.rate, options)
    after = following(state, verdict, weighed.e_value, options)
    reason = falling(weighed, options) if state is PatternState.VALIDATED else None
    return Validation(
        pattern_id=pattern_id,
        version=version,
        was=state,
        state=after if reason is None else PatternState.IN_REVIEW,
        verdict=verdict,
        good=weighed.lately.good,
        applications=weighed.lately.n,
        success_rate=weighed.lately.rate if weighed.lately.n else None,
        p_value=p_value,
        confidence=confidence,
        e_value=weighed.e_value,
        baseline=weighed.baseline,
        reason=reason,
    )


def falling(weighed: WeighedEvidence, options: LearningOptions) -> str | None:
    """Return the reason to review a validated pattern at once, or ``None``."""
    latest, given = weighed.latest, weighed.given
    earlier = Tally(given.good - latest.good, given.n - latest.n)
    if worse(latest, earlier, options):
        return (
            f"declined: {latest.good} of the last {latest.n} applications went well, and "
            f"{earlier.good} of the {earlier.n} before"
        )
    if worse(weighed.used, weighed.withheld, options):
        return (
            f"does harm: {weighed.used.good} of {weighed.used.n} runs that used it went well, and "
            f"{weighed.withheld.good} of {weighed.withheld.n} that it was withheld from"
        )
    return None


def evidence_of(
    before: Evidence, found: Validation, weighed: WeighedEvidence, now: datetime
) -> Evidence:
    """Return the evidence to store; the old one, with its time, if nothing changed. With too few
    applications, confidence and p-value keep their old values."""
    if not weighed.given.n and before.verdict is None:
        return before
    few = found.verdict is Verdict.INSUFFICIENT_EVIDENCE
    rate = found.success_rate
    after = replace(
        before,
        applications=found.applications,
        success_rate=rate,
        time_saved_s=weighed.time_saved_s,
        tokens_saved=weighed.tokens_saved,
        uplift=None if rate is None else rate - found.baseline.rate,
        confidence=before.confidence if few else found.confidence,
        p_value=before.p_value if few else found.p_value,
        e_value=found.e_value,
        baseline=found.baseline,
        verdict=found.verdict.value,
    )
    return before if after == before else replace(after, validated_at=now)
