"""Data of events that have more than one form: absent fields and errors."""

from typing import Any

import pytest

from bottega.events.data import is_repeated, shared_metadata
from bottega.events.types import EventError

NO_ERROR = EventError(None, None)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({}, NO_ERROR),
        ({"error": None}, NO_ERROR),
        ({"error": {"code": None, "message": None}}, NO_ERROR),
        ({"error": {"code": "timeout"}}, EventError("timeout", None)),
        ({"error": {"code": "x", "message": "no"}}, EventError("x", "no")),
        ({"error": "parent-cancelled"}, EventError(None, "parent-cancelled")),
    ],
)
def test_error_may_be_an_object_a_text_or_absent(data: dict[str, Any], error: EventError) -> None:
    assert EventError.of(data) == error


def test_task_reads_only_shared_metadata() -> None:
    task: Any = {"prompt": "Go.", "metadata": {"title": "a", "own": 1}}
    assert shared_metadata(task) == {}
    assert shared_metadata(task | {"share_metadata": ["title"]}) == {"title": "a"}
    assert shared_metadata(task | {"metadata": None}) == {}


def test_model_call_is_repeated_if_the_failure_names_its_try() -> None:
    failed: Any = {"call": 1, "attempt": 1, "error": {"code": "x", "message": "no"}}
    assert not is_repeated(failed)
    assert is_repeated(failed | {"try": 1})
