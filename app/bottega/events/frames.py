"""Frames, which are events in the form that clients get, and filters of frames."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic_core import from_json, to_json

from bottega.events.data import LiveText, ToolReport
from bottega.events.types import FINAL_EVENT_TYPES, STATE, EventType, public_data

LLM_DELTA = "llm.delta"
"""Live text of a model call. It is not stored, so it has no ``seq``."""

OUTPUT_CHUNK = "subagent.output_chunk"
"""Live text of an asynchronous task, for clients whose filter names this type."""

TOOL_PROGRESS = "tool.progress"
"""Progress of a call of an MCP tool. It is not stored, so it has no ``seq``."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One event for clients.

    Attributes:
        seq: the event's ``seq``; ``None`` if the event is not stored.
        depth: depth of the event's task, as ``/tasks`` shows it; -1: an event of the root or run.
        body: the envelope as JSON.
    """

    seq: int | None
    type: str
    agent: str | None
    depth: int
    body: bytes

    @property
    def is_final(self) -> bool:
        return self.type in FINAL_EVENT_TYPES


@dataclass(frozen=True, slots=True)
class Filter:
    """A client's filter of events. The final event always passes. ``None``: any value passes.

    Attributes:
        agents: names of the agents whose events pass.
        types: types of the events that pass.
        depth: maximum depth of a task whose events pass; 0: the tasks that the root called. The
            root's events always pass.
    """

    agents: frozenset[str] | None = None
    types: frozenset[str] | None = None
    depth: int | None = None

    def passes(self, frame: Frame) -> bool:
        """Return true if the client gets this frame."""
        return frame.is_final or self.wants(frame.type, frame.agent, frame.depth)

    def wants(self, kind: str, agent: str | None, depth: int) -> bool:
        return (
            (self.types is None or kind in self.types)
            and (self.agents is None or agent in self.agents)
            and (self.depth is None or depth <= self.depth)
        )

    def kinds_of_text(self, agent: str | None, depth: int, *, is_async: bool) -> list[str]:
        """Return the types of the frames in which the client gets a model call's live text.

        Args:
            is_async: true if the call belongs to an asynchronous task.
        """
        by_name = is_async and self.types is not None
        kinds = (LLM_DELTA, OUTPUT_CHUNK) if by_name else (LLM_DELTA,)
        return [kind for kind in kinds if self.wants(kind, agent, depth)]


def of_row(run_id: UUID, row: Mapping[str, Any]) -> Frame:
    """Return the frame of a row, whose data are JSON text. Remove a model server's state."""
    data = row["data"].encode()
    if row["type"] == EventType.LLM_COMPLETED and f'"{STATE}"'.encode() in data:
        data = to_json(public_data(from_json(data)))
    head = to_json(
        {
            "seq": row["seq"],
            "type": row["type"],
            "run_id": run_id,
            "task_id": row["task_id"],
            "agent": row["agent"],
            "parent_task_id": row["parent_task_id"],
            "at": row["at"],
        }
    )
    depth = -1 if row["depth"] is None else row["depth"]
    body = b'%s,"data":%s}' % (head[:-1], data)
    return Frame(row["seq"], row["type"], row["agent"], depth, body)


def of_text(
    kind: str,
    run_id: UUID,
    *,
    task_id: UUID | None,
    parent_task_id: UUID | None,
    agent: str | None,
    depth: int,
    at: datetime,
    data: LiveText | ToolReport,
) -> Frame:
    """Return a frame of live text or of a tool's progress. The log does not store these."""
    envelope = {
        "seq": None,
        "type": kind,
        "run_id": run_id,
        "task_id": task_id,
        "agent": agent,
        "parent_task_id": parent_task_id,
        "at": at,
        "data": data,
    }
    return Frame(None, kind, agent, depth, to_json(envelope))
