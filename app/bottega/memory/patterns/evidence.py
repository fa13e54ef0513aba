"""The experiment about a pattern: random arms of its runs, and their evidence. Pure.

Runs count by assignment, not by adherence: a run may ignore a pattern because the pattern is bad.

Validation tests a pattern's applications against its baseline. The *verdict* is an exact test at
one time. Repeated every night, such tests would eventually find significance in noise. So promotion
also needs an *e-value*: the result of betting 1 against "no better than the baseline". By chance it
ever reaches 20 with probability 1/20 at most, however often one tests.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from math import exp, fsum, lgamma, log, log1p, sqrt
from statistics import fmean
from typing import Any, NamedTuple
from uuid import UUID

from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.pattern import APPLIED, Arm, Baseline, Pattern, PatternState

_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Rates that are bet on with equal stakes, as shares of the way from the baseline to 1."""
_LEAST_RATE = 1e-9


class Verdict(StrEnum):
    INSUFFICIENT_EVIDENCE = "INSUFFICIENT_EVIDENCE"
    VALIDATED = "VALIDATED"
    CANDIDATE = "CANDIDATE"
    IN_REVIEW = "IN_REVIEW"


class Tally(NamedTuple):
    """Number of applications, and of successful ones among them."""

    good: int = 0
    n: int = 0

    @property
    def rate(self) -> float:
        """Share of successes; 0 without applications."""
        return self.good / self.n if self.n else 0.0

    @property
    def expected(self) -> float:
        """Mean of the Beta posterior of the rate, from a uniform prior."""
        return (self.good + 1) / (self.n + 2)

    @property
    def variance(self) -> float:
        """Variance of that posterior."""
        return self.expected * (1 - self.expected) / (self.n + 3)

    @classmethod
    def of(cls, successes: Iterable[bool]) -> "Tally":
        counted = [*successes]
        return cls(sum(counted), len(counted))

    def without(self, some: "Tally") -> "Tally":
        """Return the rest, without some of these applications."""
        return Tally(self.good - some.good, self.n - some.n)


class Judgement(NamedTuple):
    """A verdict, and the statistics that it is based on."""

    verdict: Verdict
    p_value: float
    confidence: float  # 0 to 1, from success, number and p-value


def judged(tally: Tally, baseline: float, options: LearningOptions) -> Judgement:
    """Judge a pattern by its applications in the time that counts.

    Args:
        baseline: success rate of similar tasks without it, 0 to 1.
    """
    p_value = binomial_p(tally, baseline)
    often = 1 - exp(-tally.n / 20)
    sure = min(1.0, max(0.0, 0.5 * tally.rate + 0.3 * often + 0.2 * (1 - p_value)))
    if tally.n < options.min_applications:
        verdict = Verdict.INSUFFICIENT_EVIDENCE
    elif tally.rate < options.min_rate or p_value >= options.significance:
        verdict = Verdict.IN_REVIEW
    else:
        enough = sure >= options.min_confidence
        verdict = Verdict.VALIDATED if enough else Verdict.CANDIDATE
    return Judgement(verdict, p_value, sure)


def worse(one: Tally, than: Tally, options: LearningOptions) -> bool:
    """Return true if the first tally is significantly worse; false with too few applications."""
    enough = min(one.n, than.n) >= options.decline_each
    return enough and fisher_p(than, one) < options.decline_p


# --- Exact tests ------------------------------------------------------------------------------


def binomial_p(tally: Tally, baseline: float) -> float:
    """Return the exact one-sided probability of at least so many successes; 1 without any."""
    good, n = tally
    if good <= 0 or baseline >= 1:
        return 1.0
    if baseline <= 0:
        return 0.0
    well, badly = log(baseline), log1p(-baseline)
    return _sum(_ways(n, k) + k * well + (n - k) * badly for k in range(good, n + 1))


def fisher_p(better: Tally, other: Tally) -> float:
    """Return the p-value of Fisher's exact one-sided test; 1 if a tally is empty."""
    good, n = better.good + other.good, better.n + other.n
    if not (better.n and other.n):
        return 1.0
    places = range(better.good, min(good, better.n) + 1)
    of_all = _ways(n, good)
    return _sum(_ways(better.n, k) + _ways(other.n, good - k) - of_all for k in places)


def _ways(n: int, k: int) -> float:
    """Return the logarithm of the number of ways to choose ``k`` of ``n``."""
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _sum(logarithms: Iterable[float]) -> float:
    """Return the sum of probabilities, given by their logarithms."""
    return min(1.0, fsum(map(exp, logarithms)))


# --- E-values ---------------------------------------------------------------------------------


class BettingEvidence(NamedTuple):
    """Logarithms of the stakes on each rate above the baseline. Each application multiplies them,
    so their order does not matter, and equal ones can be grouped."""

    logs: tuple[float, ...] = (0.0,) * len(_SHARES)

    def after(self, good: bool, baseline: float, times: int = 1) -> "BettingEvidence":
        """Return the evidence after ``times`` equal applications.

        Args:
            baseline: as known before the outcome; 0 and 1 are moved slightly inwards.
        """
        rate = min(1 - _LEAST_RATE, max(_LEAST_RATE, baseline))
        factors = (log1p(by * (1 - rate) / rate) if good else log1p(-by) for by in _SHARES)
        return BettingEvidence(
            tuple(was + times * by for was, by in zip(self.logs, factors, strict=True))
        )

    @property
    def e_value(self) -> float:
        """Mean of the stakes, at most 1e300."""
        most = max(self.logs)
        total = most + log(fsum(exp(each - most) for each in self.logs) / len(self.logs))
        return exp(min(total, 300 * log(10)))


def uniform(salt: UUID, run: UUID, pattern_id: UUID, version: int, kind: str) -> float:
    """Return a number in [0, 1), evenly distributed; independent for different ``kind``s.

    It is a hash: a resumed or retried run keeps its arm, and an author of tasks cannot choose the
    arm without the salt.
    """
    said = b"".join((salt.bytes, run.bytes, pattern_id.bytes, f"{version} {kind}".encode()))
    # Only as many bits as a float holds: more could be rounded up to 1.
    return (int.from_bytes(sha256(said).digest()[:8]) >> 11) / 2**53


def arm_of(
    state: PatternState,
    salt: UUID,
    run: UUID,
    pattern_id: UUID,
    version: int,
    options: LearningOptions,
) -> Arm:
    """Assign a run's arm: used or withheld if validated, trial or control if a candidate."""
    if state is PatternState.VALIDATED:
        withheld = uniform(salt, run, pattern_id, version, "withheld") < options.withheld_share
        return Arm.WITHHELD if withheld else Arm.USED
    on_trial = uniform(salt, run, pattern_id, version, "trial") < options.trial_share
    return Arm.TRIAL if on_trial else Arm.CONTROL


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

    The e-value is over all that were given it, each against its baseline, but no less than the rate
    of runs without it.
    """

    lately: Tally = Tally()  # given it, in the time that the verdict counts
    baseline: Baseline = Baseline()  # mean of these
    e_value: float = 1.0
    given: Tally = Tally()  # given it at any time
    latest: Tally = Tally()  # the last few of these
    used: Tally = Tally()
    withheld: Tally = Tally()
    time_saved_s: float | None = None  # mean, against runs that were not given it
    tokens_saved: float | None = None


def weigh(groups: Iterable[Group], latest: Tally | None = None) -> WeighedEvidence:
    """Summarise applications; ``latest`` are the last few that were given the pattern."""
    groups = list(groups)
    given = [each for each in groups if each.arm in APPLIED]
    others = [each for each in groups if each.arm not in APPLIED]
    lately = [each._replace(n=each.lately) for each in given]
    without = _tally(others)
    # Early baselines are shrunk towards 0.5, which makes a pattern look good if nearly every task
    # succeeds. So bets are made against the rate without it, plus one standard error.
    least = without.expected + sqrt(without.variance) if without.n else 0.0
    evidence = BettingEvidence()
    for each in given:
        name, rate, n = each.baseline.name, each.baseline.rate, each.baseline.n
        if name != "like_tasks" or n < 20:  # too few tasks for a reliable baseline
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
        used=_tally(each for each in groups if each.arm is Arm.USED),
        withheld=_tally(each for each in groups if each.arm is Arm.WITHHELD),
        time_saved_s=_saved(others, given, "seconds", "timed"),
        tokens_saved=_saved(others, given, "tokens", "counted"),
    )


def _tally(groups: Iterable[Group]) -> Tally:
    groups = list(groups)
    return Tally(sum(each.n for each in groups if each.good), sum(each.n for each in groups))


def _baseline(groups: Iterable[Group]) -> Baseline:
    """Return the mean baseline of applications, with the commonest name."""
    known = [(each.baseline, each.n) for each in groups if each.n]
    if not known:
        return Baseline()
    names: Counter[str] = Counter()
    for baseline, n in known:
        names[baseline.name] += n
    rates, tasks = ([getattr(each, name) for each, _ in known] for name in ("rate", "n"))
    often = [n for _, n in known]
    name = min(names, key=lambda each: (-names[each], each))
    return Baseline(name, fmean(rates, often), round(fmean(tasks, often)))


def _saved(others: Sequence[Group], given: Sequence[Group], sums: str, n: str) -> float | None:
    """Return by how much the mean of runs without the pattern is higher; ``None``: unknown.

    Args:
        sums, n: names of the groups' sums, and of the numbers of runs in these.
    """
    means: list[float] = []
    for side in (others, given):
        if not (runs := sum(getattr(each, n) for each in side)):
            return None
        means.append(fsum(getattr(each, sums) for each in side) / runs)
    return means[0] - means[1]


@dataclass(frozen=True, slots=True)
class Validation:
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
    was: Pattern, weighed: WeighedEvidence, options: LearningOptions, now: datetime
) -> tuple[Pattern, Validation]:
    """Validate a pattern; return it with its new state and evidence.

    A candidate is promoted or stays: most good patterns are not significant at first. A validated
    pattern stays, too: only a decline or harm moves it, never a lack of significance.
    If nothing changed, the old evidence stays, with its time. With too few applications,
    confidence and p-value keep their old values.
    """
    lately, before = weighed.lately, was.evidence
    verdict, p_value, confidence = judged(lately, weighed.baseline.rate, options)
    state, reason = was.state, None
    if state is PatternState.CANDIDATE:
        if verdict is Verdict.VALIDATED and weighed.e_value >= options.promotion_e:
            state = PatternState.VALIDATED
    elif state is PatternState.VALIDATED and (reason := falling(weighed, options)) is not None:
        state = PatternState.IN_REVIEW
    rate = lately.rate if lately.n else None
    same: dict[str, Any] = {
        "applications": lately.n,
        "success_rate": rate,
        "e_value": weighed.e_value,
        "baseline": weighed.baseline,
    }
    sure: dict[str, Any] = {"confidence": confidence, "p_value": p_value}
    found = Validation(
        was.key, was.version, was.state, state, verdict, lately.good, reason=reason, **same, **sure
    )
    known = replace(
        before,
        time_saved_s=weighed.time_saved_s,
        tokens_saved=weighed.tokens_saved,
        uplift=None if rate is None else rate - weighed.baseline.rate,
        verdict=verdict.value,
        **same,
        **({} if verdict is Verdict.INSUFFICIENT_EVIDENCE else sure),
    )
    if known == before or not (weighed.given.n or before.verdict):
        evidence = before
    else:
        evidence = replace(known, validated_at=now)
    after = was if state is was.state else was.moved(state, reason)
    return after.but(evidence=evidence), found


def falling(weighed: WeighedEvidence, options: LearningOptions) -> str | None:
    """Return the reason to review a validated pattern at once, or ``None``."""
    latest, given = weighed.latest, weighed.given
    earlier = given.without(latest)
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


def history(groups: Sequence[tuple[datetime, Group]]) -> list[dict[str, Any]]:
    """Return the evidence after each application, or after 40 evenly chosen ones.

    Each point has the time ``at``, the numbers of applications ``given`` the pattern and of
    ``others``, the successful ones ``given_good`` and ``others_good``, and the ``e_value``.

    Args:
        groups: of one application each, with its time; the oldest first.
    """
    found = []
    step = max(1, -(-len(groups) // 40))
    for number, (at, _) in enumerate(groups, start=1):
        if number % step == 0 or number == len(groups):
            so_far = [each for _, each in groups[:number]]
            weighed = weigh(so_far)
            others = _tally(each for each in so_far if each.arm not in APPLIED)
            point = {"given": weighed.given.n, "given_good": weighed.given.good}
            point |= {"others": others.n, "others_good": others.good}
            found.append({"at": at, **point, "e_value": weighed.e_value})
    return found
