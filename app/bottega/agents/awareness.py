"""What an orchestrator is told of how its sub-agents depend on each other (spec page 2, G11)."""

from collections.abc import Mapping

from bottega.agents.messages import SystemMessage
from bottega.agents.sharing import AWARENESS
from bottega.graph.shared_memory import SharedMemoryGraph


def awareness_message(
    graph: SharedMemoryGraph, tool_names: Mapping[str, str]
) -> SystemMessage | None:
    """The message for an orchestrator, or ``None`` if none of its sub-agents depends on another.

    Args:
        tool_names: per sub-agent's name in the graph, the name of the tool the model sees.
    """
    edges = graph.get_edges_for_nodes(tool_names)
    if not edges:
        return None
    order = graph.get_topological_order(tool_names)
    lines = [
        "You are coordinating sub-agents with dependencies.",
        "",
        "Dependency order (call upstream before downstream):",
        *(f"  {tool_names[source]} -> {tool_names[target]}" for source, target in edges),
        "",
        f"Recommended execution order: {', '.join(tool_names[name] for name in order)}",
        "",
        "Guideline: do not call an agent before its prerequisites have been executed.",
    ]
    return SystemMessage(content="\n".join(lines), metadata={AWARENESS: True})
