"""All that the gate leaves out, before a release.

    python -m tests.deep [--seconds 1800] [--seed 7] [--fast]

The tests marked ``deep`` and every property with many examples, then planted bugs, then generated
requests for ``--seconds``, then other Pythons and platforms, then chaos. Goes on after a failure
and ends with 1 if there was one.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_S = 3600
"""For one test: a property with many examples takes minutes."""


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return what is run, by name: arguments of ``python -m``."""
    seed = [] if options.seed is None else ["--seed", str(options.seed)]
    return {
        "deep tests and properties": [
            *("pytest", "-n", str(options.processes), "-m", "deep or hypothesis"),
            *("--hypothesis-profile", "deep", "--timeout", str(LONGEST_S)),
        ],
        "planted bugs": ["tests.mutants"],
        "generated requests": ["tests.fuzz", "--seconds", str(options.seconds), *seed],
        "other platforms": ["tests.platforms", "-n", str(options.processes)],
        "chaos": ["benchmarks.chaos", *seed, *(["--fast"] if options.fast else [])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.deep")
    parser.add_argument("--seconds", type=int, default=1800, help="of generated requests")
    parser.add_argument("--seed", type=int, help="of generated requests and of chaos")
    parser.add_argument("--fast", action="store_true", help="less chaos")
    parser.add_argument("-n", "--processes", type=int, default=2)
    failed = []
    for name, command in commands(parser.parse_args()).items():
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
