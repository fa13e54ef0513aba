"""Logs of earlier versions, whose events lack all fields that may be absent."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from uuid import UUID

import pytest
from typing_extensions import is_typeddict

from bottega.engine.replay import replay_run, replay_tasks
from bottega.events.data import DATA, Id, StoredLlmCompletedData, Time
from bottega.events.types import Event, EventType

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TASK = UUID(int=7)
LEAST = {Id: str(TASK), Time: NOW.isoformat(), str: "0", int: 1, float: 1.0, bool: False, Any: None}
IN_LOG = {**DATA, EventType.LLM_COMPLETED: StoredLlmCompletedData}


def least(kind: Any) -> Any:
    """Return the smallest value of a type: required fields, empty lists, null if allowed."""
    if kind in LEAST:
        return LEAST[kind]
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {name: least(hints[name]) for name in kind.__required_keys__}
    origin, options = get_origin(kind), get_args(kind)
    if origin is Literal:
        return options[0]
    if origin in (list, Sequence):
        return []
    if origin in (dict, Mapping):
        return {}
    return None if NoneType in options and origin is not Annotated else least(options[0])


@pytest.mark.parametrize("is_dispatched", [False, True])
@pytest.mark.parametrize("task", [None, TASK])
@pytest.mark.parametrize("kind", IN_LOG)
def test_event_without_optional_fields_can_be_replayed(
    kind: EventType, task: UUID | None, *, is_dispatched: bool
) -> None:
    kinds = [EventType.SUBAGENT_DISPATCHED] * is_dispatched + [EventType.AGENT_STARTED, kind]
    events = [
        Event(TASK, seq, each, NOW, task, None, "a", least(IN_LOG[each]))
        for seq, each in enumerate(kinds, 1)
    ]
    replay_tasks(replay_run(events), NOW)
