"""Queries as streams of events; a query waits for a slow reader.

The events support ``match``: ``case TextDelta(text): …``.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from bottega.agents.messages import AssistantMessage, AssistantResponse, ToolCall, ToolResult
from bottega.agents.provider import FailedTry, OnDelta
from bottega.agents.query import Invoke, Path, Query, Recorder
from bottega.agents.tools import ToolBase


@dataclass(frozen=True, slots=True)
class QueryEvent:
    """An event of a query or a sub-agent of the query; base class of all events.

    Attributes:
        agent: name of the agent.
        path: position of the agent's query: ``()`` for the streamed query; otherwise one pair
            (number of the model call, index of the tool call) per level of sub-agents.
    """

    agent: str = field(kw_only=True)
    path: Path = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class TextDelta(QueryEvent):
    """A piece of a model's text; the pieces of one model call form the call's message.

    The message may be a rejected answer, or a text before tool calls. The accepted answer is in
    :class:`QueryAnswered`.

    Attributes:
        model_call: number of the model call within the query, from 1.
    """

    text: str
    model_call: int


@dataclass(frozen=True, slots=True)
class TextRestarted(QueryEvent):
    """A model call sent text, failed and is retried: the reader must discard the call's text."""

    model_call: int


@dataclass(frozen=True, slots=True)
class ToolCalled(QueryEvent):
    """A tool call, or a call of a sub-agent, begins."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolAnswered(QueryEvent):
    """A tool call has ended, with success or an error; hooks may still change the result."""

    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class SubAgentStarted(QueryEvent):
    """A sub-agent begins to work on ``query``."""

    query: str


@dataclass(frozen=True, slots=True)
class SubAgentEnded(QueryEvent):
    """A sub-agent has answered or failed. A cancelled sub-agent has no such event."""

    response: AssistantResponse


@dataclass(frozen=True, slots=True)
class QueryAnswered(QueryEvent):
    """The last event: the query's response. The response's ``error`` is set if the query failed."""

    response: AssistantResponse


async def events_of(
    name: str, start: Callable[[Recorder], Coroutine[Any, Any, AssistantResponse]], most: int
) -> AsyncGenerator[QueryEvent, None]:
    """Run a query and yield its events; cancel the query when the generator is closed.

    Args:
        name: name of the queried agent.
        start: function that starts the query with a recorder.
        most: number of unread events at which the query pauses.

    Raises:
        Exception: any error that ends the query without a response.
    """
    events = _Events(most)
    query = asyncio.create_task(start(_EventRecorder(events)))
    query.add_done_callback(events.close)
    try:
        while (event := await events.take()) is not None:
            yield event
        yield QueryAnswered(await query, agent=name, path=())
    finally:
        if not query.done():
            query.cancel()
            await asyncio.wait([query])
        if not query.cancelled():
            query.exception()  # retrieve the error, so that asyncio does not log the error


class _Events:
    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[QueryEvent] = deque()
        self._is_over = False
        self._any = asyncio.Event()
        self._room = asyncio.Event()

    def add(self, event: QueryEvent) -> None:
        """Add an event, even if the number of unread events exceeds the limit."""
        self._waiting.append(event)
        self._any.set()

    async def room(self) -> None:
        """Wait until the number of unread events is below the limit."""
        while len(self._waiting) >= self._most:
            self._room.clear()
            await self._room.wait()

    def close(self, _: object = None) -> None:
        self._is_over = True
        self._any.set()

    async def take(self) -> QueryEvent | None:
        """Return the next event, or ``None`` after the last event."""
        while not self._waiting:
            if self._is_over:
                return None
            self._any.clear()
            await self._any.wait()
        event = self._waiting.popleft()
        self._room.set()
        return event


class _EventRecorder(Recorder):
    """Recorder that converts its observations to events.

    The recorder waits for room in the queue before each model call, tool call and piece of text.
    The recorder adds the starts and ends of sub-agents, and failed tries, without waiting, because
    each call has few of these events.
    """

    def __init__(self, events: _Events) -> None:
        self._events = events
        self._spoken: set[Query] = set()  # queries whose current model call has sent text

    def query_started(self, query: Query) -> None:
        if query.path:
            text = "\n".join(message.content for message in query.messages)
            self._events.add(SubAgentStarted(text, **_place(query)))

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        if query.path:
            self._events.add(SubAgentEnded(response, **_place(query)))

    async def model_call(self, query: Query, invoke: Invoke) -> AssistantMessage:
        self._spoken.discard(query)
        try:
            await self._events.room()
            message = await super().model_call(query, invoke)
            if message.content and query not in self._spoken:  # the provider does not stream
                await self._say(query, message.content)
            return message
        finally:
            self._spoken.discard(query)

    def delta_listener(self, query: Query) -> OnDelta:
        return lambda text: self._say(query, text)

    async def _say(self, query: Query, text: str) -> None:
        await self._events.room()
        self._spoken.add(query)
        self._events.add(TextDelta(text, query.model_calls, **_place(query)))

    def model_try_failed(self, query: Query, failed: FailedTry) -> None:
        if query in self._spoken:
            self._spoken.discard(query)
            self._events.add(TextRestarted(query.model_calls, **_place(query)))

    async def tool_call(
        self,
        query: Query,
        tool_call: ToolCall,
        tool: ToolBase | None,
        execute: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        await self._events.room()
        self._events.add(ToolCalled(tool_call, **_place(query)))
        result = await execute()
        await self._events.room()
        self._events.add(ToolAnswered(tool_call, result, **_place(query)))
        return result


def _place(query: Query) -> "dict[str, Any]":
    path: Path = query.path
    return {"agent": query.agent.agent_id or query.agent.agent_name, "path": path}
