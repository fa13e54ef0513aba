"""Dry runs: a team answers with the demo model, in a separate process that stores nothing.

The API imports only this module, which has the command and the limits of the process.
"""

import os
import sys

CPU_S = 20
"""Maximum CPU time of the process in seconds; then the system ends the process."""
MOST_BYTES = 1024 * 1024 * 1024
NO_MEMORY = 3
"""Exit status of a process that ran out of memory."""
LONGEST_S = 60.0
"""Maximum running time of the process in seconds; then the caller ends the process."""


def command() -> tuple[list[str], dict[str, str]]:
    """Return the program's arguments and environment variables, with this process's import path.

    The environment contains no settings and no secrets.
    """
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    return [sys.executable, "-P", "-m", "bottega.dry_run.result"], environment
