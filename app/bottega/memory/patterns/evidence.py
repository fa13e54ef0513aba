"""Evidence for a pattern from its applications. Pure.

Runs count by assignment, not by adherence: a run may ignore a pattern because the pattern is bad.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from math import fsum, sqrt
from typing import NamedTuple
from uuid import UUID

from bottega.memory.episodes.options import LearningOptions
from bottega.memory.patterns import validation
from bottega.memory.patterns.pattern import APPLIED, Arm, Baseline, Evidence, PatternState
from bottega.memory.patterns.validation import Tally, Verdict

_MANY = 20
"""Similar tasks that suffice for a reliable baseline."""


class Group(NamedTuple):
    """Equal applications of one version: by arm, success and baseline.

    Attributes:
        n: number. lately: number in the time that the verdict counts.
        timed, seconds: number with a known duration, and the sum of durations.
        counted, tokens: number with known tokens, and the sum of tokens.
    """

    arm: Arm
    good: bool
    baseline: Baseline
    n: int
    lately: int
    timed: int = 0
    seconds: float = 0.0
    counted: int = 0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class WeighedEvidence:
    """Summary of the applications of a pattern's current version.

    Attributes:
        lately: applications that were given it, in the time that the verdict counts.
        baseline: mean of their baselines.
        e_value: over all applications that were given it, each against its baseline, but no less
            than the rate of runs without it.
        given: all applications that were given it.
        latest: the last few of these.
        used, withheld: of a validated pattern's runs.
        time_saved_s, tokens_saved: mean, against runs that were not given it; ``None``: unknown.
    """

    lately: Tally = Tally()
    baseline: Baseline = Baseline()
    e_value: float = 1.0
    given: Tally = Tally()
    latest: Tally = Tally()
    used: Tally = Tally()
    withheld: Tally = Tally()
    time_saved_s: float | None = None
    tokens_saved: float | None = None


def weigh(groups: Iterable[Group], latest: Tally | None = None) -> WeighedEvidence:
    """Summarise applications; ``latest`` are the last few that were given the pattern."""
    groups = list(groups)
    given = [each for each in groups if each.arm in APPLIED]
    others = [each for each in groups if each.arm not in APPLIED]
    lately = _tally(given, lambda each: each.lately)
    least = _cautious_rate(_tally(others))
    evidence = validation.BettingEvidence()
    for each in given:
        rate = each.baseline.rate if _is_known(each.baseline) else max(each.baseline.rate, least)
        if each.arm is Arm.REPORTED:  # lower ones are unverified
            rate = max(rate, Baseline().rate)
        evidence = evidence.after(each.good, rate, each.n)
    seconds = (lambda each: each.timed), (lambda each: each.seconds)
    tokens = (lambda each: each.counted), (lambda each: each.tokens)
    return WeighedEvidence(
        lately=lately,
        baseline=_baseline(given, lately.n),
        e_value=evidence.e_value,
        given=_tally(given),
        latest=latest or Tally(),
        used=_tally([each for each in groups if each.arm is Arm.USED]),
        withheld=_tally([each for each in groups if each.arm is Arm.WITHHELD]),
        time_saved_s=_saved(given, others, *seconds),
        tokens_saved=_saved(given, others, *tokens),
    )


def _is_known(baseline: Baseline) -> bool:
    """Return true for a baseline of many similar tasks."""
    return baseline.name == "like_tasks" and baseline.n >= _MANY


def _cautious_rate(without: Tally) -> float:
    """Return the success rate of runs without it, plus one standard error; 0 without any.

    Early baselines are shrunk towards 0.5, which makes a pattern look good if nearly every task
    succeeds. A higher baseline makes bets win less.
    """
    if not without.n:
        return 0.0
    rate = (without.good + 1) / (without.n + 2)
    return rate + sqrt(rate * (1 - rate) / (without.n + 3))


def _tally(groups: Iterable[Group], count: Callable[[Group], int] = lambda each: each.n) -> Tally:
    counts = [(each.good, count(each)) for each in groups]
    return Tally(sum(n for good, n in counts if good), sum(n for _, n in counts))


def _baseline(given: Iterable[Group], n: int) -> Baseline:
    """Return the mean baseline of the applications that count, with the commonest name."""
    names: Counter[str] = Counter()
    of: list[tuple[float, int, int]] = []
    for each in given:
        names[each.baseline.name] += each.lately
        of.append((each.baseline.rate, each.baseline.n, each.lately))
    if not n:
        return Baseline()
    name = min(names, key=lambda each: (-names[each], each))
    rate = fsum(rate * times for rate, _, times in of) / n
    return Baseline(name, rate, round(fsum(size * times for _, size, times in of) / n))


def _saved(
    given: Iterable[Group],
    others: Iterable[Group],
    times: Callable[[Group], int],
    total: Callable[[Group], float],
) -> float | None:
    """Return the mean without the pattern minus the mean with it."""
    means = []
    for side in (others, given):
        side = list(side)
        n = sum(map(times, side))
        if not n:
            return None
        means.append(fsum(map(total, side)) / n)
    return means[0] - means[1]


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of a pattern's validation.

    Attributes:
        was, state: before and after.
        good, applications: in the time that counts.
    """

    pattern_id: UUID
    version: int
    was: PatternState
    state: PatternState
    verdict: Verdict
    good: int
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
    judgement = validation.judged(weighed.lately, weighed.baseline.rate, options)
    after = validation.following(state, judgement.verdict, weighed.e_value, options)
    reason = None
    if state is PatternState.VALIDATED:
        reason = falling(weighed, options)
        if reason is not None:
            after = PatternState.IN_REVIEW
    return Validation(
        pattern_id=pattern_id,
        version=version,
        was=state,
        state=after,
        verdict=judgement.verdict,
        good=weighed.lately.good,
        applications=weighed.lately.n,
        success_rate=weighed.lately.rate if weighed.lately.n else None,
        p_value=judgement.p_value,
        confidence=judgement.confidence,
        e_value=weighed.e_value,
        baseline=weighed.baseline,
        reason=reason,
    )


def falling(weighed: WeighedEvidence, options: LearningOptions) -> str | None:
    """Return the reason to review a validated pattern at once, or ``None``."""
    latest, given = weighed.latest, weighed.given
    earlier = Tally(given.good - latest.good, given.n - latest.n)
    if validation.worse(latest, earlier, options):
        return (
            f"declined: {latest.good} of the last {latest.n} applications went well, and "
            f"{earlier.good} of the {earlier.n} before"
        )
    if validation.worse(weighed.used, weighed.withheld, options):
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
