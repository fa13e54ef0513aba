"""Every snippet in the README and in docs/ is executed, here or by CI."""

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.llm.vendors.anthropic import Anthropic
from tests.llm.vendors.gemini import Gemini
from tests.service import running
from tests.tools.raw_server import RawServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LONGER = {f"docs/{name}.md" for name in ("conversations", "memory", "models", "operating")}
"""Pages whose programs run before a release; the gate runs those of the others."""
_BLOCK = re.compile(
    r"(?:<!-- (executed by|example): ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_MARKED = {"sh", "bash", "console", "yaml", "toml", "ini", "nginx", "env", "dockerfile"}
"""Languages of blocks that something executes, or that are marked as examples with the reason."""
_SHELL = r"""
set -euo pipefail
grep() { # reads all: a command before it fails if grep -q leaves while that still writes
    if [ $# = 2 ] && [ "$1" = -q ]; then command grep "$2" >/dev/null; else command grep "$@"; fi
}
"""
_SHOWN_ONLY = {"text", "json", "python", "html"}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str | None, str, str]]:
    """Yield (executed by, language, code) of each fenced block."""
    return [
        (who if how == "executed by" else None, kind, code)
        for how, who, kind, code in _BLOCK.findall(page.read_text())
    ]


def run_pages(has: Callable[[str | None, str], bool]) -> list[Any]:
    """Return the pages with a block of which ``has`` is true of its executor and language."""
    return [
        pytest.param(page, marks=pytest.mark.deep if _name(page) in LONGER else (), id=_name(page))
        for page in PAGES
        if any(has(who, kind) for who, kind, _ in blocks(page))
    ]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_snippet_names_its_executor(page: Path) -> None:
    for how, who, kind, code in _BLOCK.findall(page.read_text()):
        assert kind in _MARKED | _SHOWN_ONLY, code
        if kind not in _MARKED:
            continue
        assert how, f"say what executes this, or why it is an example: {code}"
        if how == "example":
            assert len(who.split()) > 2, code
        elif who not in ("ci", "tests", "drill"):
            assert page.name in (ROOT / who).read_text(), f"{who} does not read {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


async def execute(*command: str, cwd: Path, **environment: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env={**os.environ, **environment}, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


@pytest.mark.parametrize("page", run_pages(lambda _, kind: kind == "python"))
async def test_python_snippets_work(
    page: Path, tmp_path: Path, settings: Settings, database_url: str
) -> None:
    """Run a page's Python blocks as one program, with a server of its own if it needs one."""
    text = "\n".join(code for _, kind, code in blocks(page) if kind == "python")
    program = tmp_path / "program.py"
    program.write_text(text)
    async with (
        FakeModel() as model,
        Anthropic() as anthropic,
        Gemini() as gemini,
        AsyncExitStack() as stack,
    ):
        address = {}
        if '"BOTTEGA"' in text:
            asking = settings.model_copy(
                update={"openai_base_url": model.base_url, "egress_allow": ["127.0.0.1"]}
            )
            server = await stack.enter_async_context(running(asking, database_url, worker=True))
            address = {"BOTTEGA": f"http://127.0.0.1:{server.port}"}
        await execute(
            sys.executable,
            str(program),
            cwd=tmp_path,
            OPENAI_BASE_URL=model.base_url,
            OPENAI_API_KEY="test-key",
            ANTHROPIC_BASE_URL=anthropic.base_url,
            ANTHROPIC_API_KEY="test-key",
            GOOGLE_GEMINI_BASE_URL=gemini.base_url,
            GEMINI_API_KEY="test-key",
            PYTHONPATH=str(ROOT / "app"),
            **address,
        )
        assert model.requests
        assert not [*anthropic.refusals, *gemini.refusals]


@pytest.mark.parametrize("page", run_pages(lambda who, _: who == "tests"))
async def test_shell_snippets_work(
    page: Path, tmp_path: Path, settings: Settings, database_url: str
) -> None:
    """Run a page's shell blocks as one script, against its own server."""
    script = _SHELL + "\n".join(code for who, _, code in blocks(page) if who == "tests")
    secret = Settings(_env_file=None, webhook_secret=f"whsec_{'A' * 32}").webhook_secret
    async with FakeModel() as model, RawServer() as hook:
        configured = settings.model_copy(
            update={
                "openai_base_url": model.base_url,
                "webhook_secret": secret,
                "secrets_key": SecretStr("A" * 43 + "="),
                "egress_allow": ["127.0.0.1"],
            }
        )
        async with running(configured, database_url, worker=True) as server:
            await execute(
                "bash",
                "-c",
                script,
                cwd=tmp_path,
                HOOK=hook.url(),
                DATABASE_URL=database_url,
                BOTTEGA=f"http://127.0.0.1:{server.port}",
                PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            )


def test_test_files_named_on_the_security_page_exist() -> None:
    named = re.findall(r"`(?:tests/\w+/)?(test_\w+\.py)`", (ROOT / "docs/security.md").read_text())
    assert len(named) > 20
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(named) <= there
