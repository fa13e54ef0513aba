"""Rules about the code's structure that no linter checks."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.arch.sources import ROOT, calls, nodes, text_of

APP = sorted((ROOT / "app").rglob("*.py"))
MIGRATIONS = sorted((ROOT / "migrations").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def places(paths: list[Path], *names: str, but: tuple[str, ...] = ()) -> list[str]:
    """List the calls of ``names``, except those in the files ``but``."""
    wanted = re.compile(rf"(^|\.)({'|'.join(map(re.escape, names))})\b")
    return [
        f"{path.relative_to(ROOT)}:{line} {call}"
        for path in paths
        if str(path.relative_to(ROOT)) not in but
        for call, line in calls(path)
        if wanted.search(call.split("(")[0])
    ]


def test_the_clock_is_read_in_one_place() -> None:
    assert not places(
        APP,
        "datetime.now",
        "utcnow",
        "time.time",
        "time.monotonic",
        "perf_counter",
        but=("app/bottega/clock.py",),
    )


def test_only_the_api_knows_http_errors() -> None:
    allowed = ("app/bottega/api/server/middleware.py",)
    assert not places(APP, "HTTPException", but=allowed)


def test_the_driver_below_sqlalchemy_is_reached_in_one_place() -> None:
    names = re.compile(r"\b(get_raw_connection|driver_connection|dbapi_connection)\b")
    found = [path for path in (*APP, *MIGRATIONS) if names.search(text_of(path))]
    assert found == [ROOT / "app/bottega/db/migrate.py"]


def test_every_provider_of_the_service_has_an_account() -> None:
    """Objects that call models are made in one place, which gives them an account."""
    makers = {
        "FallbackProvider": ("app/bottega/model_services.py",),
        "OpenAIEmbedder": ("app/bottega/memory_services.py",),
        "PaidEmbedder": ("app/bottega/llm/openai_embedder.py",),
        "ModelProvider": ("app/bottega/llm/provider.py",),
        "open_provider": ("app/bottega/llm/fallback.py",),
        "OpenServer": (),  # but by its own class method
        "OpenServer.opened": ("app/bottega/llm/fallback.py",),
        "DemoProvider": ("app/bottega/dry_run/result.py",),
        # Of the library, for agents without the service.
        "OpenAIProvider": (),
        "AnthropicProvider": (),
        "GeminiProvider": (),
    }
    for name, where in makers.items():
        made = [
            place
            for place in places(APP, name, but=where)
            if place.split(" ")[1].split("(")[0].endswith(name)
        ]
        assert not made, name


def test_nothing_commits_by_hand() -> None:
    assert not places(APP, "connection.commit", "session.commit", "tx.commit")


def test_tests_wait_on_state_not_on_time() -> None:
    only = ("tests/waiting.py",)
    found = places(TESTS, "asyncio.sleep", "anyio.sleep", "time.sleep", but=only)
    assert not [place for place in found if not place.endswith("sleep(0)")]


LISTENING = ("recv()", "anext(", "receive()", "messages.get()", "heard.get()", "told.get()")


def test_no_test_waits_in_a_loop_of_its_own() -> None:
    """Refuse busy loops: they have no deadline and take the core from what they wait for."""
    own = ("tests/waiting.py", "tests/domain/subagents.py")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in TESTS
        if str(path.relative_to(ROOT)) not in own
        for node in nodes(path)
        if isinstance(node, ast.While)
        and {ast.unparse(each) for each in node.body} <= {"pass", "await asyncio.sleep(0)"}
        and not any(read in ast.unparse(node.test) for read in LISTENING)
    ]
    assert not found, "wait with tests.waiting.until"


def test_a_function_fits_on_a_screen() -> None:
    functions = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in APP
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not functions, "60 lines or more"


UNWANTED = {
    "bottega.cli.commands": ["fastapi", "openai", "sqlalchemy", "alembic", "networkx"],
    "bottega.agents": ["sqlalchemy", "asyncpg", "fastapi", "openai", "pydantic_settings", "numpy"],
    "bottega.worker": ["fastapi", "starlette", "uvicorn", "sse_starlette", "alembic"],
    "bottega.memory.episodes.embedding_worker": ["numpy"],
    "bottega.memory.episodes.maintenance": ["numpy"],
    "bottega.main": ["numpy"],
}
"""What a module must not load, in an order in which the parts before it load none of that."""


def test_importing_a_part_loads_only_what_it_needs() -> None:
    """Import one after the other in the same process: each alone would load the rest again."""
    code = """
import importlib, json, sys
for module, unwanted in json.loads(sys.argv[1]).items():
    importlib.import_module(module)
    for name in unwanted:
        if name in sys.modules:
            print(module, "loads", name)
"""
    loaded = subprocess.run(
        [sys.executable, "-c", code, json.dumps(UNWANTED)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert not loaded.stdout
