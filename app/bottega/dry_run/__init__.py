"""Dry runs: a team runs with the demo model, in a separate process that stores nothing.

The API imports only this module of the package, for the command that starts the process.
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
    """Return the command line and the environment variables that start a dry run.

    The environment contains this process's import path, but no settings and no secrets.
    """
    path = os.pathsep.join(filter(None, sys.path))
    environment = {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    return [sys.executable, "-P", "-m", "bottega.dry_run.result"], environment
