"""Graphs on the wire."""

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
