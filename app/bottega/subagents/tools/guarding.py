"""Plugins about what reaches an agent beside a dispatch: messages, and synchronous calls."""

from collections.abc import Awaitable, Callable, Sequence

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.query import CurrentCall, Query, Screen
from bottega.agents.tools import error_result, success_result
from bottega.subagents.plugins import (
    DispatchRequest,
    PluginContext,
    Refused,
    Skip,
    before_dispatch,
    guarded,
)
from bottega.subagents.swarm import Swarm

Ask = Callable[
    [Sequence[object], PluginContext, DispatchRequest],
    Awaitable[DispatchRequest | Skip | Refused],
]
"""Asks all plugins, or the guards alone."""


async def checked_message(
    swarm: Swarm, query: Query, agent: str, text: str
) -> str | Skip | Refused:
    """Return a message to a task as the guards want it, or their decision."""
    return await _checked(guarded, swarm, query, agent, text)


async def _checked(
    ask: Ask, swarm: Swarm, query: Query, agent: str, text: str
) -> str | Skip | Refused:
    asker = query.agent
    context = PluginContext(
        run_id=swarm.run_id,
        tenant_id=swarm.options.tenant_id,
        parent_id=swarm.id_at(query.path),
        depth=query.depth,
        agent=asker.agent_id or asker.agent_name,
    )
    request = DispatchRequest(text, None, agent, 5, {})
    said = await ask(swarm.options.plugins, context, request)
    return said.prompt if isinstance(said, DispatchRequest) else said


def screening(swarm: Swarm) -> Screen:
    """Return the function that asks the plugins about calls of sub-agents in mode ``sync``."""

    async def screen(call: CurrentCall, tool_call: ToolCall, question: str) -> str | ToolResult:
        said = await _checked(before_dispatch, swarm, call.query, tool_call.name, question)
        if isinstance(said, Refused):
            return error_result(tool_call, said.detail)
        return success_result(tool_call, said.result) if isinstance(said, Skip) else said

    return screen
