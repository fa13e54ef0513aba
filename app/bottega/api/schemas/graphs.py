"""Graphs on the wire.

Dry runs of graphs on the wire.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from bottega.api.schemas.base import Answer, Body, Name, Part
from bottega.definitions.graphs import MOST_NODES

Seconds = Annotated[
    float,
    Field(gt=0, le=31_536_000, description="Seconds until a publication expires."),
]


class Node(Part):
    """An agent in the graph."""

    agent: Name
    ttl_s: Seconds | None = None


class Edge(Part):
    """A dependency: the target receives the source's answer before its first model call."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"source": "requirements", "target": "designer"}]}
    )

    source: Name
    target: Name
    policy: Annotated[
        Literal["final_response_only", "tool_results", "full_history"],
        Field(description="Content that flows along the edge."),
    ] = "final_response_only"


class GraphContent(Body):
    """A graph's definition, without its name; an edge adds the nodes it names."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"edges": [{"source": "requirements", "target": "designer"}]}]
        }
    )

    nodes: Annotated[list[Node | Name], Field(max_length=MOST_NODES)] = Field(default_factory=list)
    edges: Annotated[list[Edge], Field(max_length=5000)] = Field(default_factory=list)
    ttl_s: Seconds | None = None

    @field_validator("nodes")
    @classmethod
    def _all_nodes(cls, nodes: list[Any]) -> list[Any]:
        return [Node(agent=node) if isinstance(node, str) else node for node in nodes]


class NewGraph(GraphContent):
    """A graph to create."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "software",
                    "edges": [
                        {"source": "requirements", "target": "designer"},
                        {"source": "designer", "target": "implementer"},
                    ],
                }
            ]
        }
    )

    name: Name


class GraphSummary(Answer):
    """One version of a graph, without its nodes and edges."""

    name: str
    version: int
    ttl_s: float | None
    created_at: Annotated[datetime, Field(description="Time at which this version was stored.")]


class Graph(GraphSummary):
    """One version of a graph."""

    nodes: list[Node]
    edges: list[Edge]


class Order(Answer):
    """The agents of a graph in dependency order."""

    order: list[str]


_CONTENT = "Text; a long one is cut, see `longest_text`."


class NewDryRun(Body):
    """A dry run to make."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"agent": "coordinator", "input": "Build a todo app."},
                {"input": "Build a todo app."},
            ]
        }
    )

    agent: Annotated[
        Name | None,
        Field(description="The agent that is asked. Null: all agents of the graph, as in `dag`."),
    ] = None
    input: Annotated[str, Field(min_length=1, max_length=20_000, description="The question.")]


class DryRunTool(Answer):
    """A tool that a model could call."""

    name: str
    description: str
    agent: Annotated[str | None, Field(description="The agent that the tool asks, if it is one.")]
    called: Annotated[bool, Field(description="False: the dry run does not do what it would do.")]


class DryRunAgent(Answer):
    """An agent that the run would have."""

    agent: str
    version: int
    tools: list[DryRunTool]


class DryRunReceived(Answer):
    """An answer that an agent received from another agent."""

    source: str
    version: int
    policy: Annotated[str | None, Field(description="The edge's. Null: recalled, no edge.")]
    content: Annotated[str, Field(description=_CONTENT)]


class DryRunCall(Answer):
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any]


class DryRunMessage(Answer):
    """A message, as Chat Completions has it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, Field(description=_CONTENT)]
    tool_calls: list[DryRunCall]
    tool_call_id: Annotated[str | None, Field(description="Of a result: the call it answers.")]


class DryRunTask(Answer):
    """One query of one agent."""

    number: Annotated[int, Field(description="In the order of their starts, from 1.")]
    agent: str
    parent: Annotated[int | None, Field(description="Number of the task that asked. Null: none.")]
    question: Annotated[str, Field(description=_CONTENT)]
    received: Annotated[
        list[DryRunReceived], Field(description="In the order in which the prompt has them.")
    ]
    messages: Annotated[
        list[DryRunMessage],
        Field(
            description=(
                "The prompt of its last model call, as the model sees it, and the model's answer; "
                "empty if it has none, or if the whole is too large."
            )
        ),
    ]
    model_calls: int
    output: Annotated[str, Field(description=_CONTENT)]
    error: str | None


class DryRunWarning(Answer):
    """A warning, as in a run."""

    code: str
    message: str


class DryRun(Answer):
    """Course of a dry run."""

    graph: str
    version: int
    mode: Literal["orchestrated", "dag"]
    agent: str | None
    levels: Annotated[
        list[list[str]],
        Field(description="The graph's agents: each level reads only from levels before it."),
    ]
    agents: list[DryRunAgent]
    tasks: list[DryRunTask]
    output: Annotated[
        str | dict[str, str], Field(description="The answer; with several sinks, one by sink.")
    ]
    error: str | None
    warnings: list[DryRunWarning]
    longest_text: Annotated[int, Field(description="Characters after which texts are cut.")]
