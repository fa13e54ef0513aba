"""Routes of agents."""

import asyncio
from typing import Any

from bottega.api.schemas.agents import Agent, AgentContent, AgentSummary, NewAgent
from bottega.api.shared.definitions import Caller, definition_router
from bottega.definitions.agents import refuse_circle
from bottega.definitions.store import AGENTS
from bottega.json_schema.patterns import check_patterns
from bottega.tools.http import HttpToolDefinition


async def _prepare(caller: Caller, name: str, body: AgentContent) -> dict[str, Any]:
    patterns = {
        f"/tools/{index}": {f"/tools/{index}{at}": text for at, text in tool.patterns.items()}
        for index, tool in enumerate(body.tools)
        if isinstance(tool, HttpToolDefinition)
    }
    if any(patterns.values()):
        await asyncio.to_thread(check_patterns, patterns)
    children = [] if body.subagents is None else body.subagents.names
    await refuse_circle(caller.tx, caller.tenant, name, children)
    return body.model_dump(exclude={"name"})


router = definition_router(
    AGENTS, new=NewAgent, content=AgentContent, output=Agent, summary=AgentSummary, prepare=_prepare
)
