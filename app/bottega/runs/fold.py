"""Fold a run's journal into what its next attempt need not do again. Pure.

A run that is resumed is simply run again with the fold beside it: calls that it answers are not
made again, events that it holds are not written again. Sub-agents run again too, and come to the
same end because all of their own calls are answered; so they publish what they published.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic_core import from_json

from bottega.agents.messages import AgentUsage, AssistantMessage, ToolResult
from bottega.errors import ModelError
from bottega.events.types import STATE, Event, EventType
from bottega.memory.following import SOURCE

EPISODE = "episode:"
"""What the source of something recalled begins with, if it is an episode; no agent's name does."""
TAUGHT = (EPISODE, SOURCE)
"""The same of all that earlier runs taught."""
ANALYSIS = "analysis:"
"""The same of what a model said that the run's task asks for."""

Key = tuple[Any, ...]
"""What makes an event the same one when a run is executed again: its type and what it is about."""


@dataclass(slots=True)
class Fold:
    """What the journal of a run's earlier attempts holds.

    Attributes:
        seen: the ``seq`` of each event by its key.
        answers: model answers by (task, call).
        failures: of model calls that failed for good, by (task, call).
        results: results of tools that are no sub-agents, by (task, call, tool call).
        begun: those of them that were begun.
        carried: which of the answers another run paid for.
        versions: of what each agent published, by task.
        published_at: the time of that, by task.
        sources: the agents whose answers a task was given before its first model call, by task.
        recalled: data of what the root was given of earlier runs at its start, in order.
        helped: the same of what it was given when a call failed, by the number of the model call
            that made it and its own id, in order.
        analysis: what a model said that the task asks for, as JSON.
        asked: the number of the last model call that the root began; 0: it began none.
    """

    seen: dict[Key, int] = field(default_factory=dict)
    answers: dict[Key, AssistantMessage] = field(default_factory=dict)
    failures: dict[Key, ModelError] = field(default_factory=dict)
    results: dict[Key, ToolResult] = field(default_factory=dict)
    begun: set[Key] = field(default_factory=set)
    carried: set[Key] = field(default_factory=set)
    versions: dict[str | None, dict[UUID | None, int]] = field(default_factory=dict)
    published_at: dict[UUID | None, datetime] = field(default_factory=dict)
    sources: dict[UUID | None, frozenset[str]] = field(default_factory=dict)
    recalled: list[Mapping[str, Any]] = field(default_factory=list)
    helped: dict[int, dict[str, list[Mapping[str, Any]]]] = field(default_factory=dict)
    analysis: str | None = None
    asked: int = 0


def fold(events: Iterable[Event], carried_seq: int = 0) -> Fold:
    """Fold a run's log, in order, into what its next attempt need not do again.

    Args:
        carried_seq: up to here the log was carried over from the run that this one repeats.
    """
    folded = Fold()
    given: defaultdict[UUID | None, set[str]] = defaultdict(set)
    for event in events:
        data = event.data
        match event.type:
            case EventType.LLM_COMPLETED:
                if event.seq <= carried_seq:
                    folded.carried.add((event.task_id, data["call"]))
                folded.answers[event.task_id, data["call"]] = answer_of(data)
            case EventType.LLM_FAILED if "try" not in data:
                error = data["error"]
                folded.failures[event.task_id, data["call"]] = ModelError(
                    error["message"], code=error["code"]
                )
            case EventType.TOOL_STARTED:
                folded.begun.add((event.task_id, data["call"], data["tool_call_id"]))
            case EventType.TOOL_COMPLETED | EventType.TOOL_FAILED if "answer_seq" not in data:
                folded.results[event.task_id, data["call"], data["tool_call_id"]] = ToolResult(
                    tool_call_id=data["tool_call_id"],
                    tool_name=data["name"],
                    status=data["status"],
                    result=data["result"],
                    error=data["error"],
                )
            case EventType.LLM_STARTED if event.task_id is None:
                folded.asked = max(folded.asked, data["call"])
            case EventType.CONTEXT_RECALLED if event.task_id is None and was_taught(data):
                if "tool_call_id" in data:
                    helped = folded.helped.setdefault(data["call"], {})
                    helped.setdefault(data["tool_call_id"], []).append(data)
                else:
                    folded.recalled.append(data)
            case EventType.CONTEXT_RECALLED if data["source"].startswith(ANALYSIS):
                folded.analysis = data["content"]
        _fold_shared_memory(folded, given, event)
        folded.seen[key_of(event.type, event.task_id, data)] = event.seq
    return folded


def _fold_shared_memory(
    folded: Fold, given: defaultdict[UUID | None, set[str]], event: Event
) -> None:
    """Fold an event about what agents published and were given.

    Args:
        given: sources by task, as far as the log was read.
    """
    match event.type:
        case EventType.MEMORY_PUBLISHED:
            versions = folded.versions.setdefault(event.agent, {})
            versions[event.task_id] = event.data["version"]
            folded.published_at[event.task_id] = event.at
        case EventType.MEMORY_INJECTED | EventType.CONTEXT_RECALLED:
            given[event.task_id].add(event.data["source"])
        case EventType.LLM_STARTED:
            folded.sources.setdefault(event.task_id, frozenset(given[event.task_id]))


def was_taught(recalled: Mapping[str, Any]) -> bool:
    """Whether what was recalled is of earlier runs, and not of another agent of this one."""
    source: str = recalled["source"]
    return source.startswith(TAUGHT)


def answer_of(data: Mapping[str, Any]) -> AssistantMessage:
    """The model's answer that ``llm.completed`` holds."""
    state = {"state": from_json(data[STATE])} if STATE in data else {}
    return AssistantMessage.model_validate({**data["message"], "usage": data["usage"], **state})


def usage_of(message: AssistantMessage) -> AgentUsage:
    """What a model call cost."""
    return AgentUsage.of(message.usage, model_calls=1, tool_calls=len(message.tool_calls))


_ABOUT = ("attempt", "call", "try", "tool_call_id", "source", "version")
_ABOUT_WARNING = ("code", "message")


def key_of(event_type: str, task_id: UUID | None, data: Mapping[str, Any]) -> Key:
    """The key of an event; equal for the same event of another attempt."""
    about = _ABOUT_WARNING if event_type == EventType.WARNING else _ABOUT
    return (event_type, task_id, *(data.get(name) for name in about))
