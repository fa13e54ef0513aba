"""What a running query tells, and asks of, whoever keeps a record of it.

The library keeps none: :class:`Recorder` lets everything through. The service's journal
(``bottega.runs.journal``) overrides it to write events, and to answer a model or tool call from the
journal when the run is resumed after a crash.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol
from uuid import UUID, uuid5

from bottega.agents.messages import (
    AgentUsage,
    AssistantMessage,
    AssistantResponse,
    StandardMessage,
    ToolCall,
    ToolResult,
    Usage,
)
from bottega.agents.provider import FailedTry, OnDelta
from bottega.graph.shared_memory import MemoryItem, Publication

if TYPE_CHECKING:
    from bottega.agents.base import BaseAgent
    from bottega.agents.tools import ToolBase


Path = tuple[tuple[int, int], ...]
"""The way from one query down to another: per step (model call, index of the tool call)."""


def task_id_at(root: UUID, path: Path) -> UUID:
    """The id of the query at the end of a path that begins at ``root``: a UUIDv5 of (parent, model
    call, index) for each step, and so the same whenever it is come to again."""
    for call, index in path:
        root = uuid5(root, f"{call}:{index}")
    return root


class BackgroundTask(Protocol):
    """The asynchronous task that a query is the work of (spec page 3)."""

    def model_call(self, query: "Query") -> AbstractAsyncContextManager[int | None]:
        """Held during each model call that is really made: waits for the task's slot, and
        reserves tokens. Answers how many the model may produce; ``None``: as it likes.

        Raises:
            BudgetExhaustedError: there are none left.
        """

    def spent(self, usage: Usage) -> None:
        """A model call was answered, be it from a record."""

    def heard(self, query: "Query", text: str) -> None:
        """A piece of text of a query came in."""


class Scope(Protocol):
    """What was started beside a query and must not outlive it."""

    async def close(self, error: BaseException | None = None) -> None:
        """The query is over, or given up by ``error``; return when nothing of it runs any more."""


@dataclass(slots=True, eq=False)
class Query:
    """The state of one query of one agent; a sub-agent's query points at its parent's.

    Attributes:
        agent: the agent that runs it (for a stateless sub-agent, the copy).
        messages: the query's own messages, as they were put into the history.
        parent: the query whose tool call made this one; ``None`` for the root.
        path: where it stands in the tree: per level (model call that asked, index of the tool
            call in that message). The root's is empty. Equal on every replay.
        iteration: 1-based, 0 before the first.
        model_calls: how many model calls were begun; numbers them from 1.
        usage: spent so far, sub-agents included.
        tool_call: the parent's tool call that this query answers; ``None`` for the root.
        memory_pulled: whether shared memory was pulled for this query already.
        escaped: the exception that ended the query instead of a response, if one did.
        task: that it is the work of, or its parent is; ``None``: it is waited for as it runs.
        scope: set by tools that start something beside the query.
        composed: what the next model call is given in place of the whole history, if it is not:
            ``tokens`` in all, tool answers ``shrunk`` to a summary, messages ``left`` out.
    """

    agent: "BaseAgent"
    messages: tuple[StandardMessage, ...]
    recorder: "Recorder"
    parent: "Query | None" = None
    path: Path = ()
    tool_call: ToolCall | None = None
    iteration: int = 0
    model_calls: int = 0
    usage: AgentUsage = AgentUsage()
    tool_results: tuple[ToolResult, ...] = ()
    memory_pulled: bool = False
    escaped: BaseException | None = None
    task: BackgroundTask | None = None
    scope: Scope | None = None
    composed: Mapping[str, int] | None = None

    @property
    def depth(self) -> int:
        """0 for the root, 1 for its sub-agents, and so on."""
        return len(self.path)

    def admission(self) -> AbstractAsyncContextManager[int | None]:
        """Held by recorders while they really make a model call."""
        return nullcontext() if self.task is None else self.task.model_call(self)


Invoke = Callable[[int | None], Awaitable[AssistantMessage]]
"""Makes a model call, given the most tokens that it may produce (``None``: no bound)."""


class Recorder:
    """Keeps no record. Methods that are not ``async`` must not block.

    Attributes:
        swarm: what runs beside the queries, if it was made beforehand.
    """

    swarm: object = None

    def query_started(self, query: Query) -> None:
        """The query's messages are in the history; nothing was asked yet."""

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        """The query is over, well or not. Not called when it was cancelled."""

    async def model_call(self, query: Query, invoke: Invoke) -> AssistantMessage:
        """Make model call number ``query.model_calls`` by ``await invoke(most)`` within
        ``query.admission()``, which says how many tokens it may produce at most, or answer for it.
        """
        async with query.admission() as most:
            return await invoke(most)

    def delta_listener(self, query: Query) -> OnDelta | None:
        """Who is told the text of the model call about to be made, as it comes in."""
        return None

    def model_try_failed(self, query: Query, failed: FailedTry) -> None:
        """A try of the current model call failed and is about to be repeated."""

    async def tool_call(
        self,
        query: Query,
        tool_call: ToolCall,
        tool: "ToolBase | None",
        execute: Callable[[], Awaitable[ToolResult]],
    ) -> ToolResult:
        """Execute a tool call by ``await execute()``, or answer for it.

        ``tool`` is ``None`` for a name the model invented.
        """
        return await execute()

    def injected(self, query: Query, items: Sequence[MemoryItem]) -> None:
        """Shared memory was put into the query's history, in this order."""

    def recalled(self, query: Query, items: Sequence[tuple[MemoryItem, float]]) -> None:
        """What other ancestors published was too: each with its nearness to the query, -1 to 1."""

    def sources_of(self, query: Query) -> Collection[str] | None:
        """The agents whose answers an earlier attempt of the query was given; ``None``: no attempt.

        They are given again, also if they have expired since.
        """
        return None

    def version_of(self, query: Query) -> int | None:
        """The version of what the query is about to publish; ``None`` for simply the next."""
        return None

    def published_at(self, query: Query) -> datetime | None:
        """The time at which an earlier attempt published the query's answer; ``None``: not yet."""
        return None

    def published(self, query: Query, publication: Publication) -> None:
        """The query's accepted answer was published to the graph."""

    def warning(self, query: Query, code: str, message: str) -> None:
        """Something a person should know, that fails nothing."""
