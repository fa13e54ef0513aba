"""Agno: sub-agents are tools. With a database a run is stored after each turn of the model."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from agno.agent import Agent
from agno.db.postgres import AsyncPostgresDb
from agno.models.openai import OpenAILike
from agno.tools.function import Function

from benchmarks.peers.work import MODEL, Ask, calculate, described

PACKAGES = ("agno",)


@dataclass(frozen=True, slots=True)
class _Maker:
    model: OpenAILike
    stored: Mapping[str, Any]

    def calculator(self) -> Function:
        return Function.from_callable(calculate, name="calculator")

    def subagent(self, name: str, prompt: str) -> Function:
        answer = _Maker(self.model, {}).agent(prompt, [])

        async def ask(query: str) -> str:
            return str(await answer(query))

        properties = {"query": {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": ["query"]}
        text = described(name)
        return Function(name=name, description=text, entrypoint=ask, parameters=parameters)

    def agent(self, prompt: str, tools: Sequence[Function]) -> Ask:
        own = {"telemetry": False, **self.stored}
        agent = Agent(model=self.model, system_message=prompt, tools=list(tools), **own)

        async def ask(query: str) -> object:
            return (await agent.arun(query, session_id=str(uuid4()))).content

        return ask


@asynccontextmanager
async def maker(base_url: str, database_url: str | None) -> AsyncIterator[_Maker]:
    model = OpenAILike(id=MODEL, base_url=base_url, api_key="none", max_retries=0)
    stored: dict[str, Any] = {}
    if database_url is not None:
        url = database_url.replace("postgresql://", "postgresql+asyncpg://")
        stored = {"db": AsyncPostgresDb(db_url=url), "checkpoint": "tool-batch"}
    yield _Maker(model, stored)
