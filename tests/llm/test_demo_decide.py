"""What the demo model answers: pure functions, no server."""

from typing import Any

import pytest

from app.agents.awareness import awareness_message
from app.agents.sharing import shared_message
from app.agents.subagent import SubAgentWrapper
from app.graph.shared_memory import MemoryItem, SharedMemoryGraph
from app.llm.demo_model.checks import problem
from app.llm.demo_model.conversation import Answer, Call
from app.llm.demo_model.decide import decide
from app.llm.demo_model.toolbox import arithmetic

NAMES = ("implementer", "designer", "requirements")
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


def ask(*messages: tuple[str, str] | dict[str, Any], tools: Any = ()) -> Answer:
    """The answer to messages given as (role, text) or as they are sent."""
    wire = [
        {"role": item[0], "content": item[1]} if isinstance(item, tuple) else item
        for item in messages
    ]
    request = {"model": "demo", "messages": wire, "tools": list(tools)}
    assert problem(request) is None
    return decide(request)


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters or QUERY}
    return {"type": "function", "function": function}


def call(name: str, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": '{"query": "x"}'}
    item = {"id": f"{name}{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [item]}


def result(name: str, text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"{name}{number}", "content": text}


def pipeline_graph() -> SharedMemoryGraph:
    graph = SharedMemoryGraph()
    graph.add_edge("requirements", "designer")
    graph.add_edge("requirements", "implementer")
    graph.add_edge("designer", "implementer")
    return graph


def awareness() -> tuple[str, str]:
    message = awareness_message(pipeline_graph(), {name: name for name in NAMES})
    assert message is not None
    return "system", message.content


def shared(source: str, content: str) -> tuple[str, str]:
    """The message by which an agent gets what another published."""
    graph = pipeline_graph()
    (policy,) = {edge[2] for edge in graph.to_mermaid() and [(0, 0, None)]}
    item = MemoryItem(source_id=source, content=content, timestamp=None, version=1, policy=policy)
    return "system", shared_message(item).content
