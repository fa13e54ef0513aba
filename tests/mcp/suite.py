"""The official suite for MCP clients and servers: ``@modelcontextprotocol/conformance``."""

import asyncio
import fcntl
import shutil
import subprocess
from pathlib import Path

import playwright

from tests.judges import needed

_FOLDER = Path(__file__).parents[1] / "contract" / "conformance"
_SCRIPT = _FOLDER / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
_NODE = Path(playwright.__file__).parent / "driver" / "node"
"""The suite needs Node.js 22; this one comes with the tests' browser."""


async def judged(*words: str) -> str:
    """Run the suite, which is installed at its first use; return what it prints."""
    await asyncio.to_thread(_install)
    process = await asyncio.create_subprocess_exec(
        *(str(_NODE), str(_SCRIPT), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    return (await process.communicate())[0].decode()


def _install() -> None:
    found = shutil.which("npm") if _NODE.exists() else None
    npm = needed(found, "this needs npm, and Playwright for Python")
    with (_FOLDER / "package.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not _SCRIPT.exists():
            options = ("--ignore-scripts", "--no-audit", "--no-fund")
            subprocess.run([npm, "ci", *options], cwd=_FOLDER, check=True)
