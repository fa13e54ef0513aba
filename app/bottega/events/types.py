"""Types of the events in a run's log. Pure.

:mod:`bottega.events.data` has the classes of events' data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self
from uuid import UUID


class EventType(StrEnum):
    RUN_QUEUED = "run.queued"
    RUN_STARTED = "run.started"
    RUN_RESUMED = "run.resumed"
    RUN_WAITING = "run.waiting"
    RUN_COMPLETED = "run.completed"
    RUN_FAILED = "run.failed"
    RUN_TIMEOUT = "run.timeout"
    RUN_CANCELLED = "run.cancelled"
    AGENT_STARTED = "agent.started"
    AGENT_WAITING = "agent.waiting"
    AGENT_RESUMED = "agent.resumed"
    AGENT_COMPLETED = "agent.completed"
    AGENT_FAILED = "agent.failed"
    LLM_STARTED = "llm.started"
    LLM_COMPLETED = "llm.completed"
    LLM_FAILED = "llm.failed"
    LLM_CANCELLED = "llm.cancelled"
    ANSWER_REJECTED = "answer.rejected"
    MESSAGE_RECEIVED = "message.received"
    MESSAGE_DELIVERED = "message.delivered"
    INTERRUPT_CREATED = "interrupt.created"
    INTERRUPT_RESOLVED = "interrupt.resolved"
    TOOL_STARTED = "tool.started"
    TOOL_COMPLETED = "tool.completed"
    TOOL_FAILED = "tool.failed"
    MEMORY_INJECTED = "memory.injected"
    MEMORY_PUBLISHED = "memory.published"
    CONTEXT_RECALLED = "context.recalled"
    SUBAGENT_DISPATCHED = "subagent.dispatched"
    SUBAGENT_DEQUEUED = "subagent.dequeued"
    SUBAGENT_STATUS_CHANGED = "subagent.status_changed"
    SUBAGENT_RESUMED = "subagent.resumed"
    SUBAGENT_RETRIED = "subagent.retried"
    SUBAGENT_MESSAGE_SENT = "subagent.message_sent"
    SUBAGENT_BACKPRESSURE = "subagent.backpressure"
    SUBAGENT_CIRCUIT_OPENED = "subagent.circuit_opened"
    SUBAGENT_COMPLETED = "subagent.completed"
    SUBAGENT_FAILED = "subagent.failed"
    SUBAGENT_TIMEOUT = "subagent.timeout"
    SUBAGENT_CANCELLED = "subagent.cancelled"
    NODE_STARTED = "node.started"
    NODE_COMPLETED = "node.completed"
    NODE_FAILED = "node.failed"
    NODE_SKIPPED = "node.skipped"
    EDGE_DECIDED = "edge.decided"
    BATCH_STARTED = "batch.started"
    BATCH_ITEM_ENDED = "batch.item_ended"
    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_CANCELLED = "batch.cancelled"
    EPISODE_STORED = "episode.stored"
    WARNING = "warning"


class RunStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


UNFINISHED = frozenset((RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.WAITING))

WaitReason = Literal["person", "client", "children", "model", "time"]
FOR_PEOPLE = ("person", "client")
"""Reasons of waits that do not count towards timeouts: people's decisions, clients' tools."""

FINAL_EVENT = {
    RunStatus.COMPLETED: EventType.RUN_COMPLETED,
    RunStatus.FAILED: EventType.RUN_FAILED,
    RunStatus.TIMEOUT: EventType.RUN_TIMEOUT,
    RunStatus.CANCELLED: EventType.RUN_CANCELLED,
}
"""The last event of a run, by its final status."""

STATE = "server_state"
"""Field of ``llm.completed`` with the model server's state; clients do not see this field."""

Data = Any
"""Data of an event of any type: an object of the type's class in :mod:`bottega.events.data`."""

TOOL_ERROR = "tool_error"
"""Error type for a tool's error that has no type."""

FINAL_EVENT_TYPES = frozenset(
    (
        *FINAL_EVENT.values(),
        EventType.BATCH_COMPLETED,
        EventType.BATCH_FAILED,
        EventType.BATCH_CANCELLED,
    )
)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a run's log.

    Attributes:
        seq: 1, 2, 3 … over all tasks of the run, without gaps.
    """

    run_id: UUID
    seq: int
    type: str
    at: datetime
    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str | None
    data: Data

    @property
    def is_final(self) -> bool:
        return self.type in FINAL_EVENT_TYPES


def public_data(data: Data) -> Data:
    """Return an event's data in the form of the API."""
    if STATE not in data:
        return data
    return {name: value for name, value in data.items() if name != STATE}


class EventError(NamedTuple):
    """The ``error`` of a failed model call, agent or task. A cancelled task has only a message."""

    code: str | None
    message: str | None

    @classmethod
    def of(cls, data: Data) -> Self:
        error = data.get("error")
        if isinstance(error, Mapping):
            return cls(error.get("code"), error.get("message"))
        return cls(None, error)
