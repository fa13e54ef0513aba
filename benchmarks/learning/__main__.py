"""Does memory of earlier runs improve later ones? A simulation with a placebo.

    python -m benchmarks.learning [--seeds 20] [--episodes 400] [--quick] [--plot plot.svg]

A scripted team does tasks without being told the right way (benchmarks/learning/world.py). It
follows memory with the probability --follows, and guesses otherwise. All arms have the same tasks
and the same luck, in virtual time, without a database. They are of several sessions and read the
episodes of all: an agent of one purpose, with BOTTEGA_SHARED_MEMORY and memory_scope tenant. The
decisions are the service's own: goal analysis, matching, assignment, episodes from events, mining,
validation, refinement, scoring.

    no memory            nothing
    last k               the last 5 episodes
    episodes only        5 similar episodes; on failure 3 with a similar failure
    episodes + patterns  all of memory
    oracle               the right way
    shuffled memory      the placebo: that memory for a task of another domain and type, or for the
                         failure of another tool
"""

import argparse
import asyncio
import time
from pathlib import Path

from benchmarks.learning import report
from benchmarks.learning.measuring import ARMS, FOLLOWS, FULL, NONE, TELLS, failing, measure

_DRIFT = (NONE, "episodes only", FULL, "oracle")
_QUICK = (3, 200)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="3 seeds of 200 episodes")
    parser.add_argument("--follows", type=float, default=FOLLOWS, help="0 to 1, default 0.8")
    parser.add_argument(
        "--tells",
        type=float,
        default=TELLS,
        help="probability that an answer reports how the work was done; default 0.2",
    )
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    asked = parser.parse_args()
    seeds, episodes = _QUICK if asked.quick else (asked.seeds, asked.episodes)
    began = time.process_time()
    print(f"{seeds} seeds, {episodes} tasks each, memory followed with {asked.follows:g}\n")

    def courses(arms: tuple[str, ...], *, drift: bool) -> report.Courses:
        return [
            asyncio.run(
                measure(
                    seed,
                    episodes * 3 // 2 if drift else episodes,
                    follows=asked.follows,
                    tells=asked.tells,
                    drift=drift,
                    arms=arms,
                )
            )
            for seed in range(1, seeds + 1)
        ]

    made = courses(ARMS, drift=False)
    print("\n".join([*report.arms(made), "", "success over time", *report.sparks(made)]), "\n")
    drifted = courses(_DRIFT, drift=True)
    print("\n".join([*report.drift(drifted), *report.sparks(drifted)]))
    print(f"  90 of 100 went well, then none: leaves VALIDATED after {failing()} applications")
    if asked.plot:
        asked.plot.write_text(report.svg(made, "success, mean over seeds"))
        beside = asked.plot.with_stem(f"{asked.plot.stem}-drift")
        beside.write_text(report.svg(drifted, "success, what is right changes in the middle"))
        print(f"\nwritten: {asked.plot}, {beside}")
    print(f"\n{time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
