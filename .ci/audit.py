"""Checks for vulnerable dependencies and for secrets in the repository. A finding fails.

The first check needs the package index's advisories. If they are unreachable it prints a notice and
passes, because people ignore a gate that fails by chance. `.secrets.baseline` lists reviewed false
positives. Words such as "password" are not searched: some tests have them in every second line.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from detect_secrets.core.scan import get_plugins
from detect_secrets.plugins.base import BasePlugin, RegexBasedDetector
from detect_secrets.settings import default_settings

HERE = Path(__file__).parent
ROOT = HERE.parent
BIN = Path(sys.executable).parent
BASELINE = HERE / ".secrets.baseline"
LOCKS = tuple(
    f"requirements{extra}.lock" for extra in ("", "-embed", "-embedded", "-nats", "-otel")
)
PATIENCE_S = 10
PLAIN = (".json", ".py")
"""Suffixes of files that a scan reads as lines only, never as settings with names and values."""


def holes() -> list[str]:
    """Return the known vulnerabilities of the locked versions."""
    command = [BIN / "pip-audit", "--disable-pip", "--require-hashes"]
    command += [part for lock in LOCKS for part in ("-r", lock)]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", "5"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        packages = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        print("NOT AUDITED: the index's advisories are unreachable")
        return []
    if unknown := [package["name"] for package in packages if "skip_reason" in package]:
        print(f"NOT AUDITED: the index does not know {len(unknown)} of {len(packages)} packages")
    return [
        f"{package['name']} {package['version']}: {hole['id']}, fixed in {hole['fix_versions']}"
        for package in packages
        for hole in package.get("vulns", ())
    ]


def found_secrets() -> dict[str, Any]:
    """Scan for secrets all files under version control that could have one."""
    command = [BIN / "detect-secrets", "scan", "--disable-plugin", "KeywordDetector"]
    command += ["--exclude-files", rf"^{re.escape(str(BASELINE.relative_to(ROOT)))}$"]
    command += suspicious()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def suspicious() -> list[str]:
    """Return the files in which a detector finds anything, before its filters.

    To search whole files takes a tenth of the time of a scan, which calls each detector per line.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with default_settings() as settings:
        settings.disable_plugins("KeywordDetector")
        plugins = list(get_plugins())
    return [
        name
        for name in listed.stdout.split("\0")
        if name
        and (Path(name).suffix not in PLAIN or any(finds(each, ROOT / name) for each in plugins))
    ]


def finds(plugin: BasePlugin, file: Path) -> bool:
    """Return whether a detector finds anything in a file, taken as one line."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if isinstance(plugin, RegexBasedDetector):
        return any(pattern.search(text) for pattern in plugin.denylist)
    return bool(plugin.analyze_line(filename=str(file), line=text))


def entries(report: dict[str, Any]) -> dict[tuple[str, str, str], int]:
    """Map (file, kind, hash) to the line; a secret may move within its file."""
    return {
        (file, one["type"], one["hashed_secret"]): one["line_number"]
        for file, secrets in report["results"].items()
        for one in secrets
    }


def main() -> None:
    report = found_secrets()
    if "--accept" in sys.argv:
        del report["generated_at"]
        BASELINE.write_text(json.dumps(report, indent=1) + "\n")
    known = entries(json.loads(BASELINE.read_text()))
    problems = holes()
    problems += [
        f"{file}:{line}: looks like a secret ({kind}); if not, run: python .ci/audit.py --accept"
        for (file, kind, digest), line in entries(report).items()
        if (file, kind, digest) not in known
    ]
    print("\n".join(problems) or "nothing found")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
