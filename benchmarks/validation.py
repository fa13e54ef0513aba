"""Error rate and power of validation, by simulation.

    python -m benchmarks.validation [--seeds 5] [--patterns 1000]

The service's own function decides. Each run is drawn to get the pattern or to go without.

    null      patterns without effect: share promoted in all four looks together
    power     patterns that help: share promoted
    harm      validated patterns that do harm from now on: share that falls in one series of looks
    no harm   validated patterns without effect, and with one: share that falls

Shares are means over the seeds, each with its 95 % confidence interval (bootstrap over patterns).
"""

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from bottega.memory.episodes.scope import LearningOptions
from bottega.memory.patterns.evidence import LOOKS, Comparison, Tally, looked_at
from bottega.memory.patterns.pattern import (
    Category,
    Content,
    ContentKind,
    Lifecycle,
    Pattern,
    PatternState,
)

OPTIONS = LearningOptions()
_NOW = datetime(2027, 1, 1, tzinfo=UTC)
_CONTENT = Content(ContentKind.HEURISTIC)


@cache
def moves(state: PatternState, looks: int, found: Comparison) -> bool:
    """Return true if a look at a pattern changes its state."""
    life = Lifecycle(state, looks=looks)
    pattern = Pattern("it", Category.DOMAIN, _CONTENT, id=UUID(int=1), lifecycle=life)
    return looked_at(pattern, found, _NOW).state is not state


def moved(
    state: PatternState, given: float, without: float, patterns: int, seed: int
) -> NDArray[np.bool_]:
    """Return which patterns leave a state within one series of looks; shape (patterns,).

    Args:
        given, without: success rates of runs with and without the pattern.
    """
    random = np.random.default_rng(seed)
    is_trial = state is PatternState.CANDIDATE
    share = OPTIONS.trial_share if is_trial else 1 - OPTIONS.withheld_share
    found = np.zeros(patterns, bool)
    for number in range(patterns):
        tallies = [Tally(), Tally()]  # without it, with it
        looks = 0
        while looks < max(LOOKS) and not found[number]:
            drawn = int(random.random() < share)
            good = random.random() < (given if drawn else without)
            tallies[drawn] = Tally(tallies[drawn].good + good, tallies[drawn].n + 1)
            if drawn and tallies[1].n in LOOKS:
                found[number] = moves(state, looks, Comparison(tallies[1], tallies[0]))
                looks = tallies[1].n
    return found


def share(values: NDArray[np.bool_], seed: int = 0) -> str:
    drawn = np.random.default_rng(seed).binomial(len(values), values.mean(), 2_000) / len(values)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return f"{values.mean():6.1%} [{low:.1%}, {high:.1%}]"


def over(seeds: int, one: Callable[[int], NDArray[np.bool_]]) -> str:
    """Return the share over all seeds, and the lowest and highest share of a seed."""
    found = [one(seed) for seed in range(1, seeds + 1)]
    means = [float(each.mean()) for each in found]
    return f"{share(np.concatenate(found)):26} by seed {min(means):.1%} to {max(means):.1%}"


_CASES = (
    ("null: promoted", PatternState.CANDIDATE, ((0.3, 0.3), (0.5, 0.5), (0.7, 0.7), (0.9, 0.9))),
    ("power: promoted", PatternState.CANDIDATE, ((0.8, 0.5), (0.75, 0.5), (0.7, 0.5), (0.5, 0.2))),
    ("harm: fell", PatternState.VALIDATED, ((0.5, 0.8), (0.2, 0.8))),
    ("no harm: fell", PatternState.VALIDATED, ((0.5, 0.5), (0.9, 0.9), (0.8, 0.5))),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--patterns", type=int, default=1_000)
    asked = parser.parse_args()
    print(f"{asked.patterns:,} patterns, {asked.seeds} seeds; looks at {[*LOOKS]} applications")
    for name, state, rates in _CASES:
        print(f"\n== {name}")
        for given, without in rates:
            said = over(asked.seeds, lambda n: moved(state, given, without, asked.patterns, n))  # noqa: B023
            print(f"rate {given:<4} with it, {without:<4} without  {said}")


if __name__ == "__main__":
    main()
