"""Bottega's agents as a library."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

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
from bottega.agents import BaseAgent, tool
from bottega.llm.vendors import OpenAIProvider

PACKAGES = ("bottega",)


@asynccontextmanager
async def works(base_url: str) -> AsyncIterator[dict[str, Run]]:
    provider = OpenAIProvider(MODEL, base_url=base_url)
    calculator = tool(name="calculator", description="Evaluates an expression.")(calculate)
    specialists = {
        name: BaseAgent(prompt_of(name), provider=provider, agent_name=name) for name in SPECIALISTS
    }
    helper = BaseAgent(HELPER, provider=provider, agent_name="helper")

    def coordinator(agents: dict[str, BaseAgent]) -> BaseAgent:
        made = BaseAgent(COORDINATOR, provider=provider)
        for name, agent in agents.items():
            made.register_agent(agent, name=name, description=described(name), stateless=True)
        return made

    async def loop() -> None:
        agent = BaseAgent(
            ASSISTANT, provider=provider, tools=[calculator], max_iterations=STEPS + 1
        )
        check((await agent.execute_query_async(FIND_OUT)).content)

    async def team() -> None:
        check((await coordinator(specialists).execute_query_async(BUILD)).content)

    async def fan_out() -> None:
        check((await coordinator({"helper": helper}).execute_query_async(GO)).content)

    async with aclosing(provider):
        yield {LOOP: loop, TEAM: team, FAN_OUT: fan_out}
