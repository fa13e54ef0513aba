"""The reference is current, and names all that there is."""

import json
import re
from typing import Any, get_args

import pytest

from bottega.api.schemas.runs import LearningStatus
from bottega.errors import IllegalTransition
from bottega.events.data import Cause, InterruptStatus, Status, TaskStatus
from bottega.events.types import EventType, WaitReason
from bottega.graph.decisions import NodeStatus
from bottega.subagents.handle import SubagentStatus, check_move
from tests.docs.reference import FOLDER, PAGES, SNAPSHOTS, generated


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_what_is_generated_is_current(name: str) -> None:
    assert page(name) == generated(name), "python -m tests.docs.reference"


def test_each_code_of_an_operation_is_explained_and_no_other() -> None:
    document: dict[str, Any] = json.loads((SNAPSHOTS / "openapi.json").read_text())
    codes = {
        code
        for operations in document["paths"].values()
        for operation in operations.values()
        for code in operation.get("x-error-codes", ())
    }
    of_requests, _, _ = page("errors").partition("## Of runs and tasks")
    rows = re.findall(r"^\| (`.*?) \| \d", of_requests, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"`(\w+)`", row)} == codes


def test_each_event_says_when_it_comes() -> None:
    written, _, _ = page("events").partition("## Data of each type")
    rows = re.findall(r"^\| (`.*?) \|", written, re.MULTILINE)
    types = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert types == {str(each) for each in EventType}


@pytest.mark.parametrize(
    "kind", [Status, TaskStatus, InterruptStatus, LearningStatus, NodeStatus, WaitReason, Cause]
)
def test_each_status_is_named(kind: Any) -> None:
    assert [name for name in get_args(kind) if f"`{name}`" not in page("statuses")] == []


def legal(old: SubagentStatus, new: SubagentStatus) -> bool:
    try:
        check_move(old, new)
    except IllegalTransition:
        return False
    return True


def test_moves_of_tasks_are_those_of_the_code() -> None:
    shown = dict(
        re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", page("statuses"), re.MULTILINE)
    )
    moves = {
        str(old): ", ".join(sorted(f"`{new}`" for new in SubagentStatus if legal(old, new)))
        for old in SubagentStatus
        if not old.is_final
    }
    assert shown == moves
