"""Parser of a Chat Completions request: the query, context, tools and their results."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from bottega.llm.dialects.wire import GO_ON

_POLICY = re.compile(r"call the tool '([^']+)'")
_PART = " (your part: "
_FOLDER = re.compile(r"\n\nYour own folder is (/subagent/[\w-]+)[^\n]*(?:\n|\Z)")
_COORDINATES = re.compile(r"\n\n(?=You are coordinating sub-agents with dependencies\.\n)")
_CONTEXT = re.compile(
    r"(?:Shared context from (?P<source>[^\n]+):|Working memory: [^\n]+)\n"
    r"<(?P<mark>(?:shared-context|working-memory)-[^>\s]+)>"
    r"(?P<content>.*?)</(?P=mark)>(?:\n\n|\Z)",
    re.DOTALL,
)

SWARM_TOOLS = frozenset(("dispatch_subagent", "poll_subagent", "await_subagent"))
"""Tools of an asynchronous coordinator."""

STEERING_TOOLS = frozenset(("dispatch_subagents", "send_to_subagent", "cancel_subagent"))
"""Its further tools."""


@dataclass(frozen=True, slots=True)
class DemoCall:
    """A tool call of the model. ``arguments`` are the decoded JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str = ""
    calls: tuple[DemoCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]

    @property
    def is_agent(self) -> bool:
        """True for the signature of a sub-agent: a ``query``, and at most a ``context``."""
        return "query" in self.properties and not self.properties.keys() - {"query", "context"}

    @property
    def properties(self) -> dict[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The result of a tool call, as the model reads it, and the call's ``arguments``."""

    name: str
    text: str
    arguments: dict[str, Any]

    @property
    def failed(self) -> bool:
        return self.text.startswith("Error:")


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A parsed request.

    Attributes:
        own: the model's own system message, without the text about its sub-agents.
        system: all system messages, including ``own``.
        context: the pieces of context before the query.
        asked: the user's current query, without the hint at this agent's part.
        part: that hint, or empty.
        folder: the folder of this asynchronous task; else empty.
        notes: messages that the task got since.
        demanded: tools to call, from a message that returned an answer.
        outcomes: results of tool calls since the query, oldest first.
        tools: those that ``tool_choice`` allows.
        must_call: ``tool_choice`` demands a call.
    """

    own: str
    system: tuple[str, ...]
    context: tuple[re.Match[str], ...]
    asked: str
    part: str
    folder: str
    notes: tuple[str, ...]
    demanded: tuple[str, ...]
    outcomes: tuple[DemoOutcome, ...]
    tools: tuple[Tool, ...]
    must_call: bool

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(
            Source(piece["source"], piece["content"].strip("\n"))
            for piece in self.context
            if piece["source"]
        )


def read(request: dict[str, Any]) -> Conversation:
    """Parse a request without :func:`problem <bottega.llm.demo_model.checks.problem>`."""
    messages: list[dict[str, Any]] = request["messages"]
    system = tuple(text_of(m) for m in messages if m["role"] in ("system", "developer"))
    start, asked, demanded, notes = _current(messages)
    asked, context = _without_context(asked)
    asked, folder, note = _without_folder(asked)
    asked, part = _without_part(asked)
    choice = request.get("tool_choice") or "auto"
    tools = tuple(map(_tool, request.get("tools") or ()))
    return Conversation(
        own=_COORDINATES.split(system[0])[0] if system else "",
        system=system,
        context=context,
        asked=asked,
        part=part,
        folder=folder,
        notes=(note, *notes) if note else notes,
        demanded=demanded,
        outcomes=_outcomes(messages[start:]),
        tools=_allowed(tools, choice),
        must_call=choice not in ("auto", "none"),
    )


def _allowed(tools: tuple[Tool, ...], choice: Any) -> tuple[Tool, ...]:
    if isinstance(choice, dict):
        return tuple(tool for tool in tools if tool.name == choice["function"]["name"])
    return () if choice == "none" else tools


def _without_context(asked: str) -> tuple[str, tuple[re.Match[str], ...]]:
    found: list[re.Match[str]] = []
    end = 0
    while piece := _CONTEXT.match(asked, end):
        found.append(piece)
        end = piece.end()
    return asked[end:], tuple(found)


def with_part(asked: str, name: str) -> str:
    return f"{asked}{_PART}{name})"


def _without_part(asked: str) -> tuple[str, str]:
    text, hint, part = asked.rpartition(_PART)
    return (text, part[:-1]) if hint and part.endswith(")") else (asked, "")


def _without_folder(asked: str) -> tuple[str, str, str]:
    """Return the text before the line about the folder, the folder, and the note behind it."""
    found = _FOLDER.search(asked)
    if found is None:
        return asked, "", ""
    return asked[: found.start()], found[1], asked[found.end() :].strip()


def text_of(message: dict[str, Any]) -> str:
    """Return a message's text; of several parts, their texts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def _current(
    messages: Sequence[dict[str, Any]],
) -> tuple[int, str, tuple[str, ...], tuple[str, ...]]:
    """Return the current query's index and text, and the tools demanded and notes after it.

    What a user says after the query of an asynchronous task is a note to that task.
    """
    demanded: list[str] = []
    notes: list[str] = []
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    for index in reversed(users):
        text = text_of(messages[index])
        if text == GO_ON and index:
            continue
        if (names := _POLICY.findall(text)) and index:
            demanded += names
        elif any(_FOLDER.search(text_of(messages[other])) for other in users if other < index):
            notes.insert(0, text)
        else:
            return index, text, tuple(demanded), tuple(notes)
    return 0, "", tuple(demanded), tuple(notes)


def _outcomes(messages: Sequence[dict[str, Any]]) -> tuple[DemoOutcome, ...]:
    calls: dict[str, DemoCall] = {}
    outcomes = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            calls[call["id"]] = DemoCall(function["name"], json_object(function["arguments"]))
        if message["role"] == "tool":
            call = calls.get(message["tool_call_id"], DemoCall("tool", {}))
            outcomes.append(DemoOutcome(call.name, text_of(message), call.arguments))
    return tuple(outcomes)


def json_object(text: str) -> dict[str, Any]:
    try:
        found = from_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _tool(item: dict[str, Any]) -> Tool:
    function = item["function"]
    parameters = function.get("parameters")
    return Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters=parameters if isinstance(parameters, dict) else {},
    )
