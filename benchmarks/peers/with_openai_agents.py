"""openai-agents: sub-agents are tools of the coordinator. Traces, which it sends away, are off."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    Tool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

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

PACKAGES = ("openai-agents",)


@asynccontextmanager
async def works(base_url: str) -> AsyncIterator[dict[str, Run]]:
    set_tracing_disabled(True)
    async with AsyncOpenAI(api_key="none", base_url=base_url, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model=MODEL, openai_client=client)

        def as_tool(name: str, prompt: str) -> Tool:
            agent = Agent(name=name, instructions=prompt, model=model)
            return agent.as_tool(tool_name=name, tool_description=described(name))

        def lead(prompt: str, *tools: Tool) -> Agent:
            return Agent(name="lead", instructions=prompt, model=model, tools=list(tools))

        assistant = lead(ASSISTANT, function_tool(calculate, name_override="calculator"))
        coordinator = lead(COORDINATOR, *(as_tool(name, prompt_of(name)) for name in SPECIALISTS))
        leader = lead(COORDINATOR, as_tool("helper", HELPER))

        async def loop() -> None:
            check((await Runner.run(assistant, FIND_OUT, max_turns=STEPS + 1)).final_output)

        async def team() -> None:
            check((await Runner.run(coordinator, BUILD)).final_output)

        async def fan_out() -> None:
            check((await Runner.run(leader, GO)).final_output)

        yield {LOOP: loop, TEAM: team, FAN_OUT: fan_out}
