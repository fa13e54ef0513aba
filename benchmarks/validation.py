"""Error rate and speed of validation, by simulation.

    python -m benchmarks.validation [--seeds 5] [--patterns 1000]

The service's own functions decide, each night after one more application.

    null      patterns without effect: share promoted within 200 nights, and the share that the
              verdict alone, a plain p-value at every check, would promote
    power     patterns that help: share promoted within 60 applications
    decline   validated patterns with 90 of 100 successes that fail from now on: applications until
              they leave; and share of unchanged patterns that leave by chance
    learnt    the same nulls, with the baseline learnt from similar tasks as in the service

Shares are means over the seeds, each with its 95 % confidence interval (bootstrap over patterns).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.evidence import BettingEvidence, Tally, Verdict, judged, worse

OPTIONS = LearningOptions()
NIGHTS = 200
WITHIN = 60

Outcomes = NDArray[np.bool_]
"""Success of each application; shape (patterns, applications)."""


@dataclass(frozen=True)
class Promoted:
    """Patterns that were promoted in at least one night; shape (patterns,)."""

    by_both: NDArray[np.bool_]
    by_verdict: NDArray[np.bool_]


@cache
def verdict(good: int, n: int, baseline: float) -> Verdict:
    return judged(Tally(good, n), baseline, OPTIONS).verdict


@cache
def e_value(good: int, n: int, baseline: float) -> float:
    return BettingEvidence().after(True, baseline, good).after(False, baseline, n - good).e_value


def outcomes(rate: float, patterns: int, applications: int, seed: int) -> Outcomes:
    return np.random.default_rng(seed).random((patterns, applications)) < rate


def promoted(made: Outcomes, baseline: float) -> Promoted:
    """Return the promoted patterns, with a check after each application, one per night."""
    days = int(OPTIONS.evidence_days)
    both, alone = [], []
    for row in made:
        sums = [0, *accumulate(int(good) for good in row)]
        both.append(False)
        alone.append(False)
        for n in range(1, len(sums)):
            first = max(0, n - days)
            found = verdict(sums[n] - sums[first], n - first, baseline)
            if found is not Verdict.VALIDATED:
                continue
            alone[-1] = True
            value = e_value(sums[n], n, baseline)
            if value >= OPTIONS.promotion_e:
                both[-1] = True
                break
    return Promoted(np.array(both), np.array(alone))


def learnt(rate: float, patterns: int, seed: int, known: int) -> NDArray[np.bool_]:
    """Return the promoted patterns without effect, with a baseline learnt from similar tasks.

    Each has ``known`` such tasks before, and one more per application, at most 200.
    """
    random = np.random.default_rng(seed)
    found = np.zeros(patterns, bool)
    for number in range(patterns):
        like = (random.random(known + NIGHTS) < rate).astype(int)
        sums = np.concatenate(([0], np.cumsum(like)))
        evidence, tally, rates = BettingEvidence(), Tally(), 0.0
        for night, good in enumerate(random.random(NIGHTS) < rate):
            last = known + night
            first = max(0, last - 200)
            baseline = float((5 + sums[last] - sums[first]) / (10 + last - first))
            evidence = evidence.after(bool(good), baseline)
            tally = Tally(tally.good + int(good), tally.n + 1)
            rates += baseline
            if evidence.e_value < OPTIONS.promotion_e:
                continue
            said = judged(tally, rates / tally.n, OPTIONS).verdict
            if said is Verdict.VALIDATED:
                found[number] = True
                break
    return found


def left_after(before: Outcomes, then: Outcomes) -> NDArray[np.int_]:
    """Return the further applications until each pattern leaves VALIDATED.

    For a pattern that stays, it is one more than there are.
    """
    each = OPTIONS.decline_each
    left = []
    for old, new in zip(before, then, strict=True):
        row = np.concatenate((old, new)).astype(int)
        sums = np.concatenate(([0], np.cumsum(row)))
        for n in range(len(old) + 1, len(row) + 1):
            recent = Tally(int(sums[n] - sums[n - each]), each)
            earlier = Tally(int(sums[n - each]), n - each)
            if worse(recent, earlier, OPTIONS):
                left.append(n - len(old))
                break
        else:
            left.append(len(new) + 1)
    return np.array(left)


def ninety_of_hundred(patterns: int, seed: int) -> Outcomes:
    """Return outcomes of shape (patterns, 100) with 90 successes each, in random order."""
    rows = np.tile(np.arange(100) < 90, (patterns, 1))
    return np.random.default_rng(seed).permuted(rows, axis=1)


def share(values: NDArray[np.bool_], seed: int = 0) -> str:
    drawn = np.random.default_rng(seed).binomial(len(values), values.mean(), 2_000) / len(values)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return f"{values.mean():6.1%} [{low:.1%}, {high:.1%}]"


def over(seeds: int, one: Callable[[int], NDArray[np.bool_]]) -> str:
    """Return the share over all seeds, and the lowest and highest share of a seed."""
    found = [one(seed) for seed in range(1, seeds + 1)]
    means = [float(each.mean()) for each in found]
    return f"{share(np.concatenate(found)):26} by seed {min(means):.1%} to {max(means):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--patterns", type=int, default=1_000)
    arguments = parser.parse_args()
    seeds, patterns = arguments.seeds, arguments.patterns
    print(f"{patterns:,} patterns, {seeds} seeds; a look every night, after each application")

    print(f"\n== null: true rate = baseline; promoted within {NIGHTS} applications")
    for rate in (0.5, 0.3, 0.7):
        made = {seed: promoted(outcomes(rate, patterns, NIGHTS, seed), rate) for seed in _to(seeds)}
        print(f"baseline {rate}, verdict and e-value {over(seeds, lambda n: made[n].by_both)}")  # noqa: B023
        print(f"baseline {rate}, verdict alone       {over(seeds, lambda n: made[n].by_verdict)}")  # noqa: B023

    print(f"\n== power: promoted within {WITHIN} applications, baseline 0.5")
    for rate in (0.8, 0.75, 0.7):
        print(
            f"true rate {rate:<4}                     "
            + over(seeds, lambda n: promoted(outcomes(rate, patterns, WITHIN, n), 0.5).by_both)  # noqa: B023
        )

    print("\n== decline: 90 of 100, then only failures")
    failing = np.zeros((patterns, 10), bool)
    left = np.concatenate([left_after(ninety_of_hundred(patterns, n), failing) for n in _to(seeds)])
    print(f"left within 10 {share(left <= 10)}; median {np.median(left):.0f}, most {left.max()}")
    stays = over(
        seeds,
        lambda n: (
            left_after(outcomes(0.9, patterns, 100, n), outcomes(0.9, patterns, 100, n + 1_000))
            <= 100
        ),
    )
    print(f"true rate stays 0.9: left within 100 {stays}")

    print("\n== learnt: true rate = that of like tasks, which are counted as they come")
    for rate in (0.5, 0.3, 0.8):
        for known in (0, 50, 200):
            print(
                f"rate {rate}, {known:3} known before           "
                + over(seeds, lambda n: learnt(rate, max(patterns // 5, 1), n, known))  # noqa: B023
            )


def _to(seeds: int) -> range:
    return range(1, seeds + 1)


if __name__ == "__main__":
    main()
