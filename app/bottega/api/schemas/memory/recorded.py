"""Stored parts of episodes, on the wire: objects with any members."""

from pydantic import ConfigDict

from bottega.api.schemas.base import Answer


class _Recorded(Answer):
    """A stored part of an episode, with any members."""

    model_config = ConfigDict(extra="allow")


class RecordedTask(_Recorded):
    """The task: `original_input`, `goals`, `constraints`, `context`, `complexity`."""


class RecordedExecution(_Recorded):
    """The execution: `plan`, `adaptations`, `duration_s`, `resources`, `trace` (null: not read)."""


class RecordedResult(_Recorded):
    """The result: `output`, `side_effects`, `quality`, `error`."""


class RecordedReflection(_Recorded):
    """The reflection: `insights`, `patterns`, `failures`, `performance`."""


class RecordedMetadata(_Recorded):
    """The metadata: `tools_used`, `strategies_applied`, `agents`."""
