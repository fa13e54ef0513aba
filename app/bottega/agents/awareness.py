"""Message for an orchestrator about dependencies between its sub-agents."""

from collections.abc import Mapping

from bottega.agents.messages import SystemMessage
from bottega.agents.sharing import AWARENESS
from bottega.graph.shared_memory import SharedMemoryGraph


def awareness_message(
    graph: SharedMemoryGraph, tool_names: Mapping[str, str]
) -> SystemMessage | None:
    """Render the sub-agents' dependencies; ``None`` if there are none.

    Args:
        tool_names: tool name by the sub-agent's name in the graph.
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
