"""Routes of agents."""

from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from app.api.definitions import definition_router
from app.api.schemas.agents import Agent, AgentContent, NewAgent
from app.definitions.agents import refuse_circle
from app.definitions.store import AGENTS


async def _prepare(
    tx: AsyncConnection, tenant: UUID, name: str, body: AgentContent
) -> dict[str, Any]:
    children = [] if body.subagents is None else body.subagents.names
    await refuse_circle(tx, tenant, name, children)
    return body.model_dump(exclude={"name"})


router = definition_router(
    AGENTS, new=NewAgent, content=AgentContent, shown=Agent, prepare=_prepare
)
