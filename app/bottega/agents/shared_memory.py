"""Shared memory in an agent's query: insertion into the history, and publication."""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any
from unicodedata import normalize

from bottega.agents.messages import SHARED_MEMORY, StandardMessage, SystemMessage, ToolStatus
from bottega.agents.query import Query
from bottega.graph.shared_memory import MemoryItem, SharedMemoryGraph

AWARENESS = "orchestrator_awareness"

_SHORT = 8
# Letters of other scripts (lower case) that look like a to f.
_LOOK_ALIKES = tuple(zip("αаɑεеєσсᴄԁдɗβьвƀƒғϝꞙ", "aaaeeecccdddbbbbffff", strict=True))
_ALL_BUT_HEX = {code: None for code in range(128) if chr(code) not in "0123456789abcdef"}


def inject_shared_memory(query: Query) -> None:
    """Insert the predecessors' publications into the history; remove the last query's.

    Runs once per query, before its first model call. The block follows the agent's system message
    and awareness, in the graph's order.
    """
    query.memory_pulled = True
    agent = query.agent
    graph, agent_id = agent.memory_graph, agent.agent_id
    if graph is None or agent_id is None:
        return
    history = agent.conversation_history
    if any(_is_shared(message) for message in history):
        history[:] = [message for message in history if not _is_shared(message)]
    items = graph.pull_for(agent_id, query.recorder.sources_of(query))
    if items:
        place = _after_own(history, agent.system_message)
        history[place:place] = [shared_message(item) for item in items]
        query.recorder.injected(query, items)
    if query.parent is not None and (missing := graph.unpublished_predecessors(agent_id)):
        query.recorder.warning(
            query,
            "predecessor_not_published",
            f"'{agent_id}' starts before these predecessors have published: {', '.join(missing)}",
        )


def shared_message(item: MemoryItem) -> SystemMessage:
    """Render a publication for a prompt, fenced because it is data."""
    mark = fence(item.content)
    return SystemMessage(
        content=(
            f"Shared context from {item.source_id}:\n"
            f"<shared-context-{mark}>{item.content}</shared-context-{mark}>"
        ),
        metadata={
            SHARED_MEMORY: True,
            "shared_memory_source": item.source_id,
            "shared_memory_version": item.version,
        },
    )


def fence(content: str) -> str:
    """Return a mark that does not occur in ``content``, the same for the same content."""
    digest = sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return unheld(digest, content)


def unheld(digest: str, content: str) -> str:
    """Return the shortest prefix of ``digest`` that does not occur in ``content``.

    Ignores case, variants and look-alikes of letters, and characters in between.
    """
    plain = content
    if not plain.isascii():
        plain = normalize("NFKD", plain).casefold()
        for letter, meant in _LOOK_ALIKES:  # much faster than str.translate
            plain = plain.replace(letter, meant)
        plain = plain.encode("ascii", "ignore").decode()
    plain = plain.lower().translate(_ALL_BUT_HEX)
    length = _SHORT
    while digest[:length] in plain and length < len(digest):
        length += 1
    return digest[:length]


async def publish_answer(
    query: Query,
    content: str,
    *,
    before: Iterable[StandardMessage],
    withheld: Iterable[StandardMessage],
) -> None:
    """Publish an accepted answer, if the agent is a node of its graph and it is not empty.

    Args:
        before: the history before the query.
        withheld: messages of the query to leave out: rejected drafts, and the answer itself.
    """
    agent = query.agent
    graph, agent_id = agent.memory_graph, agent.agent_id
    if graph is None or agent_id is None or not graph.has_node(agent_id) or not content.strip():
        return
    hidden = {id(message) for message in (*before, *withheld)}
    publication = await graph.publish(
        agent_id,
        content,
        _metadata(query),
        version=query.recorder.version_of(query),
        timestamp=query.recorder.published_at(query),
        tool_results=query.tool_results,
        messages=[
            message
            for message in agent.conversation_history
            if id(message) not in hidden and not _is_shared(message)
        ],
    )
    query.recorder.published(query, publication)


def _metadata(query: Query) -> dict[str, Any]:
    """Return what tools, in the order of their calls, and then hooks annotated."""
    metadata: dict[str, Any] = {}
    for result in query.tool_results:
        if result.status is ToolStatus.SUCCESS:
            metadata |= result.annotations
    return metadata | query.annotations


def _is_shared(message: StandardMessage) -> bool:
    return isinstance(message, SystemMessage) and SHARED_MEMORY in message.metadata


def _after_own(history: list[StandardMessage], own: SystemMessage) -> int:
    """Return the index after the agent's own system message and its awareness."""
    place = 0
    for index, message in enumerate(history):
        if message is own or (isinstance(message, SystemMessage) and AWARENESS in message.metadata):
            place = index + 1
    return place


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
