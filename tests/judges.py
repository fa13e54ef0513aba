"""Programs and packages of others that judge our work."""

import os
from typing import TypeVar

import pytest

T = TypeVar("T")


def needed(found: T | None, missing: str) -> T:
    """Return what was found; else skip the test, or fail it with ``JUDGES=required``."""
    if found:
        return found
    if os.environ.get("JUDGES") == "required":
        pytest.fail(missing)
    pytest.skip(missing)
