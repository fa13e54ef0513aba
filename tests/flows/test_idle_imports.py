"""Imports of a process before it is used: nothing that only some uses need."""

import pytest

from tests.processes import cold_command
from tests.waiting import until

LATE = {"networkx", "mcp", "openai", "obstore", "jwt", "cryptography"}


@pytest.mark.parametrize(
    "arguments", [("serve", "--no-worker", "--port", "0"), ("worker",)], ids=["API", "worker"]
)
async def test_packages_of_some_uses_are_not_loaded_at_rest(
    arguments: tuple[str, ...], database_url: str
) -> None:
    """``PYTHONPROFILEIMPORTTIME`` makes each process write the modules that it imports."""
    async with cold_command(
        *arguments,
        DATABASE_URL=database_url,
        OPENAI_API_KEY="test-key",
        PYTHONPROFILEIMPORTTIME="1",
    ) as started:
        imported = await until(lambda: _imported(started.log), lambda names: "bottega" in names)
        assert "bottega.container" in imported
        assert LATE & imported == set()


def _imported(log: list[str]) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in log if line.startswith("import time:")}
