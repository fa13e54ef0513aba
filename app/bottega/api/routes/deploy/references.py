"""References of a document's definitions to others by name."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from bottega.api.routes.deploy.bodies import Apply
from bottega.api.schemas.graphs.definitions import NewGraph
from bottega.api.shared.definitions import Caller
from bottega.definitions import store
from bottega.definitions.kinds import AGENTS, GRAPHS, MCP_SERVERS, DefinitionKind
from bottega.tools.mcp import McpToolDefinition

Place = tuple[str, DefinitionKind, str]
"""JSON Pointer of a name in a document, and kind and name of the definition that it means."""
_MOST = 100


async def missing(caller: Caller, asked: Apply) -> list[tuple[str, str]]:
    """Return place and detail of each name in a document that does not exist.

    Runs would be refused. At most 100 are returned.
    """
    names: dict[str, set[str]] = defaultdict(set)
    places = list(_named(asked))
    for _, kind, name in places:
        names[kind.word].add(name)
    kinds = {kind.word: kind for _, kind, _ in places}
    unknown = {
        word: await store.unknown(caller.tx, kinds[word], caller.tenant, wanted)
        for word, wanted in names.items()
    }
    own: dict[str, list[str]] = {
        AGENTS.word: [each.name for each in asked.agents],
        GRAPHS.word: [each.name for each in asked.graphs],
        MCP_SERVERS.word: [each.name for each in asked.mcp_servers],
    }
    found = [
        (pointer, f"there is no {kind.noun} '{name}'{_near(name, own[kind.word])}")
        for pointer, kind, name in places
        if name in unknown[kind.word]
    ]
    return [*found, *_unlisted(asked)][:_MOST]


def _named(asked: Apply) -> Iterator[Place]:
    for number, agent in enumerate(asked.agents):
        place = f"/agents/{number}"
        children = () if agent.subagents is None else agent.subagents.names
        for index, name in enumerate(children):
            yield f"{place}/subagents/names/{index}", AGENTS, name
        for index, tool in enumerate(agent.tools):
            if isinstance(tool, McpToolDefinition):
                yield f"{place}/tools/{index}/server", MCP_SERVERS, tool.server
    for number, graph in enumerate(asked.graphs):
        place = f"/graphs/{number}"
        for index, node in enumerate(graph.nodes):
            at = f"{place}/nodes/{index}"
            yield (
                (at, AGENTS, node) if isinstance(node, str) else (f"{at}/agent", AGENTS, node.agent)
            )
        for pointer, name in _ends(number, graph):
            if not graph.nodes:
                yield pointer, AGENTS, name
    for number, schedule in enumerate(asked.schedules):
        place = f"/schedules/{number}/run"
        if schedule.run.agent is not None:
            yield f"{place}/agent", AGENTS, schedule.run.agent
        if schedule.run.graph is not None:
            yield f"{place}/graph", GRAPHS, schedule.run.graph


def _ends(number: int, graph: NewGraph) -> Iterator[tuple[str, str]]:
    for index, edge in enumerate(graph.edges):
        place = f"/graphs/{number}/edges/{index}"
        yield from ((f"{place}/source", edge.source), (f"{place}/target", edge.target))


def _unlisted(asked: Apply) -> Iterator[tuple[str, str]]:
    """Yield ends of edges that are no nodes of a graph that lists its nodes."""
    for number, graph in enumerate(asked.graphs):
        nodes = [node if isinstance(node, str) else node.agent for node in graph.nodes]
        for pointer, name in _ends(number, graph):
            if nodes and name not in nodes:
                yield pointer, f"'{name}' is none of the graph's nodes{_near(name, nodes)}"


def _near(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, n=1)
    return f": did you mean '{near[0]}'?" if near else ""
