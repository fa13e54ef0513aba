"""Imports and memory of a process before it is used: nothing that only some uses need."""

import compileall

import psutil
import pytest

from tests.arch.sources import PACKAGE
from tests.processes import cold_command
from tests.waiting import until

LATE = {"networkx", "numpy", "mcp", "openai", "obstore", "jwt", "cryptography", "jsonschema"}
LATE |= {"rich", "sqlalchemy.orm"}


@pytest.mark.parametrize(
    ("arguments", "most_mb", "late"),
    [
        (("serve", "--no-worker", "--port", "0"), 120, {"aiohttp", "bottega.api.routes.deploy"}),
        (("worker",), 104, set()),
        (("serve", "--port", "0"), 138, {"bottega.api.routes.deploy"}),
    ],
    ids=["API", "worker", "both"],
)
async def test_packages_of_some_uses_are_not_loaded_at_rest(
    arguments: tuple[str, ...], most_mb: int, late: set[str], database_url: str
) -> None:
    """``PYTHONPROFILEIMPORTTIME`` makes each process write the modules that it imports."""
    compileall.compile_dir(PACKAGE, quiet=2)  # to compile in the process takes some MB more
    async with cold_command(
        *arguments,
        DATABASE_URL=database_url,
        OPENAI_API_KEY="test-key",
        BOTTEGA_EMBEDDING_MODEL="builtin",
        PYTHONPROFILEIMPORTTIME="1",
    ) as started:
        imported = await until(lambda: _imported(started.log), lambda names: "bottega" in names)
        assert "bottega.container" in imported
        assert (LATE | late) & imported == set()
        root = psutil.Process(started.process.pid)
        tree = [root, *root.children(recursive=True)]
        assert sum(each.memory_info().rss for each in tree) <= most_mb * 1e6


def _imported(log: list[str]) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in log if line.startswith("import time:")}
