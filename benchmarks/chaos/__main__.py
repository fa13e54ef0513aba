"""Fault injection: durable runs must survive, with figures.

    python -m benchmarks.chaos [--runs 200] [--workers 3] [--seed 1] [--fast] [--only acd]

All parts are real processes: embedded PostgreSQL, API, workers. The model is the demo model behind
a server in this process that records each request and takes 50 to 200 ms to answer. Every run has a
marker that all its agents pass on, so each request can be compared with the log. Exit code 1 if a
claim does not hold.
"""

import argparse
import asyncio
import time

from benchmarks.chaos import scenarios
from benchmarks.chaos.scenarios import Options
from bottega.settings import Settings

SCENARIOS = [
    ("a", scenarios.killed_workers),
    ("b", scenarios.restarted_database),
    ("c", scenarios.cut_connections),
    ("d", scenarios.stopped_worker),
    ("e", scenarios.cancelled_runs),
    ("f", scenarios.rolling_restart),
    ("f", scenarios.hasty_restart),
    ("g", scenarios.poison_pill),
]


async def play(options: Options, only: str) -> list[str]:
    """Play the scenarios in sequence; return those with a failed claim."""
    failed = []
    for letter, scenario in SCENARIOS:
        if letter in only:
            began = time.perf_counter()
            report = await scenario(options)
            print(f"{report}\n  ({time.perf_counter() - began:.0f} s)\n", flush=True)
            failed += [] if report.holds else [report.title]
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast", action="store_true", help="take runs over after 2 s")
    parser.add_argument("--only", default="abcdefg", help="letters of the scenarios to play")
    arguments = parser.parse_args()
    takeover_s = 2.0 if arguments.fast else Settings.model_fields["takeover_s"].default
    options = Options(arguments.runs, arguments.workers, arguments.seed, takeover_s)
    failed = asyncio.run(play(options, arguments.only))
    for title in failed:
        print(f"FAILS  {title}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
