"""The experiment with a pattern: each run gets a random arm, and the results are the evidence.

A run counts towards the arm that it was assigned, even if the run did not follow the pattern.
Otherwise the evidence would lack the runs that ignored a pattern because it was bad.

A run that got the pattern is an *application*. A test after each application would sooner or later
find significance in noise. So there are only four interim tests, after 8, 16, 32 and 64
applications, and each test has its own level of significance (:data:`LOOKS`). Statistics calls an
interim test a *look*. The four looks together promote at most 3 % of the patterns that have no
effect. They promote 95 % of the patterns that raise the success rate from 0.5 to 0.8. Validated
patterns are tested for harm by the same looks. After the fourth look, a new series begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from math import exp, fsum, lgamma, log, log1p, sqrt
from statistics import fmean
from typing import Any, NamedTuple
from uuid import UUID

from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.pattern import APPLIED, Arm, Baseline, Pattern, PatternState

LOOKS = {8: 0.001, 16: 0.005, 32: 0.015, 64: 0.04}
"""Levels of significance, by the number of applications at which a test is made."""
EVIDENCE_DAYS = 90
"""Maximum age in days of applications that count towards the verdict."""
LEAST_APPLICATIONS = 5
"""Minimum number of applications for a verdict."""
_LEAST_CONFIDENCE = 0.7
_NORMAL_95 = 1.96


class Verdict(StrEnum):
    INSUFFICIENT_EVIDENCE = "INSUFFICIENT_EVIDENCE"
    VALIDATED = "VALIDATED"
    CANDIDATE = "CANDIDATE"
    IN_REVIEW = "IN_REVIEW"


class Tally(NamedTuple):
    """Number of applications, and number of successful applications among them."""

    good: int = 0
    n: int = 0

    @property
    def rate(self) -> float:
        """Share of successes; 0 if there are no applications."""
        return self.good / self.n if self.n else 0.0

    @property
    def bad(self) -> "Tally":
        """Tally in which the failures of this tally count as successes."""
        return Tally(self.n - self.good, self.n)

    @property
    def expected(self) -> float:
        """Mean of the Beta posterior of the success rate, from a uniform prior."""
        return (self.good + 1) / (self.n + 2)

    @property
    def variance(self) -> float:
        """Variance of the success rate after one more success and one more failure."""
        return self.expected * (1 - self.expected) / (self.n + 2)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the success rate, by the formula of :func:`pooled_difference`."""
        half = _NORMAL_95 * sqrt(self.variance)
        return max(0.0, self.expected - half), min(1.0, self.expected + half)

    @classmethod
    def of(cls, successes: Iterable[bool]) -> "Tally":
        values = [*successes]
        return cls(sum(values), len(values))

    def without(self, some: "Tally") -> "Tally":
        """Return the tally of all applications of this tally except ``some``."""
        return Tally(self.good - some.good, self.n - some.n)


class Comparison(NamedTuple):
    """Comparison of the applications of a pattern with runs without the pattern."""

    given: Tally = Tally()
    without: Tally = Tally()  # runs without the pattern, assigned by the experiment or reported
    known_rate: float | None = None  # reported success rate of tasks without the pattern

    @property
    def baseline(self) -> Baseline:
        """Success rate without the pattern: the measured rate, else the reported rate, else 0.5."""
        if self.without.n:
            return Baseline("without", self.without.rate, self.without.n)
        if self.known_rate is not None:
            return Baseline("given", self.known_rate)
        return Baseline()

    @property
    def p_better(self) -> float:
        """The p-value of the hypothesis that the pattern does not help. The test is one-sided:
        Fisher's exact test, or the binomial test if there are no runs without the pattern."""
        if self.without.n:
            return fisher_p(self.given, self.without)
        return binomial_p(self.given, self.baseline.rate)

    @property
    def p_worse(self) -> float:
        """The p-value of the hypothesis that the pattern does no harm; see :attr:`p_better`."""
        if self.without.n:
            return fisher_p(self.without, self.given)
        return binomial_p(self.given.bad, 1 - self.baseline.rate)

    @property
    def confidence(self) -> float:
        """Confidence, 0 to 1, from the success rate, the number of applications and the p-value."""
        often = 1 - exp(-self.given.n / 20)
        sure = 0.5 * self.given.rate + 0.3 * often + 0.2 * (1 - self.p_better)
        return min(1.0, max(0.0, sure))

    @property
    def verdict(self) -> Verdict:
        """Verdict on the pattern from only the applications of this comparison."""
        if self.given.n < LEAST_APPLICATIONS:
            return Verdict.INSUFFICIENT_EVIDENCE
        if self.given.rate < 0.6 or self.p_better >= 0.05:
            return Verdict.IN_REVIEW
        return Verdict.VALIDATED if self.confidence >= _LEAST_CONFIDENCE else Verdict.CANDIDATE

    def __str__(self) -> str:
        text = f"{self.given.good} of {self.given.n} with it, "
        if self.without.n:
            return text + f"{self.without.good} of {self.without.n} without"
        if self.known_rate is not None:
            return text + f"a rate of {self.known_rate:.2g} without"
        return text + "none without"


def pooled_difference(pairs: Sequence[tuple[Tally, Tally]]) -> tuple[float, float, float]:
    """Return the difference of two groups' success rates, and the difference's 95 % interval.

    The function weights the pairs' differences as Mantel and Haenszel (1959) do. For the interval,
    each tally gets one more success and one more failure (Agresti and Caffo, 2000), so the interval
    is wide for few runs.

    Args:
        pairs: pairs of tallies, such as with and without a pattern; no tally may be empty.

    Returns:
        The difference, and the lower and upper ends of the interval.
    """
    weights = [with_it.n * others.n / (with_it.n + others.n) for with_it, others in pairs]
    total = fsum(weights)
    shares = [weight / total for weight in weights]
    difference = _weighed(shares, (a.rate - b.rate for a, b in pairs))
    middle = _weighed(shares, (a.expected - b.expected for a, b in pairs))
    squares = [share * share for share in shares]
    variance = _weighed(squares, (a.variance + b.variance for a, b in pairs))
    half = _NORMAL_95 * sqrt(variance)
    return difference, max(-1.0, middle - half), min(1.0, middle + half)


def _weighed(weights: Iterable[float], values: Iterable[float]) -> float:
    return fsum(weight * value for weight, value in zip(weights, values, strict=True))


# --- Exact tests ------------------------------------------------------------------------------


def binomial_p(tally: Tally, baseline: float) -> float:
    """Return the exact probability of at least this many successes at the rate ``baseline``."""
    good, n = tally
    if good <= 0 or baseline >= 1:
        return 1.0
    if baseline <= 0:
        return 0.0
    well, badly = log(baseline), log1p(-baseline)
    return _sum(_ways(n, k) + k * well + (n - k) * badly for k in range(good, n + 1))


def fisher_p(better: Tally, other: Tally) -> float:
    """Return the p-value of Fisher's exact one-sided test; 1 if one tally is empty."""
    good, n = better.good + other.good, better.n + other.n
    if not (better.n and other.n):
        return 1.0
    places = range(better.good, min(good, better.n) + 1)
    of_all = _ways(n, good)
    return _sum(_ways(better.n, k) + _ways(other.n, good - k) - of_all for k in places)


def _ways(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _sum(logarithms: Iterable[float]) -> float:
    return min(1.0, fsum(map(exp, logarithms)))


# --- Arms -------------------------------------------------------------------------------------


def uniform(salt: UUID, run: UUID, pattern_id: UUID, version: int, kind: str) -> float:
    """Return a uniformly distributed number in [0, 1); numbers of different kinds are independent.

    The number is a hash of the arguments, so a resumed run keeps its arm. A retry of a run gets
    the arm of the first run, because ``run`` is then the id of the first run. The salt is secret,
    so the author of a task cannot choose the arm.
    """
    content = b"".join((salt.bytes, run.bytes, pattern_id.bytes, f"{version} {kind}".encode()))
    # Use 53 bits: a float has no more bits, and further bits could round the number up to 1.
    return (int.from_bytes(sha256(content).digest()[:8]) >> 11) / 2**53


def arm_of(
    state: PatternState,
    salt: UUID,
    run: UUID,
    pattern_id: UUID,
    version: int,
    options: LearningOptions,
) -> Arm:
    """Assign a run to an arm: used or withheld if validated, trial or control if a candidate."""
    if state is PatternState.VALIDATED:
        withheld = uniform(salt, run, pattern_id, version, "withheld") < options.withheld_share
        return Arm.WITHHELD if withheld else Arm.USED
    on_trial = uniform(salt, run, pattern_id, version, "trial") < options.trial_share
    return Arm.TRIAL if on_trial else Arm.CONTROL


# --- Evidence ---------------------------------------------------------------------------------


class Side(NamedTuple):
    """One side of the comparison for a version: runs with, or runs without, the pattern."""

    lately: Tally = Tally()  # runs of the last EVIDENCE_DAYS days
    since: Tally = Tally()  # runs in the current series of looks
    known_rate: float | None = None  # mean of the reported baselines, if each run has one
    seconds: float | None = None  # mean of the known durations
    tokens: float | None = None  # mean of the known numbers of tokens


class Sides(NamedTuple):
    given: Side = Side()
    without: Side = Side()


def _saved(with_pattern: float | None, without: float | None) -> float | None:
    return None if with_pattern is None or without is None else without - with_pattern


class Validation(NamedTuple):
    """A pattern before and after a validation, and the comparison that gave the verdict."""

    was: Pattern
    now: Pattern
    lately: Comparison


def validated(was: Pattern, sides: Sides, now: datetime) -> Validation:
    """Validate a pattern: update its evidence and, if a look (interim test) is due, its state.

    If no evidence changed, the pattern keeps the old evidence and the time of its validation. If
    there are too few applications, confidence and p-value keep their old values.
    """
    given, without = sides
    after = looked_at(was, Comparison(given.since, without.since, given.known_rate), now)
    lately = Comparison(given.lately, without.lately, given.known_rate)
    verdict, old = lately.verdict, was.evidence
    rate = lately.given.rate if lately.given.n else None
    is_sure = verdict is not Verdict.INSUFFICIENT_EVIDENCE
    evidence = replace(
        old,
        applications=lately.given.n,
        success_rate=rate,
        time_saved_s=_saved(given.seconds, without.seconds),
        tokens_saved=_saved(given.tokens, without.tokens),
        uplift=None if rate is None else rate - lately.baseline.rate,
        confidence=lately.confidence if is_sure else old.confidence,
        p_value=lately.p_better if is_sure else old.p_value,
        baseline=lately.baseline,
        verdict=verdict.value,
    )
    if evidence != old and (old.verdict or given.since.n or given.lately.n):
        after = after.with_changes(evidence=replace(evidence, validated_at=now))
    return Validation(was, after, lately)


def looked_at(pattern: Pattern, found: Comparison, now: datetime) -> Pattern:
    """Make the look (interim test) that is due. It may change the pattern's state.

    Args:
        found: comparison of the runs in the current series of looks.
    """
    number = max((each for each in LOOKS if each <= found.given.n), default=0)
    state, life = pattern.state, pattern.lifecycle
    if number <= life.looks or state not in (PatternState.CANDIDATE, PatternState.VALIDATED):
        return pattern
    level, on_trial = LOOKS[number], state is PatternState.CANDIDATE
    p_value = found.p_better if on_trial else found.p_worse
    reason = f"{found}: p = {p_value:.1g}, level {level:g}"
    is_known = found.baseline.name != Baseline().name
    if p_value >= level or not is_known:
        end = "stays on trial" if on_trial else "stays validated"
    elif not on_trial:
        state, end = PatternState.IN_REVIEW, "goes into review"
    elif found.confidence < _LEAST_CONFIDENCE:
        end = f"stays on trial, with a confidence of {found.confidence:.2f} of {_LEAST_CONFIDENCE}"
    else:
        state, end = PatternState.VALIDATED, "is validated"
    decision = f"{reason}: {end}"
    life = replace(life, state=state, looks=number, decision=decision)
    if state is not pattern.state:
        life = replace(life, reason=decision if state is PatternState.IN_REVIEW else None)
    if state is PatternState.VALIDATED and (on_trial or number == max(LOOKS)):
        life = replace(life, looks=0, looks_since=now)  # the next series begins
    return pattern.with_changes(lifecycle=life)


class Judged(NamedTuple):
    """An application whose outcome is known."""

    at: datetime
    arm: str
    good: bool
    baseline_rate: float | None

    @property
    def stage(self) -> str:
        """The state of the pattern at the application; ``reported``: a client reported it."""
        return _STAGES.get(self.arm, "reported")


_STAGES: Mapping[str, str] = {
    Arm.TRIAL: "trial",
    Arm.CONTROL: "trial",
    Arm.USED: "validated",
    Arm.WITHHELD: "validated",
}


def history(applications: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return the evidence after each application, or after 40 evenly spaced applications.

    Each point has a time ``at``, a ``stage``, and figures about the runs of the stage up to this
    time: the numbers of runs with the pattern (``given``) and without it (``others``), the numbers
    of successful runs among these (``given_good``, ``others_good``), and the ``p_value``. The last
    point of a stage is about all runs of the stage.

    Args:
        applications: applications with a known outcome, oldest first.
    """
    points = []
    step = max(1, -(-len(applications) // 40))
    ends = {each.stage: number for number, each in enumerate(applications, start=1)}
    for number, last in enumerate(applications, start=1):
        if number % step == 0 or number == ends[last.stage]:
            alike = [each for each in applications[:number] if each.stage == last.stage]
            given = [each for each in alike if each.arm in APPLIED]
            others = [each for each in alike if each.arm not in APPLIED]
            rates = [each.baseline_rate for each in given]
            values = [each for each in rates if each is not None]
            rate = fmean(values) if values and len(values) == len(rates) else None
            tallies = Tally.of(each.good for each in given), Tally.of(each.good for each in others)
            so_far = Comparison(*tallies, rate)
            point = {"given": so_far.given.n, "given_good": so_far.given.good}
            point |= {"others": so_far.without.n, "others_good": so_far.without.good}
            about = {"at": last.at, "stage": last.stage, "p_value": so_far.p_better}
            points.append({**about, **point})
    return points
