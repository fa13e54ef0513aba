"""Other versions of Python, and other platforms than this one.

    python -m tests.platforms [-n 2] [PYTHON …]

Looks up which pinned packages have no wheel, by version of Python and platform, and compares that
with docs/operate/install.md. Then runs the gate's tests with each further Python: those named, or
else those of the path.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
_LINUX = [
    "manylinux1",
    "manylinux2010",
    "manylinux2014",
    *(f"manylinux_2_{n}" for n in range(5, 29)),
]
_MACOS = [f"macosx_{release}" for release in ("10_9", "10_12", "10_13", "10_15")]
_MACOS += [f"macosx_{release}_0" for release in range(11, 16)]
PLATFORMS = {
    "Linux x86-64": [f"{each}_x86_64" for each in _LINUX],
    "Linux arm64": [f"{each}_aarch64" for each in _LINUX],
    "macOS arm64": [f"{each}_{chip}" for each in _MACOS for chip in ("arm64", "universal2")],
    "macOS x86-64": [f"{each}_{chip}" for each in _MACOS for chip in ("x86_64", "universal2")],
    "Alpine Linux x86-64": [f"musllinux_1_{n}_x86_64" for n in (0, 1, 2)],
}
"""Tags of wheels that pip would take, by platform."""
_MISSING = re.compile(r"No matching distribution found for ([\w.-]+)==")


def without_wheel(version: str, platform: str) -> list[str]:
    """Return the packages, and those of the embedded server, that have no wheel there."""
    locks = [ROOT / name for name in ("requirements.lock", "requirements-embedded.lock")]
    text = "\n".join(lock.read_text() for lock in locks)
    pinned = re.findall(r"^([\w.-]+==\S+)", text, re.MULTILINE)
    tags = [f"--platform={tag}" for tag in PLATFORMS[platform]]
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as target:
        options = ["--dry-run", "--no-deps", "--ignore-installed", f"--target={target}"]
        options += ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *tags]
        while True:
            wanted = [each for each in pinned if each.split("==")[0] not in missing]
            done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return missing
            found = _MISSING.search(done.stderr)
            assert found is not None, done.stderr
            missing.append(found[1])


def documented() -> dict[str, str]:
    """Return what docs/operate/install.md says of each platform."""
    page = (ROOT / "docs/operate/install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    return {platform: said for platform, said in rows if platform in PLATFORMS}


def wheels() -> Iterator[str]:
    """Yield each difference between the packages' wheels and docs/operate/install.md."""
    said = documented()
    for platform in PLATFORMS:
        for version in VERSIONS:
            missing = without_wheel(version, platform)
            found = f"no wheel of {', '.join(missing)}" if missing else "all wheels"
            print(f"{platform}, Python {version}: {found}", flush=True)
            if missing and not all(f"`{each}`" in said.get(platform, "") for each in missing):
                yield f"docs/operate/install.md does not say that {platform} lacks {missing}"


def others() -> Iterator[str]:
    """Yield each further version of Python that the path has and that starts."""
    for version in VERSIONS:
        program = shutil.which(f"python{version}")
        if program is None or version == f"{sys.version_info[0]}.{sys.version_info[1]}":
            continue
        if subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0:
            yield program


def tests_pass(program: str, processes: int) -> bool:
    """Run the gate's tests with another Python, in an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        pip = [python, "-m", "pip", "install", "--quiet"]
        tests = [python, "-m", "pytest", "-q", "-n", str(processes), "-m", "not deep"]
        for command in (
            [program, "-m", "venv", "--upgrade-deps", folder],
            [*pip, "-r", "requirements-dev.lock"],
            [*pip, "--no-deps", "-e", "."],
            tests,
        ):
            if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.platforms")
    parser.add_argument("-n", "--processes", type=int, default=2)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    options = parser.parse_args()
    failed = list(wheels())
    for program in options.pythons or others():
        print(f"\n== {program}", flush=True)
        if not tests_pass(program, options.processes):
            failed.append(f"the tests do not pass with {program}")
    print("\n".join(failed) or "all passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
