"""A team with a graph: each answer reaches the agents that depend on it.

The program needs a model: set ``OPENAI_API_KEY``, or ``OPENAI_BASE_URL`` for any OpenAI-compatible
server, such as ``bottega demo-model --port 8401``.
"""

import asyncio
import os
from contextlib import aclosing

from bottega.agents import (
    AgentFactory,
    BaseAgent,
    QueryAnswered,
    SharedMemoryGraph,
    SubAgentEnded,
    SubAgentStarted,
    set_default_provider,
)
from bottega.llm.vendors import OpenAIProvider

SPECIALISTS = {
    "requirements": "Turns a wish into numbered requirements.",
    "designer": "Designs components that cover the requirements.",
    "implementer": "Plans modules for the components.",
}


def build_team() -> tuple[BaseAgent, SharedMemoryGraph]:
    """Return the coordinator of three specialists, and the graph that they share."""
    graph = SharedMemoryGraph()
    graph.add_edge("requirements", "designer")
    graph.add_edge("requirements", "implementer")
    graph.add_edge("designer", "implementer")
    factory = AgentFactory().with_memory_graph(graph)
    for name, does in SPECIALISTS.items():
        prompt = f"You are the {name} specialist. {does}"
        factory.register(
            name,
            BaseAgent,
            stateless=True,
            defaults={"system_message": prompt, "description": does},
        )
    factory.register("coordinator", BaseAgent)
    coordinator = factory.create(
        "coordinator",
        subagents=list(SPECIALISTS),
        system_message="You coordinate a software team. Ask every specialist.",
    )
    return coordinator, graph


async def main(wish: str) -> None:
    model = os.environ.get("MODEL", "gpt-5-mini")
    async with aclosing(OpenAIProvider(model)) as provider:
        set_default_provider(lambda: provider)
        coordinator, graph = build_team()
        await show(coordinator, wish)
    for item in graph.pull_for("implementer"):
        print(f"the implementer can read {item.source_id}, version {item.version}")


async def show(coordinator: BaseAgent, wish: str) -> None:
    """Print the work of a team, then its answer."""
    async for event in coordinator.stream(wish):
        match event:
            case SubAgentStarted():
                print(f"{event.agent} begins")
            case SubAgentEnded(response):
                print(f"{event.agent} ends: {response.error or 'done'}")
            case QueryAnswered(response) if response.error is not None:
                raise SystemExit(response.error)
            case QueryAnswered(response):
                print(response.content)


if __name__ == "__main__":
    asyncio.run(main("Build a todo app."))
