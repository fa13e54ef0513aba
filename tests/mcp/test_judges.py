"""The official suite and the reference servers judge the client of MCP servers.

A reference server is tried if it is on the PATH: ``mcp-server-time`` and ``mcp-server-git`` of
PyPI; ``mcp-server-filesystem`` and ``mcp-server-everything``, programs of the npm packages
``@modelcontextprotocol/server-…``.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bottega.mcp.client import McpConnections, list_tools
from bottega.tools.egress import Egress
from bottega.tools.mcp import McpServer, StdioCommand
from tests.mcp.suite import judged

pytestmark = pytest.mark.deep

CLIENT = f"{sys.executable} -m tests.mcp.conformance_client"

SCENARIOS = {
    "2025-11-25": (
        *("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry"),
        "json-schema-2020-12-preservation",
    ),
    "2026-07-28": (
        *("tools_call", "request-metadata", "sep-2322-client-request-state"),
        *("http-standard-headers", "http-custom-headers", "http-invalid-tool-headers"),
        *("json-schema-ref-no-deref", "json-schema-2020-12-preservation"),
    ),
}
"""All that each revision requires but ``auth/*``: Bottega authenticates with the secret headers
that are stored for a server, and has no OAuth."""

_NO_ANCHOR = "the suite's tool has a schema with $anchor, which our bounds refuse: it is left out"
EXPECTED = dict.fromkeys(
    (
        "json-schema-2020-12-client-$schema-preserved",
        "json-schema-2020-12-client-$defs-preserved",
        "json-schema-2020-12-client-additionalProperties-preserved",
        "sep-2106-client-composition-keywords-preserved",
        "sep-2106-client-conditional-keywords-preserved",
        "sep-2106-client-anchor-keyword-preserved",
    ),
    _NO_ANCHOR,
)
"""Checks that fail, with the reason."""


@pytest.mark.parametrize(
    ("revision", "scenario"), [(era, each) for era, some in SCENARIOS.items() for each in some]
)
async def test_the_official_suite_finds_only_what_is_expected(
    revision: str, scenario: str, tmp_path: Path
) -> None:
    words = ("client", "--command", CLIENT, "--scenario", scenario, "--spec-version", revision)
    told = await judged(*words, "--output-dir", str(tmp_path))
    (found,) = re.findall(r"^Passed: (\d+)/\d+, (\d+) failed", told, re.MULTILINE)
    failed = re.findall(r"\[([^\s\]]+) *\] \S*FAILURE", told)
    assert len(failed) == int(found[1])
    assert set(failed) <= set(EXPECTED), told
    assert int(found[0]) > 0


def _repository(folder: Path) -> None:
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "First"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *words], cwd=folder, check=True)


TRIES: dict[str, tuple[tuple[str, ...], str, dict[str, Any], str]] = {
    "mcp-server-time": ((), "get_current_time", {"timezone": "Asia/Tokyo"}, "Asia/Tokyo"),
    "mcp-server-git": (("--repository", "{}"), "git_log", {"repo_path": "{}"}, "Message: First"),
    "mcp-server-filesystem": (("{}",), "read_text_file", {"path": "{}/a.txt"}, "A note."),
    "mcp-server-everything": (("stdio",), "trigger-elicitation-request", {}, "Name: Ada"),
}
"""Arguments of each server's command, a tool, its arguments, and words of the result."""


@pytest.mark.parametrize("name", TRIES)
async def test_a_reference_server_is_listed_and_called(name: str, tmp_path: Path) -> None:
    if (command := shutil.which(name)) is None:
        pytest.skip(f"{name} is not on the PATH")
    _repository(tmp_path)
    (tmp_path / "a.txt").write_text("A note.")
    words, tool, arguments, expected = TRIES[name]
    args = tuple(each.format(tmp_path) for each in words)
    arguments = {key: value.format(tmp_path) for key, value in arguments.items()}
    server = McpServer(name, command=StdioCommand(command, args))

    async def ask(message: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"name": "Ada", "check": True}

    tools, warnings = await list_tools(server, Egress())
    assert tool in [each.name for each in tools]
    assert warnings == []
    connections = McpConnections(Egress())
    result = await connections.call(server, tool, arguments, on_question=ask)
    await connections.aclose()
    assert not result.is_error
    assert expected in " ".join(part.text or "" for part in result.parts)
