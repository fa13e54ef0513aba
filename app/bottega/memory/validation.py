"""Whether a pattern is worth using, told from its applications (spec page 4, M22 to M24). Pure.

Two questions are kept apart. The *verdict* says how a pattern stands at one look, by an exact test.
Whoever looks every night, though, finds something significant in any noise sooner or later. So a
candidate is promoted by its *e-value*, too: what a bet against "no better than the baseline" would
have made of a stake of 1. By chance that ever reaches 20 in one case of twenty at most, however
often one looks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import exp, fsum, log, log1p
from typing import NamedTuple
from uuid import UUID

from bottega.memory.options import LearningOptions
from bottega.memory.pattern import PatternState

_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of the way from the baseline to 1: the rates that are betted on, each with as much."""
_LEAST_RATE = 1e-9


class Verdict(StrEnum):
    """How a pattern stands at one look."""

    INSUFFICIENT_EVIDENCE = "INSUFFICIENT_EVIDENCE"
    VALIDATED = "VALIDATED"
    CANDIDATE = "CANDIDATE"
    IN_REVIEW = "IN_REVIEW"


class Tally(NamedTuple):
    """Of ``n`` applications ``good`` went well."""

    good: int = 0
    n: int = 0

    @property
    def rate(self) -> float:
        """0 if there were none."""
        return self.good / self.n if self.n else 0.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and what it comes from.

    Attributes:
        p_value: how likely so many go well, or more, at the rate of the baseline.
        confidence: 0 to 1.
    """

    verdict: Verdict
    p_value: float
    confidence: float


def judged(tally: Tally, baseline: float, options: LearningOptions) -> Judgement:
    """How a pattern stands.

    Args:
        tally: of the applications of its current version in the time that counts.
        baseline: 0 to 1; how often such tasks go well without it.
    """
    p_value = binomial_p(tally, baseline)
    sure = confidence(tally, p_value)
    if tally.n < options.min_applications:
        verdict = Verdict.INSUFFICIENT_EVIDENCE
    elif tally.rate < options.min_rate or p_value >= options.significance:
        verdict = Verdict.IN_REVIEW
    else:
        enough = sure >= options.min_confidence
        verdict = Verdict.VALIDATED if enough else Verdict.CANDIDATE
    return Judgement(verdict, p_value, sure)


def confidence(tally: Tally, p_value: float) -> float:
    """How sure one may be of a pattern, 0 to 1: it went well, often, and not by chance."""
    often = 1 - exp(-tally.n / 20)
    return min(1.0, max(0.0, 0.5 * tally.rate + 0.3 * often + 0.2 * (1 - p_value)))


def following(
    state: PatternState,
    verdict: Verdict,
    e_value: float,
    options: LearningOptions,
    *,
    discovered: bool,
) -> PatternState:
    """The state after a look.

    A candidate is promoted or stays: most good patterns are not significant yet at the first look.
    Only validated ones fall.

    Args:
        discovered: whether it is in the set that :func:`discoveries` keeps.
    """
    if state is PatternState.CANDIDATE:
        promoted = (
            verdict is Verdict.VALIDATED
            and e_value >= options.promotion_e
            and (discovered or not options.fdr_required)
        )
        return PatternState.VALIDATED if promoted else state
    if state is PatternState.VALIDATED and verdict is not Verdict.INSUFFICIENT_EVIDENCE:
        return PatternState(verdict)
    return state


def worse(one: Tally, than: Tally, options: LearningOptions) -> bool:
    """Whether the first did significantly worse than the second: the latest applications than the
    earlier ones (decline), or those in which the pattern was given than those in which it was
    withheld (harm). Few say nothing."""
    if min(one.n, than.n) < options.decline_each:
        return False
    return fisher_p(than, one) < options.decline_p


# --- Exact tests ------------------------------------------------------------------------------


def binomial_p(tally: Tally, baseline: float) -> float:
    """How likely so many or more go well, each at the rate ``baseline``: exact, one-sided.
    1 if there were none.
    """
    good, n = tally
    if good <= 0 or baseline >= 1:
        return 1.0
    if baseline <= 0:
        return 0.0
    odds = baseline / (1 - baseline)
    return _share_from(good, 0, n, int(n * baseline), lambda k: (n - k) / (k + 1) * odds)


def fisher_p(better: Tally, other: Tally) -> float:
    """How likely the first does so much better than the second, or more, by chance alone: Fisher's
    exact test, one-sided. 1 if there is nothing to compare."""
    good = better.good + other.good
    everything = better.n + other.n
    if not (better.n and other.n):
        return 1.0
    low, high = max(0, good - other.n), min(good, better.n)
    bad_left = other.n - good

    def up(k: int) -> float:
        return (good - k) * (better.n - k) / ((k + 1) * (bad_left + k + 1))

    return _share_from(better.good, low, high, round(good * better.n / everything), up)


def _share_from(place: int, low: int, high: int, middle: int, up: Callable[[int], float]) -> float:
    """Which share of a distribution lies at ``place`` or above.

    The weights are multiplied out from the middle, where most of them is, and put into proportion
    at the end. So nothing is lost to large factorials, nor by taking a tail from 1.

    Args:
        up: the weight of k + 1 over that of k.
    """
    weights = {middle: 1.0}
    for k in range(middle, high):
        if not (weight := weights[k] * up(k)):
            break
        weights[k + 1] = weight
    for k in range(middle - 1, low - 1, -1):
        if not (weight := weights[k + 1] / up(k)):
            break
        weights[k] = weight
    return fsum(weight for k, weight in weights.items() if k >= place) / fsum(weights.values())


# --- E-values ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evidence:
    """What bets on several rates above the baseline have made of their stakes, in logarithms.

    Each application multiplies them, so what counts is which there were, not their order: it may be
    added up one by one, or by groups that are equal.
    """

    logs: tuple[float, ...] = (0.0,) * len(_SHARES)

    def after(self, good: bool, baseline: float, times: int = 1) -> "Evidence":
        """With so many more applications.

        Args:
            baseline: as it was known before their outcome was. A rate of 0 or 1, which no task is
                known to have, counts as one close by.
        """
        rate = min(1 - _LEAST_RATE, max(_LEAST_RATE, baseline))
        factors = (log1p(by * (1 - rate) / rate) if good else log1p(-by) for by in _SHARES)
        return Evidence(tuple(was + times * by for was, by in zip(self.logs, factors, strict=True)))

    @property
    def e_value(self) -> float:
        """What a stake of 1, evenly laid, has become; at most 10 to the 300."""
        most = max(self.logs)
        total = most + log(fsum(exp(each - most) for each in self.logs) / len(self.logs))
        return exp(min(total, 300 * log(10)))


def e_value(applications: Iterable[tuple[bool, float]]) -> float:
    """The e-value of applications, each good or not, with the baseline of then."""
    evidence = Evidence()
    for good, baseline in applications:
        evidence = evidence.after(good, baseline)
    return evidence.e_value


def discoveries(e_values: Mapping[UUID, float], rate: float, among: int) -> set[UUID]:
    """The patterns of which at most that share is false, on average: the e-BH procedure.

    Args:
        rate: the false discovery rate, above 0.
        among: how many patterns there are; ``e_values`` may leave those out whose e-value is less
            than 1 / ``rate``, which are never kept.
    """
    ranked = sorted(e_values, key=lambda each: (-e_values[each], each))
    kept = 0
    for place, each in enumerate(ranked, start=1):
        if e_values[each] * place * rate >= among:
            kept = place
    return set(ranked[:kept])
