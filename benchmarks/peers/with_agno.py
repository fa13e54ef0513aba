"""Agno: sub-agents are tools. With a database a run is stored after each turn of the model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from agno.agent import Agent
from agno.db.postgres import AsyncPostgresDb
from agno.models.openai import OpenAILike
from agno.tools.function import Function

from benchmarks.peers.work import (
    ASSISTANT,
    BUILD,
    COORDINATOR,
    FAN_OUT,
    FIND_OUT,
    GO,
    HELPER,
    LOOP,
    MODEL,
    SPECIALISTS,
    TEAM,
    Run,
    calculate,
    check,
    described,
    prompt_of,
)

PACKAGES = ("agno",)


@asynccontextmanager
async def works(base_url: str, database_url: str | None = None) -> AsyncIterator[dict[str, Run]]:
    model = OpenAILike(id=MODEL, base_url=base_url, api_key="none", max_retries=0)
    kept: dict[str, Any] = {"telemetry": False}

    def as_tool(name: str, prompt: str) -> Function:
        agent = Agent(model=model, system_message=prompt, **kept)

        async def ask(query: str) -> str:
            return str((await agent.arun(query, session_id=str(uuid4()))).content)

        return Function(
            name=name,
            description=described(name),
            entrypoint=ask,
            parameters={
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        )

    stored = dict(kept)
    if database_url is not None:
        url = database_url.replace("postgresql://", "postgresql+asyncpg://")
        stored |= {"db": AsyncPostgresDb(db_url=url), "checkpoint": "tool-batch"}

    def lead(prompt: str, *tools: Any) -> Agent:
        return Agent(model=model, system_message=prompt, tools=list(tools), **stored)

    calculator = Function.from_callable(calculate, name="calculator")
    assistant = lead(ASSISTANT, calculator)
    coordinator = lead(COORDINATOR, *(as_tool(name, prompt_of(name)) for name in SPECIALISTS))
    leader = lead(COORDINATOR, as_tool("helper", HELPER))

    async def ask(agent: Agent, query: str) -> None:
        check((await agent.arun(query, session_id=str(uuid4()))).content)

    yield {
        LOOP: lambda: ask(assistant, FIND_OUT),
        TEAM: lambda: ask(coordinator, BUILD),
        FAN_OUT: lambda: ask(leader, GO),
    }
