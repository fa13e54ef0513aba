"""Dry runs: a team answers with the demo model, in a separate process that stores nothing.

The API loads only this module, which has the process's command and limits.
"""

import os
import sys

CPU_S = 20
"""Seconds of CPU time, after which the system ends the process."""
MOST_BYTES = 1024 * 1024 * 1024
NO_MEMORY = 3
"""Exit status of a process that needs more memory."""
LONGEST_S = 60.0
"""Seconds after which the caller ends the process."""


def command() -> tuple[list[str], dict[str, str]]:
    """Return the program's arguments and environment, with this process's import path.

    The environment has no settings and no secrets.
    """
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    return [sys.executable, "-P", "-m", "bottega.dry_run.result"], environment
