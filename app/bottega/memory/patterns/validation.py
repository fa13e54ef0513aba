"""Validation: test a pattern's applications against its baseline. Pure.

The *verdict* is an exact test at one time. Repeated every night, such tests would eventually find
significance in noise. So promotion also needs an *e-value*: the result of betting 1 against "no
better than the baseline". By chance it ever reaches 20 with probability 1/20 at most, however often
one tests.
"""

from collections.abc import Iterable
from enum import StrEnum
from math import exp, fsum, lgamma, log, log1p
from typing import NamedTuple

from bottega.memory.episodes.options import LearningOptions

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
