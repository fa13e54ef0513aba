"""Every snippet in the README and in docs/ is executed, here or by CI."""

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import SecretStr

from bottega.settings import Settings
from tests.fake_model import FakeModel
from tests.llm.vendors.anthropic import Anthropic
from tests.llm.vendors.gemini import Gemini
from tests.service import running
from tests.tools.raw_server import RawServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *ROOT.glob("benchmarks/*.md")]
LINKED += ROOT.glob("examples/**/README.md")
LONGER = {
    f"docs/{name}.md"
    for name in (
        "guides/agents-as-files",
        "guides/conversations-and-people",
        "guides/conversations-in-a-browser",
        "guides/memory",
        "guides/models",
        "operate/install",
        "operate/database",
        "operate/retention",
        "reference/http",
    )
}
"""Pages whose programs run before a release; the gate runs those of the others."""
_BLOCK = re.compile(
    r"(?:<!-- (executed by|example): ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_MARKED = {"sh", "bash", "console", "yaml", "toml", "ini", "nginx", "env", "dockerfile"}
"""Languages of blocks that something executes, or that are marked as examples with the reason."""
_SHOWN_ONLY = {"text", "json", "http", "python", "html", "mermaid"}
_ANSWERS = {"text", "json", "http"}
"""Languages of answers: such a block without a mark shows what the block before it writes."""
_SHELL = r"""
set -euo pipefail
grep() { # reads all: a command before it fails if grep -q leaves while that still writes
    if [ $# = 2 ] && [ "$1" = -q ]; then command grep "$2" >/dev/null; else command grep "$@"; fi
}
"""
_PYTHON = """
import sys
def answer_in(number):
    sys.stdout.flush()
    sys.stdout = open(f"{number}.out", "w")
"""


class Block(NamedTuple):
    """A fenced block of a page, with the mark before it: ``executed by`` or ``example``."""

    mark: str
    who: str
    kind: str
    code: str


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text())]


def run_pages(has: Callable[[Block], bool]) -> list[Any]:
    """Return the pages with a block of which ``has`` is true."""
    return [
        pytest.param(page, marks=pytest.mark.deep if _name(page) in LONGER else (), id=_name(page))
        for page in PAGES
        if any(map(has, blocks(page)))
    ]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_snippet_names_its_executor(page: Path) -> None:
    for how, who, kind, code in blocks(page):
        assert kind in _MARKED | _SHOWN_ONLY, code
        if kind not in _MARKED:
            continue
        assert how, f"say what executes this, or why it is an example: {code}"
        if how == "example":
            assert len(who.split()) > 2, code
        elif who not in ("ci", "tests", "drill"):
            assert page.name in (ROOT / who).read_text(), f"{who} does not read {page.name}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", LINKED, ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


def fits(shown: Any, found: Any) -> bool:
    """Return whether an answer is the one that a page shows.

    A page leaves fields out, and writes ``…`` for a text, a part of a text, any value, or further
    items of a list.
    """
    if shown == "…":
        return True
    if isinstance(shown, str) and isinstance(found, str):
        pattern = ".*".join(map(re.escape, shown.split("…")))
        return re.fullmatch(pattern, found, re.DOTALL) is not None
    if isinstance(shown, dict) and isinstance(found, dict):
        return all(key in found and fits(shown[key], found[key]) for key in shown)
    if isinstance(shown, list) and isinstance(found, list):
        if shown[-1:] == ["…"]:
            shown, found = shown[:-1], found[: len(shown) - 1]
        return len(shown) == len(found) and all(map(fits, shown, found))
    return bool(shown == found)


def documents(text: str) -> list[Any]:
    """Return the JSON documents that follow each other in a text."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        document, end = decoder.raw_decode(text)
        found.append(document)
        text = text[end:]
    return found


def wrong_answers(page: Path, executed: Callable[[Block], bool], folder: Path) -> list[str]:
    """Compare what each block wrote with the answer that the page shows behind it."""
    wrong = []
    for number, (block, answer) in enumerate(pairwise(blocks(page))):
        if not executed(block) or answer.kind not in _ANSWERS or answer.mark:
            continue
        written = (folder / f"{number:03}.out").read_text()
        if answer.kind == "json":
            same = fits(documents(answer.code), documents(written))
        else:
            same = fits(" ".join(answer.code.split()), " ".join(written.split()))
        if not same:
            wrong.append(f"{block.code}answers\n{written}\nbut the page shows\n{answer.code}")
    return wrong


def answers(folder: Path) -> list[str]:
    """Return what the blocks wrote, in their order."""
    return [path.read_text() for path in sorted(folder.glob("*.out"))]


async def execute(*command: str, cwd: Path, **environment: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env={**os.environ, **environment}, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode() + "".join(answers(cwd))


def is_python(block: Block) -> bool:
    return block.kind == "python"


def is_tested_shell(block: Block) -> bool:
    return block.mark == "executed by" and block.who == "tests"


@pytest.mark.parametrize("page", run_pages(is_python))
async def test_python_snippets_work(
    page: Path, tmp_path: Path, settings: Settings, database_url: str
) -> None:
    """Run a page's Python blocks as one program, with a server of its own if it needs one."""
    parts = [
        f"answer_in('{number:03}')\n{block.code}"
        for number, block in enumerate(blocks(page))
        if is_python(block)
    ]
    text = _PYTHON + "\n".join(parts)
    program = tmp_path / "program.py"
    program.write_text(text)
    async with (
        FakeModel() as model,
        Anthropic() as anthropic,
        Gemini() as gemini,
        AsyncExitStack() as stack,
    ):
        address = {}
        if '"BOTTEGA' in text:
            asking = settings.model_copy(
                update={"openai_base_url": model.base_url, "egress_allow": ["127.0.0.1"]}
            )
            server = await stack.enter_async_context(running(asking, database_url, worker=True))
            url = f"http://127.0.0.1:{server.port}"
            address = {"BOTTEGA_URL": url, "BOTTEGA": url}
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
    wrong = wrong_answers(page, is_python, tmp_path)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", run_pages(is_tested_shell))
async def test_shell_snippets_work(
    page: Path, tmp_path: Path, settings: Settings, database_url: str
) -> None:
    """Run a page's shell blocks as one script, against its own server."""
    parts = [
        f"exec >{number:03}.out\n{block.code}"
        for number, block in enumerate(blocks(page))
        if is_tested_shell(block)
    ]
    script = _SHELL + "\n".join(parts)
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
                BOTTEGA_URL=f"http://127.0.0.1:{server.port}",
                PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            )
    wrong = wrong_answers(page, is_tested_shell, tmp_path)
    assert not wrong, "\n".join(wrong)


def test_test_files_named_on_the_security_page_exist() -> None:
    named = re.findall(
        r"`(?:tests/\w+/)?(test_\w+\.py)`", (ROOT / "docs/explain/security.md").read_text()
    )
    assert len(named) > 20
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(named) <= there
