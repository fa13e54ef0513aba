"""LangGraph's prebuilt agent. With a database each step of a run is a checkpoint in PostgreSQL.

Sub-agents are tools that invoke a graph of their own, without checkpoints: after a crash a
sub-agent, which is one model call, begins again.
"""

import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.prebuilt import create_react_agent
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from benchmarks.peers.work import MODEL, STEPS, Ask, calculate, described

PACKAGES = ("langgraph", "langgraph-checkpoint-postgres")
_MOST = 3 * STEPS
"""Steps of a graph in a run."""


@dataclass(frozen=True, slots=True)
class _Maker:
    model: ChatOpenAI
    saver: AsyncPostgresSaver | None = None

    def calculator(self) -> StructuredTool:
        return StructuredTool.from_function(coroutine=calculate, name="calculator")

    def subagent(self, name: str, prompt: str) -> StructuredTool:
        answer = _Maker(self.model).agent(prompt, [])

        async def ask(query: str) -> object:
            return await answer(query)

        return StructuredTool.from_function(coroutine=ask, name=name, description=described(name))

    def agent(self, prompt: str, tools: Sequence[StructuredTool]) -> Ask:
        graph = create_react_agent(self.model, tools, prompt=prompt, checkpointer=self.saver)

        async def ask(query: str) -> object:
            config = {"recursion_limit": _MOST, "configurable": {"thread_id": str(uuid4())}}
            state = await graph.ainvoke({"messages": [("user", query)]}, config)
            return state["messages"][-1].content

        return ask


@asynccontextmanager
async def maker(base_url: str, database_url: str | None) -> AsyncIterator[_Maker]:
    warnings.simplefilter("ignore")  # the agent has moved to another package
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key="none", max_retries=0)
    if database_url is None:
        yield _Maker(model)
        return
    kept = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with AsyncConnectionPool(database_url, min_size=1, max_size=20, kwargs=kept) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        yield _Maker(model, saver)
