"""Bottega's agents as a library. An agent keeps its history, so each run makes one."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from benchmarks.peers.work import MODEL, STEPS, Ask, calculate, described
from bottega.agents import BaseAgent, tool
from bottega.agents.tools import ToolBase
from bottega.llm.vendors import OpenAIProvider

PACKAGES = ("bottega",)


@dataclass(frozen=True, slots=True)
class _Maker:
    provider: OpenAIProvider

    def calculator(self) -> ToolBase:
        made: ToolBase = tool(name="calculator", description="Evaluates an expression.")(calculate)
        return made

    def subagent(self, name: str, prompt: str) -> BaseAgent:
        return BaseAgent(prompt, provider=self.provider, agent_name=name)

    def agent(self, prompt: str, tools: Sequence[ToolBase | BaseAgent]) -> Ask:
        plain = [each for each in tools if not isinstance(each, BaseAgent)]
        subagents = [each for each in tools if isinstance(each, BaseAgent)]

        async def ask(query: str) -> str:
            agent = BaseAgent(prompt, provider=self.provider, tools=plain, max_iterations=STEPS + 1)
            for each in subagents:
                name = each.agent_name
                agent.register_agent(each, name=name, description=described(name), stateless=True)
            return (await agent.execute_query_async(query)).content

        return ask


@asynccontextmanager
async def maker(base_url: str, database_url: None) -> AsyncIterator[_Maker]:
    async with aclosing(OpenAIProvider(MODEL, base_url=base_url)) as provider:
        yield _Maker(provider)
