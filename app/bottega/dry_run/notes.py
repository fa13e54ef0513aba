"""Notes of a dry run: what each task was asked, received, sent to the model and answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bottega.agents.messages import AssistantMessage, AssistantResponse
from bottega.agents.query import Invoke, Query, Recorder
from bottega.dry_run.model import PROMPT
from bottega.graph.shared_memory import MemoryItem
from bottega.llm.demo_model.conversation import json_object, text_of

LONGEST_TEXT = 20_000
"""Characters after which texts are cut at once, so that they need no memory."""
MOST_TASKS = 1_000
MOST_CALLS = 5_000
"""Limit of the model calls of all tasks."""


class TooMuchError(Exception):
    """A dry run reached a limit; its message says which."""


@dataclass(slots=True)
class Note:
    """One task, in the order of the tasks' starts.

    Attributes:
        number: 1-based.
        parent: number of the task whose agent asked for it; ``None``: nobody did.
        received: answers of others, in the order in which they are in the prompt.
        messages: the prompt of the last model call, and its answer.
    """

    number: int
    agent: str
    parent: int | None
    question: str
    received: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    model_calls: int = 0
    output: str = ""
    error: str | None = None


class Notes(Recorder):
    """A recorder that keeps everything in memory, within limits."""

    def __init__(self) -> None:
        self.tasks: list[Note] = []
        self.warnings: list[tuple[str, str]] = []
        self._of: dict[Query, Note] = {}
        self._calls = 0

    def query_started(self, query: Query) -> None:
        if len(self.tasks) >= MOST_TASKS:
            raise TooMuchError(f"the dry run ends here, after {MOST_TASKS} tasks")
        parent = None if query.parent is None else self._of[query.parent].number
        question = "\n".join(message.content for message in query.messages)
        name = query.agent.agent_id or query.agent.agent_name
        self._of[query] = self.add(name, question, parent)

    def add(self, agent: str, question: str, parent: int | None = None) -> Note:
        """Note that a task begins."""
        note = Note(len(self.tasks) + 1, agent, parent, shortened(question))
        self.tasks.append(note)
        return note

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        note = self._of[query]
        note.output, note.error = shortened(response.content), response.error

    async def model_call(self, query: Query, invoke: Invoke) -> AssistantMessage:
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise TooMuchError(f"the dry run ends here, after {MOST_CALLS} model calls")
        answer = await super().model_call(query, invoke)
        note = self._of[query]
        note.model_calls += 1
        note.messages = [_shown(message) for message in answer.metadata.pop(PROMPT)]
        calls = [_call(each.id, each.name, each.arguments) for each in answer.tool_calls]
        note.messages.append(_message("assistant", answer.content, calls))
        return answer

    def injected(self, query: Query, items: Sequence[MemoryItem]) -> None:
        self._receive(query, items, direct=True)

    def recalled(self, query: Query, items: Sequence[tuple[MemoryItem, float | None]]) -> None:
        self._receive(query, [item for item, _ in items], direct=False)

    def warning(self, query: Query, code: str, message: str) -> None:
        self.warnings.append((code, message))

    def _receive(self, query: Query, items: Sequence[MemoryItem], *, direct: bool) -> None:
        self._of[query].received += [
            {
                "source": item.source_id,
                "version": item.version,
                "policy": str(item.policy) if direct else None,
                "content": shortened(item.content),
            }
            for item in items
        ]


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of Chat Completions as the API shows it."""
    calls = [
        _call(each["id"], each["function"]["name"], json_object(each["function"]["arguments"]))
        for each in message.get("tool_calls") or ()
    ]
    said = text_of(dict(message))
    return _message(message["role"], said, calls, message.get("tool_call_id"))


def _call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "name": name, "arguments": dict(arguments)}


def _message(
    role: str, content: str, calls: Sequence[dict[str, Any]], answers: str | None = None
) -> dict[str, Any]:
    said = shortened(content)
    return {"role": role, "content": said, "tool_calls": calls, "tool_call_id": answers}


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text without what is too long."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
