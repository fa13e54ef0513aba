"""openai-agents: sub-agents are tools of the coordinator. Traces, which it sends away, are off."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    Tool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from benchmarks.peers.work import MODEL, STEPS, Ask, calculate, described

PACKAGES = ("openai-agents",)


@dataclass(frozen=True, slots=True)
class _Maker:
    model: OpenAIChatCompletionsModel

    def calculator(self) -> Tool:
        return function_tool(calculate, name_override="calculator")

    def subagent(self, name: str, prompt: str) -> Tool:
        agent = Agent(name=name, instructions=prompt, model=self.model)
        return agent.as_tool(tool_name=name, tool_description=described(name))

    def agent(self, prompt: str, tools: Sequence[Tool]) -> Ask:
        agent = Agent(name="lead", instructions=prompt, model=self.model, tools=list(tools))

        async def ask(query: str) -> object:
            return (await Runner.run(agent, query, max_turns=STEPS + 1)).final_output

        return ask


@asynccontextmanager
async def maker(base_url: str, database_url: None) -> AsyncIterator[_Maker]:
    set_tracing_disabled(True)
    async with AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0) as client:
        yield _Maker(OpenAIChatCompletionsModel(model=MODEL, openai_client=client))
