"""Each set of names is written once; SQL, the console and the command line have the same ones."""

import re
from collections.abc import Collection
from typing import Any, get_args

import pytest

from bottega.agents.provider import DialectName
from bottega.api.schemas.params import BuiltinTool
from bottega.cli.transcript import AWAITED
from bottega.events.data import OutcomeValue, Status, TaskStatus
from bottega.events.types import FOR_PEOPLE, RunStatus, WaitReason
from bottega.llm.server import VENDORS
from bottega.memory.episodes.episode import Outcome
from bottega.memory.episodes.scope import MemoryMode
from bottega.subagents.handle import SubagentStatus
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


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (BuiltinTool.model_fields["name"].annotation, BUILTIN),
        (DialectName, VENDORS),
        (OutcomeValue, Outcome),
        (Status, RunStatus),
        (TaskStatus, SubagentStatus),
        (WaitReason, keys_of("WAITS_FOR")),
        (WaitReason, keys_of("WAITED_FOR")),
        (WaitReason, (*AWAITED, *FOR_PEOPLE)),
    ],
)
def test_both_lists_have_the_same_names(names: Any, same: Collection[str]) -> None:
    assert sorted(get_args(names)) == sorted(same)
