"""The requirements → designer → implementer team, for tests that run it."""

from typing import Any

import httpx2

from bottega.cli.scenarios import SOFTWARE
from bottega.llm.demo_model.rules import Answer, DemoCall, decide, read

RUN = SOFTWARE.run
CALLS = 7
AWARENESS = "You are coordinating sub-agents with dependencies.\n"


async def define(client: httpx2.AsyncClient) -> None:
    """Create the team's agents and graph, without the check that goes on after a run's end."""
    for agent in SOFTWARE.agents:
        body = {name: value for name, value in agent.items() if name != "success_check"}
        assert (await client.post("/v1/agents", json=body)).status_code == 201
    assert (await client.post("/v1/graphs", json=SOFTWARE.graph)).status_code == 201


async def define_graph(
    client: httpx2.AsyncClient, name: str, *edges: tuple[str, str], **fields: Any
) -> None:
    """Create a graph and, for each node, an agent that names itself."""
    listed = [{"source": source, "target": target} for source, target in edges]
    for agent in dict.fromkeys(end for edge in edges for end in edge):
        body = {"name": agent, "description": agent, "system_message": f"You are {agent}."}
        assert (await client.post("/v1/agents", json=body)).status_code == 201
    created = await client.post("/v1/graphs", json={"name": name, "edges": listed, **fields})
    assert created.status_code == 201, created.text


async def start(client: httpx2.AsyncClient, **changes: Any) -> str:
    """Start a run of the team; return its id."""
    answer = await client.post("/v1/runs", json=RUN | changes)
    assert answer.status_code == 202, answer.text
    run_id: str = answer.json()["id"]
    return run_id


def systems(request: dict[str, Any]) -> list[str]:
    """Return the instructions in a model request.

    They are the agent's system message, the order of its sub-agents, and each piece of context that
    opens the turn of its query.
    """
    conversation = read(request)
    own, mark, order = conversation.system.partition(AWARENESS)
    told = [own.strip(), *([mark + order] if mark else [])]
    return told + [piece[0].strip() for piece in conversation.context]


def asked_of(request: dict[str, Any]) -> str:
    """Return which of the team's agents sent a model request, by its system message."""
    own = systems(request)[0]
    name: str = next(agent["name"] for agent in SOFTWARE.agents if agent["system_message"] == own)
    return name


def decide_in_parallel(request: dict[str, Any]) -> Answer:
    """Answer as the demo model, but call all sub-agents in one answer."""
    answer, conversation = decide(request), read(request)
    if [list(call.arguments) for call in answer.calls] != [["query"]]:
        return answer
    queries = {name: f"{conversation.asked} (your part: {name})" for name in conversation.tools}
    return Answer(calls=tuple(DemoCall(name, {"query": queries[name]}) for name in queries))
