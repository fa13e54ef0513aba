"""Each set of names is written once; SQL, the console and the command line have the same ones."""

import re
from typing import get_args

import pytest

from bottega.agents.provider import DialectName
from bottega.api.schemas.params import BuiltinTool
from bottega.cli.transcript import AWAITED
from bottega.events.types import FOR_PEOPLE, RunStatus, WaitReason
from bottega.llm.server import VENDORS
from bottega.memory.episodes.scope import MemoryMode
from bottega.tools.builtin import BUILTIN
from tests.arch.sources import PACKAGE, ROOT

BASELINE = (ROOT / "migrations" / "versions" / "0001_baseline.sql").read_text(encoding="utf-8")
WORDS = (PACKAGE / "console" / "js" / "en.js").read_text(encoding="utf-8")


def keys_of(table: str) -> list[str]:
    (body,) = re.findall(rf"export const {table} = \{{(.*?)\}};", WORDS, re.DOTALL)
    return re.findall(r"(\w+): ", body)


@pytest.mark.parametrize(
    ("constraint", "names"),
    [
        ("ck_runs_memory", get_args(MemoryMode)),
        ("ck_runs_status", tuple(RunStatus)),
        ("ck_run_waits_reason", get_args(WaitReason)),
    ],
)
def test_the_database_allows_the_same_names(constraint: str, names: tuple[str, ...]) -> None:
    (allowed,) = re.findall(rf"{constraint}\s+CHECK \(\w+ IN \((.*?)\)\)", BASELINE, re.DOTALL)
    assert sorted(re.findall(r"'(\w+)'", allowed)) == sorted(names)


@pytest.mark.parametrize("table", ["WAITS_FOR", "WAITED_FOR"])
def test_the_console_has_words_for_each_reason_of_a_wait(table: str) -> None:
    assert sorted(keys_of(table)) == sorted(get_args(WaitReason))


def test_the_command_line_has_words_for_each_reason_of_a_wait_but_for_people() -> None:
    assert sorted([*AWAITED, *FOR_PEOPLE]) == sorted(get_args(WaitReason))


def test_each_built_in_tool_can_be_defined() -> None:
    assert get_args(BuiltinTool.model_fields["name"].annotation) == tuple(BUILTIN)


def test_each_dialect_has_a_vendor() -> None:
    assert tuple(VENDORS) == get_args(DialectName)
