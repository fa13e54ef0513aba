"""The official suite judges the MCP server: ``@modelcontextprotocol/conformance``.

Its scenarios call tools by their names. Agents play them, and the fake model says what each does.
"""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.fake_model import FakeModel, Reply, calls, http_error, text
from tests.flows.test_conversations import define
from tests.mcp.suite import judged
from tests.service import Running

EXPECTED = {
    "prompts, resources, completion and logging are not offered": (
        *("logging-set-level/*", "completion-complete/*", "tools-call-with-logging/*"),
        *("resources-*/*", "prompts-*/*", "caching/sep-2549-prompts-list-caching-hints"),
        "caching/sep-2549-resources-*",
        "input-required-result-non-tool-request/*",
        "server-stateless/sep-2575-server-no-log-without-loglevel",
    ),
    "agents answer with text": (
        *("tools-call-image/*", "tools-call-audio/*", "tools-call-embedded-resource/*"),
        "tools-call-mixed-content/*",
    ),
    "agents ask people, never the client's model or its folders": (
        *("tools-call-sampling/*", "input-required-result-basic-sampling/*"),
        *("input-required-result-basic-list-roots/*", "input-required-result-capability-check/*"),
        "input-required-result-multiple-input-requests/*",
    ),
    "without a person the result names what waits; the call is not refused": (
        "server-stateless/sep-2575-server-rejects-undeclared-capability",
        "server-stateless/sep-2575-missing-capability-http-400",
    ),
    "what is asked is named by its id, never as the suite does": (
        "input-required-result-basic-elicitation/*",
    ),
    "schemas with these keywords are refused: $anchor, enumNames, x-mcp-header": (
        "json-schema-2020-12/sep-2106-anchor-keyword-preserved",
        "elicitation-sep1330-enums/elicitation-sep1330-legacy-enumnames",
        "http-custom-header-server-validation/*",
    ),
    "the extension 'tasks' is not offered": ("tasks-*/*",),
}
"""Checks that fail, as patterns, by reason."""

_TEXT = {"type": "string"}
_ENUM = ["option1", "option2", "option3"]
_TITLED = [{"const": "value1", "title": "First"}, {"const": "value2", "title": "Second"}]
_ADDRESS = {
    "type": "object",
    "properties": {"street": _TEXT, "city": _TEXT},
}
_SCHEMA_2020 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": _ADDRESS},
    "properties": {
        "name": _TEXT,
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": _TEXT,
        "email": _TEXT,
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
_DEFAULTS = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {
        "type": "string",
        "enum": ["active", "inactive", "pending"],
        "default": "active",
    },
    "verified": {"type": "boolean", "default": True},
}
_ENUMS = {
    "untitledSingle": {"type": "string", "enum": _ENUM},
    "titledSingle": {
        "type": "string",
        "oneOf": [*_TITLED, {"const": "value3", "title": "Third"}],
    },
    "legacyEnum": {
        "type": "string",
        "enum": ["opt1", "opt2", "opt3"],
    },
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": _ENUM}},
    "titledMulti": {
        "type": "array",
        "items": {"anyOf": [*_TITLED, {"const": "value3", "title": "Third"}]},
    },
}


def question(asked: str, properties: dict[str, Any] | None = None) -> Reply:
    properties = properties or {"name": _TEXT}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return calls(("ask_user", {"question": asked, "schema": schema}))


_ASKS = "test_input_required_result_"
PLAYED: dict[str, list[Reply]] = {
    "test_simple_text": [text("This is a simple text response for testing.")],
    "test_error_handling": [http_error(400)],
    "test_tool_with_progress": [
        *(calls(("calculator", {"expression": "1+1"})) for _ in range(3)),
        text("Done."),
    ],
    "test_elicitation": [
        question("Please provide your information", {"username": _TEXT, "email": _TEXT}),
        text("Thank you."),
    ],
    "test_elicitation_sep1034_defaults": [question("Who?", _DEFAULTS), text("Thank you.")],
    "test_elicitation_sep1330_enums": [question("Which?", _ENUMS), text("Thank you.")],
    f"{_ASKS}elicitation": [question("What is your name?"), text("Hello!")],
    f"{_ASKS}request_state": [
        question("Please confirm", {"ok": {"type": "boolean"}}),
        text("state-ok"),
    ],
    f"{_ASKS}multi_round": [
        question("Step 1: What is your name?"),
        question("Step 2: What is your favorite color?", {"color": _TEXT}),
        text("Thank you."),
    ],
    f"{_ASKS}tampered_state": [question("What is your name?"), text("Hello!")],
    f"{_ASKS}capabilities": [question("What is your name?"), text("Hello!")],
    "test_streaming_elicitation": [question("What is your name?"), text("Hello!")],
    "json_schema_2020_12_tool": [text("Done.")],
}
"""What the model answers for each agent, call by call."""


def decide(request: dict[str, Any]) -> Reply:
    messages: list[Any] = request["messages"]
    answers: list[Reply] = PLAYED[messages[0]["content"]]
    return answers[[message["role"] for message in messages].count("assistant")]


async def failures(url: str, requirements: str, folder: Path) -> set[str]:
    """Return the checks that fail, as ``scenario/check``."""
    words = ("server", "--url", url, "--requirements", requirements)
    await judged(*words, "--output-dir", str(folder))
    return failed_checks(folder)


def failed_checks(folder: Path) -> set[str]:
    """Return the failed checks among the suite's results."""
    found, passed = set(), 0
    for path in folder.rglob("checks.json"):
        scenario = re.sub(r"^server-|-\d{4}-\d\d-\d\dT.*", "", path.parent.name)
        for check in json.loads(path.read_text()):
            passed += check["status"] == "SUCCESS"
            if check["status"] == "FAILURE":
                found.add(f"{scenario}/{check['id']}")
    assert passed > 30
    return found


@pytest.mark.deep
@pytest.mark.parametrize("requirements", ["2025-11-25", "2026-07-28"])
async def test_the_official_suite_finds_only_what_is_not_offered(
    bottega: Running, model: FakeModel, tmp_path: Path, requirements: str
) -> None:
    model.decide = decide
    tools = [{"type": "builtin", "name": name} for name in ("ask_user", "calculator")]
    for name in PLAYED:
        schema = _SCHEMA_2020 if name.startswith("json") else {"type": "object"}
        more = {"system_message": name, "tools": tools, "input_schema": schema}
        await define(bottega, name, expose=["mcp"], description="Plays.", memory="off", **more)
    failed = await failures(f"http://127.0.0.1:{bottega.port}/mcp", requirements, tmp_path)
    patterns = [pattern for patterns in EXPECTED.values() for pattern in patterns]
    unexpected = {
        each for each in failed if not any(fnmatchcase(each, pattern) for pattern in patterns)
    }
    assert unexpected == set()
