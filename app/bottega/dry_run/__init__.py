"""Dry runs: a team answers with the demo model, in a process of its own that stores nothing.

The API loads only this module: the start of the process, and its limits.
"""

import os
import sys

CPU_S = 20
"""Seconds of CPU time; then the system ends the process."""
MOST_BYTES = 1024 * 1024 * 1024
NO_MEMORY = 3
"""Exit status of a process that needs more memory."""
LONGEST_S = 60.0
"""Seconds until the caller ends it."""


def command() -> tuple[list[str], dict[str, str]]:
    """Return the program's arguments and environment, with this process's import path.

    The environment holds no settings and no secrets.
    """
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    return [sys.executable, "-P", "-m", "bottega.dry_run"], environment
