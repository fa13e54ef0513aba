"""Check that tests catch planted bugs: ``python -m tests.mutants [--check] [NAME …]``.

Copies the checkout to a temporary folder, applies each patch there and runs the test that the
patch's first line names. Exits with 1 if a mutant survives or a patch does not apply, and with 2 if
a named test fails without any patch. ``--check`` only applies each patch and looks for its test.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("app", "migrations", "tests", "benchmarks", "pyproject.toml", "alembic.ini")
LONGEST_S = 150.0
"""Seconds for each test; after them the run counts as killed: the bug made it hang."""

GOOD = "killed"

_KILLED_BY = re.compile(r"# killed by: (\S+::\S+)\n")
_PASSED, _FAILED = 0, 1  # exit statuses of pytest


def patches(names: Sequence[str]) -> list[Path]:
    """Return the patches with these names; all if there are none."""
    known = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.patch"))}
    if unknown := set(names) - known.keys():
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")
    return [path for name, path in known.items() if not names or name in names]


def killer_of(patch: Path) -> str:
    """Return the id of the test that must fail with a patch."""
    found = _KILLED_BY.match(patch.read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{patch.name}: its first line must be '# killed by: tests/…::test_…'")
    return found[1]


def exists(test: str) -> bool:
    """Return whether the file of a test's id defines it, without importing it."""
    file, *_, name = test.split("::")
    define = re.compile(rf"^ *(async )?def {re.escape(name.split('[')[0])}\(", re.MULTILINE)
    return (ROOT / file).is_file() and bool(define.search((ROOT / file).read_text("utf-8")))


class Copy:
    """Copy of the checkout, to which one patch at a time is applied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, folder / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder / name)
        path = os.pathsep.join([str(folder / "app"), str(folder)])
        # Without the ceiling, a repository around the temporary folder would make git skip files.
        self._environment = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
        }

    def apply(self, patch: Path, *, reverse: bool = False) -> str:
        """Apply a patch, or take it out again; return the error, empty if there is none."""
        command = ["git", "apply", *(["--reverse"] if reverse else []), str(patch)]
        return self._run(command).stderr.strip()

    def test(self, tests: Sequence[str], *options: str) -> int | None:
        """Run tests until one fails; return pytest's exit status, ``None`` if they hang."""
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider"]
        try:
            ended = self._run([*command, *options, *tests], LONGEST_S * len(tests))
        except subprocess.TimeoutExpired:
            return None
        if ended.returncode not in (_PASSED, _FAILED):
            print(ended.stdout[-2000:], ended.stderr[-2000:])
        return ended.returncode

    def _run(
        self, command: Sequence[str], timeout_s: float = LONGEST_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def verdict(copy: Copy, patch: Path, *, only_apply: bool) -> str:
    """Apply a patch, run its test and take the patch out; return the result in a word or two."""
    if error := copy.apply(patch):
        return f"does not apply: {error}"
    status = _FAILED if only_apply else copy.test([killer_of(patch)])
    if error := copy.apply(patch, reverse=True):
        raise SystemExit(f"{patch.name}: cannot be taken out: {error}")
    if status in (_FAILED, None):
        return GOOD
    return "SURVIVED" if status == _PASSED else f"error: pytest ended with {status}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a patch, without .patch")
    parser.add_argument("--check", action="store_true", help="run no test")
    options = parser.parse_args()
    chosen = patches(options.names)
    killers = sorted({killer_of(patch) for patch in chosen})
    with tempfile.TemporaryDirectory(prefix="bottega-mutants-", ignore_cleanup_errors=True) as name:
        copy = Copy(Path(name))
        if missing := [killer for killer in killers if not exists(killer)]:
            print("no such test:", *missing)
            return 2
        if not options.check and copy.test(killers) != _PASSED:
            print("the named tests must pass without any patch; run them by hand:", *killers)
            return 2
        bad = 0
        for patch in chosen:
            began = time.monotonic()
            said = verdict(copy, patch, only_apply=options.check)
            bad += said != GOOD
            if said != GOOD or not options.check:
                print(f"{patch.stem:32} {said} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants {'apply' if options.check else GOOD}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
