"""All types of stored events: one schema each, from which both documents come."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import create_model
from pydantic.json_schema import models_json_schema

from bottega.api.schemas.events import data, tools
from bottega.api.schemas.events.data import EventData
from bottega.api.schemas.runs import Event
from bottega.events.types import EventType

DATA: Mapping[EventType, type[EventData]] = {
    EventType.RUN_QUEUED: data.RunQueuedData,
    EventType.RUN_STARTED: data.RunClaimedData,
    EventType.RUN_RESUMED: data.RunClaimedData,
    EventType.RUN_WAITING: data.RunWaitingData,
    EventType.RUN_COMPLETED: data.RunEndedData,
    EventType.RUN_FAILED: data.RunEndedData,
    EventType.RUN_TIMEOUT: data.RunEndedData,
    EventType.RUN_CANCELLED: data.RunEndedData,
    EventType.AGENT_STARTED: data.AgentStartedData,
    EventType.AGENT_WAITING: data.AttemptData,
    EventType.AGENT_RESUMED: data.AttemptData,
    EventType.AGENT_COMPLETED: data.AgentCompletedData,
    EventType.AGENT_FAILED: data.AgentFailedData,
    EventType.LLM_STARTED: data.LlmStartedData,
    EventType.LLM_COMPLETED: data.LlmCompletedData,
    EventType.LLM_FAILED: data.LlmFailedData,
    EventType.LLM_CANCELLED: data.LlmCancelledData,
    EventType.ANSWER_REJECTED: data.AnswerRejectedData,
    EventType.MESSAGE_RECEIVED: data.MessageReceivedData,
    EventType.MESSAGE_DELIVERED: data.MessageDeliveredData,
    EventType.INTERRUPT_CREATED: data.InterruptCreatedData,
    EventType.INTERRUPT_RESOLVED: data.InterruptResolvedData,
    EventType.TOOL_STARTED: tools.ToolStartedData,
    EventType.TOOL_COMPLETED: tools.ToolEndedData,
    EventType.TOOL_FAILED: tools.ToolEndedData,
    EventType.MEMORY_INJECTED: data.MemoryInjectedData,
    EventType.MEMORY_PUBLISHED: data.PublicationData,
    EventType.CONTEXT_RECALLED: data.ContextRecalledData,
    EventType.SUBAGENT_DISPATCHED: data.SubagentDispatchedData,
    EventType.SUBAGENT_DEQUEUED: data.SubagentDequeuedData,
    EventType.SUBAGENT_STATUS_CHANGED: data.SubagentStatusData,
    EventType.SUBAGENT_RESUMED: data.AttemptData,
    EventType.SUBAGENT_RETRIED: data.SubagentRetriedData,
    EventType.SUBAGENT_MESSAGE_SENT: data.SubagentMessageData,
    EventType.SUBAGENT_BACKPRESSURE: data.SubagentBackpressureData,
    EventType.SUBAGENT_CIRCUIT_OPENED: data.SubagentCircuitData,
    EventType.SUBAGENT_COMPLETED: data.SubagentCompletedData,
    EventType.SUBAGENT_FAILED: data.SubagentStoppedData,
    EventType.SUBAGENT_TIMEOUT: data.SubagentStoppedData,
    EventType.SUBAGENT_CANCELLED: data.SubagentStoppedData,
    EventType.EPISODE_STORED: data.EpisodeStoredData,
    EventType.WARNING: data.WarningData,
}
"""Schema of an event's ``data``, by type; docs/events.md explains the fields."""


class OtherEvent(Event):
    """An event of a type that this version does not know."""


def _event(kind: EventType) -> type[Event]:
    """Return the schema of a type's events: the envelope with its data."""
    words = kind.value.replace(".", "_").split("_")
    fields: dict[str, Any] = {"type": (Literal[kind.value], ...), "data": (DATA[kind], ...)}
    return create_model(
        "".join(map(str.capitalize, words)) + "Event",
        __base__=Event,
        __doc__=f"An event of the type `{kind}`.",
        **fields,
    )


EVENTS: Mapping[EventType, type[Event]] = {kind: _event(kind) for kind in EventType}
"""Schema of an event, by type."""


def type_events(schemas: dict[str, Any]) -> None:
    """Replace the schema ``Event`` by one for each type, in place.

    ``KnownEvent`` is one of all types that this version knows. What comes from other versions or
    from plugins is an ``OtherEvent``.
    """
    ref = "#/components/schemas/{model}"
    models: tuple[type[Event], ...] = (*EVENTS.values(), OtherEvent)
    _, made = models_json_schema([(each, "serialization") for each in models], ref_template=ref)
    for name, schema in made["$defs"].items():
        schemas.setdefault(name, schema)
    refs = {str(kind): ref.format(model=model.__name__) for kind, model in EVENTS.items()}
    schemas["KnownEvent"] = {
        "title": "KnownEvent",
        "description": "An event of a type that this version knows.",
        "oneOf": [{"$ref": each} for each in refs.values()],
        "discriminator": {"propertyName": "type", "mapping": refs},
    }
    either = ("KnownEvent", "OtherEvent")
    schemas["Event"] = {
        "title": "Event",
        "description": Event.__doc__,
        "anyOf": [{"$ref": ref.format(model=each)} for each in either],
    }
