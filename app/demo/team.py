"""The demo's team: three specialists whose answers build on each other, under a coordinator."""

from typing import Any

COORDINATOR = "coordinator"
GRAPH = "software"
_MARK = {"created_by": "bottega demo"}

_SPECIALISTS = {
    "requirements": (
        "Turns a wish into numbered requirements.",
        "You are a requirements analyst. Write short, numbered requirements (R1, R2, …).",
    ),
    "designer": (
        "Designs an architecture that covers the requirements.",
        "You are a software designer. Name one component per requirement (C1, C2, …).",
    ),
    "implementer": (
        "Plans the implementation of the design.",
        "You are an implementer. Plan one module per component and say what it satisfies.",
    ),
}

AGENTS: list[dict[str, Any]] = [
    *(
        {
            "name": name,
            "description": description,
            "system_message": system_message,
            "metadata": _MARK,
        }
        for name, (description, system_message) in _SPECIALISTS.items()
    ),
    {
        "name": COORDINATOR,
        "description": "Coordinates a small software team.",
        "system_message": (
            "You are the coordinator of a software team. Ask your sub-agents for what you need, "
            "then sum up what they answered."
        ),
        "subagents": {"names": list(_SPECIALISTS)},
        "metadata": _MARK,
    },
]

GRAPH_DEFINITION: dict[str, Any] = {
    "name": GRAPH,
    "nodes": list(_SPECIALISTS),
    "edges": [
        {"source": "requirements", "target": "designer"},
        {"source": "requirements", "target": "implementer"},
        {"source": "designer", "target": "implementer"},
    ],
}


def is_ours(agent: dict[str, Any]) -> bool:
    """Whether the demo created this agent, so that it may store a new version of it."""
    return bool(agent["metadata"] == _MARK)
