"""References of a document's definitions to others by name."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bottega.api.routes.deploy.bodies import Apply
from bottega.api.shared.definitions import Caller
from bottega.definitions import store
from bottega.definitions.kinds import AGENTS, GRAPHS, MCP_SERVERS, DefinitionKind
from bottega.tools.mcp import McpToolDefinition

Place = tuple[str, DefinitionKind, str]
"""JSON Pointer of a definition, and kind and name of another one that it names."""


async def warnings_of(caller: Caller, asked: Apply) -> list[dict[str, Any]]:
    """Return a warning for each name in a document that does not exist: runs would be refused."""
    names: dict[str, set[str]] = defaultdict(set)
    kinds: dict[str, DefinitionKind] = {}
    places = list(_named(asked))
    for _, kind, name in places:
        kinds[kind.word] = kind
        names[kind.word].add(name)
    missing = {
        word: await store.unknown(caller.tx, kinds[word], caller.tenant, wanted)
        for word, wanted in names.items()
    }
    return [
        {"pointer": pointer, "detail": f"there is no {kind.noun} '{name}'"}
        for pointer, kind, name in dict.fromkeys(places)
        if name in missing[kind.word]
    ]


def _named(asked: Apply) -> Iterator[Place]:
    for number, agent in enumerate(asked.agents):
        place = f"/agents/{number}"
        for name in () if agent.subagents is None else agent.subagents.names:
            yield place, AGENTS, name
        for tool in agent.tools:
            if isinstance(tool, McpToolDefinition):
                yield place, MCP_SERVERS, tool.server
    for number, graph in enumerate(asked.graphs):
        place = f"/graphs/{number}"
        for node in graph.nodes:
            yield place, AGENTS, node if isinstance(node, str) else node.agent
        for edge in graph.edges:
            yield from ((place, AGENTS, edge.source), (place, AGENTS, edge.target))
    for number, schedule in enumerate(asked.schedules):
        place = f"/schedules/{number}"
        for kind, named in ((AGENTS, schedule.run.agent), (GRAPHS, schedule.run.graph)):
            if named is not None:
                yield place, kind, named
