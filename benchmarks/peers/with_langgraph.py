"""LangGraph's prebuilt agent. With a database each step of a run is a checkpoint in PostgreSQL.

Sub-agents are tools that invoke a graph of their own, without checkpoints: after a crash a
sub-agent, which is one model call, begins anew.
"""

import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import uuid4

from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.prebuilt import create_react_agent
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

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
    STEPS,
    TEAM,
    Run,
    calculate,
    check,
    described,
    prompt_of,
)

PACKAGES = ("langgraph", "langgraph-checkpoint-postgres")
_MOST = 3 * STEPS
"""Steps of a graph in a run."""


async def _ask(graph: Any, query: str) -> str:
    """Run a graph in a thread of its own; return the last message's text."""
    config = {"recursion_limit": _MOST, "configurable": {"thread_id": str(uuid4())}}
    state = await graph.ainvoke({"messages": [("user", query)]}, config)
    text: str = state["messages"][-1].content
    return text


@asynccontextmanager
async def _checkpoints(url: str) -> AsyncIterator[AsyncPostgresSaver]:
    kept = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with AsyncConnectionPool(url, min_size=1, max_size=20, kwargs=kept) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        yield saver


@asynccontextmanager
async def works(base_url: str, database_url: str | None = None) -> AsyncIterator[dict[str, Run]]:
    warnings.simplefilter("ignore")  # it has moved to another package
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key="none", max_retries=0)

    def as_tool(name: str, prompt: str) -> StructuredTool:
        graph = create_react_agent(model, [], prompt=prompt)

        async def ask(query: str) -> str:
            return await _ask(graph, query)

        return StructuredTool.from_function(coroutine=ask, name=name, description=described(name))

    calculator = StructuredTool.from_function(coroutine=calculate, name="calculator")
    async with AsyncExitStack() as stack:
        saver = database_url and await stack.enter_async_context(_checkpoints(database_url))

        def lead(prompt: str, tools: Sequence[StructuredTool]) -> Any:
            return create_react_agent(model, tools, prompt=prompt, checkpointer=saver or None)

        assistant = lead(ASSISTANT, [calculator])
        coordinator = lead(COORDINATOR, [as_tool(name, prompt_of(name)) for name in SPECIALISTS])
        leader = lead(COORDINATOR, [as_tool("helper", HELPER)])

        async def loop() -> None:
            check(await _ask(assistant, FIND_OUT))

        async def team() -> None:
            check(await _ask(coordinator, BUILD))

        async def fan_out() -> None:
            check(await _ask(leader, GO))

        yield {LOOP: loop, TEAM: team, FAN_OUT: fan_out}
