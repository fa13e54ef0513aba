"""Scenarios of the demo as data: teams of agents and their tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ScenarioName = Literal["software", "research", "learning", "support"]

USER = "me"
"""User of the demo's runs."""
_MARK = {"created_by": "bottega demo"}
_SHARED = {"metadata": _MARK, "memory_scope": "tenant"}
"""Fields of all agents. All users of the tenant share the memory, because it has no secrets."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A team with a coordinator, and the team's task.

    Attributes:
        task: input of the run.
        agents: request bodies of the agents; sub-agents come before their callers.
        graph: request body of the graph; ``None``: the team has no graph.
    """

    coordinator: str
    task: str
    agents: Sequence[dict[str, Any]]
    graph: dict[str, Any] | None = None

    @property
    def graph_name(self) -> str | None:
        return None if self.graph is None else str(self.graph["name"])

    @property
    def run(self) -> dict[str, Any]:
        """Body of the request that starts the run."""
        fields = {"agent": self.coordinator, "graph": self.graph_name, "user": USER}
        return {**fields, "input": self.task}


def is_ours(agent: dict[str, Any]) -> bool:
    """Return true if the demo created this agent, so that the demo may update it."""
    return bool(agent["metadata"] == _MARK)


def _team(
    coordinator: str,
    description: str,
    system_message: str,
    specialists: Mapping[str, tuple[str, str]],
    *answers: str,
    **subagents: Any,
) -> list[dict[str, Any]]:
    """Return the request bodies of the specialists and their lead.

    Args:
        specialists: description and system message of each specialist, by name.
        answers: texts that the lead's answer must contain to count as a success.
    """
    texts = {**specialists, coordinator: (description, system_message)}
    agents: list[dict[str, Any]] = [
        {"name": name, "description": about, "system_message": own, **_SHARED}
        for name, (about, own) in texts.items()
    ]
    agents[-1]["subagents"] = {**subagents, "names": list(specialists)}
    agents[-1]["success_check"] = [{"type": "contains", "value": each} for each in answers]
    return agents


_DEVELOPERS = {
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

_RESEARCHERS = {
    name: (
        f"Finds out about the {name} of a subject.",
        f"You are a researcher. Say in a few sentences what is known of the {name} of the subject.",
    )
    for name in ("market", "technology", "risks")
}

SOFTWARE = Scenario(
    coordinator="coordinator",
    task="Build a todo app.",
    agents=_team(
        "coordinator",
        "Coordinates a small software team.",
        "You are the coordinator of a software team. Ask your sub-agents for what you need, "
        "then sum up what they answered, with the numbers of requirements and components.",
        _DEVELOPERS,
        *("R1", "C1"),
    ),
    graph={
        "name": "software",
        "nodes": list(_DEVELOPERS),
        "edges": [
            {"source": "requirements", "target": "designer"},
            {"source": "requirements", "target": "implementer"},
            {"source": "designer", "target": "implementer"},
        ],
    },
)

RESEARCH = Scenario(
    coordinator="researcher-lead",
    task="Research the state of vertical farming in 8 parts.",
    agents=_team(
        "researcher-lead",
        "Researches a subject with many tasks side by side.",
        "You lead a research team. Split the question into as many parts as you are asked for "
        "(else three) and dispatch a task for each, all with one call of dispatch_subagents: to "
        "the agents whose subject it is, the others without an agent. Send a task a message if it "
        "is to do more. Await the first success (any_success), poll once or twice, await them "
        "all, then write a report in Markdown with a section for each task.",
        _RESEARCHERS,
        "## ",
        mode="async",
    ),
)

_EDITORS = {
    "collector": ("Collects facts.", "You collect facts on a subject, in a few sentences."),
    "writer": ("Writes a text from facts.", "You write a short text from the facts you are given."),
    "checker": ("Checks a text.", "You check a text and say in a few sentences what to mend."),
}

RIGHT = ("collector", "writer", "checker")
"""Right order of the desk's agents; the lead does not know this order."""

LEARNING = Scenario(
    coordinator="desk-lead",
    task="Prepare a briefing on {topic}.",
    agents=_team(
        "desk-lead",
        "Leads a small editorial desk.",
        "You lead an editorial desk. Ask each of your sub-agents once, one after the other, in the "
        "order that you think is best, then sum up what they answered. Your last line says in "
        "which order you asked them, as in: Asked: a → b → c",
        _EDITORS,
        f"Asked: {' → '.join(RIGHT)}",
    ),
)

SUPPORT = Scenario(
    coordinator="support-desk",
    task="My kettle arrived broken. Please refund 240 euros.",
    agents=[
        {
            "name": "support-desk",
            "description": "Helps the customers of a shop.",
            "system_message": "You help the customers of a shop, in a few sentences. Pay money "
            "back with the tool refund, then tell the customer.",
            **_SHARED,
            "facts": "write",
            "tools": [
                {
                    "type": "client",
                    "name": "refund",
                    "description": "Pays money back to the customer.",
                    "parameters": {
                        "type": "object",
                        "properties": {"amount": {"type": "number"}, "reason": {"type": "string"}},
                        "required": ["amount", "reason"],
                    },
                    "approval": {"when": {"feature": "arguments.amount", "op": "gt", "value": 100}},
                    "approval_reason": "Refunds above 100 need a person.",
                }
            ],
        }
    ],
)

SCENARIOS: dict[ScenarioName, Scenario] = {
    "software": SOFTWARE,
    "research": RESEARCH,
    "learning": LEARNING,
    "support": SUPPORT,
}
