"""An agent as a tool of another agent."""

import asyncio
import copy
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bottega.agents.messages import AssistantResponse, QueryInput, ToolCall, ToolResult, ToolStatus
from bottega.agents.query import CurrentCall, QueriedAgent, Query, current_call, next_query
from bottega.agents.tools import ToolBase, error_result, raised, refused_arguments

AGENT_FAILED = "agent_failed"
"""Error code of a failed agent whose error has no code."""
MAX_DEPTH = 3
"""Maximum number of levels of sub-agents below the root."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")

    query: str = Field(min_length=1)
    context: str | None = None


def question_of(arguments: Mapping[str, Any]) -> str:
    """Return the text of a sub-agent's query from a call's arguments."""
    text: str = arguments["query"]
    if context := arguments.get("context"):
        text = f"{text}\n\nContext:\n{context}"
    return text


class CallableAgent(QueriedAgent, Protocol):
    """An agent that a tool can query; :class:`BaseAgent` explains the members."""

    def turn(self) -> asyncio.Lock:
        """Return the lock that lets one query run at a time."""

    def copy_for_call(self) -> "CallableAgent":
        """Return a copy with its own history and tools."""

    def fresh_copy(self, made: "FreshCopies") -> "CallableAgent":
        """Return a copy with the history from before the first query."""

    async def execute_query_async(self, query: QueryInput) -> AssistantResponse:
        """Answer a query."""


FreshCopies = dict[CallableAgent, CallableAgent]
"""Fresh copies, by the agent that was copied. An agent with two parents is copied only once."""


class SubAgentWrapper(ToolBase):
    """A tool that queries an agent.

    A stateless tool runs each call on a copy of the agent with a separate history, so calls run
    concurrently. A stateful tool uses the same agent for all calls, one call at a time. A stateful
    agent's history grows with each call, so earlier calls influence later answers.

    Args:
        name: the tool's name for the model.
    """

    timeout_s = None  # only the run's deadline limits a call
    idempotent = True  # a repeated call replays its recorded steps

    def __init__(
        self, agent: CallableAgent, name: str, description: str, stateless: bool = False
    ) -> None:
        self.agent = agent
        self.subagents = (agent,)
        self.name = name
        self.description = description
        self.stateless = stateless

    def fresh_copy(self, made: FreshCopies) -> "SubAgentWrapper":
        """Return a copy of the tool for a fresh copy of its agent."""
        agent = made.get(self.agent)
        tool = copy.copy(self)
        tool.agent = self.agent.fresh_copy(made) if agent is None else agent
        tool.subagents = (tool.agent,)
        return tool

    def create_schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What you want this agent to do."},
                "context": {
                    "type": "string",
                    "description": "What it must know for that and cannot know by itself.",
                },
            },
            "required": ["query"],
            "additionalProperties": False,
        }

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Query the agent; if the agent fails, return an ERROR result for the model.

        Raises:
            Exception: an error that ended the query without a response and that the model must not
                see, such as a bug in a hook or an error of the recorder.
        """
        try:
            _Arguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return refused_arguments(tool_call, error)
        call = current_call.get()
        if call is not None and call.query.depth >= MAX_DEPTH:
            return error_result(
                tool_call, f"sub-agents may be nested at most {MAX_DEPTH} deep; this call is deeper"
            )
        text = question_of(tool_call.arguments)
        if call is not None and (screen := call.query.recorder.screen) is not None:
            screened = await screen(call, tool_call, text)
            if isinstance(screened, ToolResult):
                return screened
            text = screened
        async with self._turn():
            agent = self.agent.copy_for_call() if self.stateless else self.agent
            if call is None:
                return _result(tool_call, await agent.execute_query_async(text))
            return await _query_agent(agent, text, call, tool_call)

    def _turn(self) -> AbstractAsyncContextManager[object]:
        return nullcontext() if self.stateless else self.agent.turn()


async def _query_agent(
    agent: CallableAgent, text: str, call: CurrentCall, tool_call: ToolCall
) -> ToolResult:
    """Query ``agent`` as part of the calling query; add its usage to the calling query."""
    parent = call.query
    query = Query(
        agent=agent,
        messages=(),
        recorder=parent.recorder,
        parent=parent,
        path=(*parent.path, (parent.model_calls, call.index)),
        tool_call=tool_call,
        task=parent.task,
    )
    token = next_query.set(query)
    try:
        return _result(tool_call, await agent.execute_query_async(text))
    except Exception as error:
        if error is query.escaped:
            raise
        return raised(tool_call, error)
    finally:
        next_query.reset(token)
        parent.usage += query.usage


def _result(tool_call: ToolCall, response: AssistantResponse) -> ToolResult:
    failed = response.error is not None
    return ToolResult(
        tool_call_id=tool_call.id,
        tool_name=tool_call.name,
        status=ToolStatus.ERROR if failed else ToolStatus.SUCCESS,
        result=None if failed and not response.content else response.content,
        error=response.error,
        error_type=(response.error_code or AGENT_FAILED) if failed else None,
    )
