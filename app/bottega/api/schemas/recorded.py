"""Parts of episodes as they were stored, on the wire: objects with whatever members they have."""

from pydantic import ConfigDict

from bottega.api.schemas.base import Answer


class _Recorded(Answer):
    """A part of an episode, as it was stored: whatever members it has."""

    model_config = ConfigDict(extra="allow")


class RecordedTask(_Recorded):
    """The task: `original_input`, `goals`, `constraints`, `context`, `complexity`."""


class RecordedExecution(_Recorded):
    """The execution: `plan`, `adaptations`, `duration_s`, `resources`, and `trace`, null if it
    was not asked for."""


class RecordedResult(_Recorded):
    """The result: `output`, `side_effects`, `quality`, `error`."""


class RecordedReflection(_Recorded):
    """The lessons: `insights`, `patterns`, `failures`, `performance`."""


class RecordedMetadata(_Recorded):
    """By what it was done: `tools_used`, `strategies_applied`, `agents`."""
