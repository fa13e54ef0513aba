"""Routes of agents."""

from typing import Any

from bottega.api.schemas.agents import Agent, AgentContent, AgentSummary, NewAgent
from bottega.api.shared.definitions import Caller, definition_router
from bottega.api.shared.schemas import check_all, patterns_of
from bottega.definitions.agents import refuse_circle
from bottega.definitions.store import AGENTS
from bottega.runs.parameters import dialect_of, refuse_unsupported
from bottega.tools.http import HttpToolDefinition


async def _prepare(caller: Caller, name: str, body: AgentContent) -> dict[str, Any]:
    patterns = {
        f"/tools/{index}": {f"/tools/{index}{at}": text for at, text in tool.patterns.items()}
        for index, tool in enumerate(body.tools)
        if isinstance(tool, HttpToolDefinition)
    }
    await check_all(patterns | patterns_of(body.output_schema, "/output_schema"))
    if body.params is not None:
        params, dialects = body.params.model_dump(), dialect_of(body.provider)
        refuse_unsupported(params, dialects, "/params", whose=name)
    children = [] if body.subagents is None else body.subagents.names
    await refuse_circle(caller.tx, caller.tenant, name, children)
    return body.model_dump(exclude={"name"})


router = definition_router(
    AGENTS, new=NewAgent, content=AgentContent, output=Agent, summary=AgentSummary, prepare=_prepare
)
