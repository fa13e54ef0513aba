"""A team's definitions on the wire, as one document."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from bottega.api.schemas.agents import NewAgent
from bottega.api.schemas.base import Answer, Body
from bottega.api.schemas.graphs.definitions import NewGraph
from bottega.api.schemas.mcp_servers import NewMcpServer
from bottega.api.schemas.providers import NewProvider
from bottega.api.schemas.schedules import NewSchedule

MOST = 500
"""Definitions of each kind in one document."""


class Resources(Body):
    """Definitions of a tenant. Each is as in the body of its own POST."""

    deep = frozenset({"providers", "mcp_servers", "agents", "graphs", "schedules"})

    providers: Annotated[list[NewProvider], Field(max_length=MOST, default_factory=list)]
    mcp_servers: Annotated[list[NewMcpServer], Field(max_length=MOST, default_factory=list)]
    agents: Annotated[list[NewAgent], Field(max_length=MOST, default_factory=list)]
    graphs: Annotated[list[NewGraph], Field(max_length=MOST, default_factory=list)]
    schedules: Annotated[list[NewSchedule], Field(max_length=MOST, default_factory=list)]


class Apply(Resources):
    """Definitions to store, all or none."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"agents": [{"name": "clerk", "system_message": "You answer customers."}]}]
        }
    )

    dry_run: Annotated[
        bool, Field(description="Check everything, say what would change, and store nothing.")
    ] = False
    source: Annotated[
        str | None,
        Field(
            pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._/-]{0,99}$",
            description="Name of what these definitions come from, such as a repository. The "
            "server remembers which definitions were stored from it.",
        ),
    ] = None
    prune: Annotated[
        bool,
        Field(
            description="Delete the definitions that an earlier call with the same `source` "
            "stored, and that this one does not have."
        ),
    ] = False

    allow_missing: Annotated[
        bool,
        Field(
            description="Store definitions that name agents, graphs or MCP servers that do not "
            "exist, with warnings; their runs are refused until these do."
        ),
    ] = False


class Applied(Answer):
    """Result for one definition."""

    kind: Literal["provider", "mcp_server", "agent", "graph", "schedule"]
    name: str
    action: Literal["created", "replaced", "unchanged", "deleted"]
    before: Annotated[
        dict[str, Any] | None,
        Field(
            description="What was stored; null if nothing, or the same, or once the answer has "
            "4 MiB of bodies."
        ),
    ]
    after: Annotated[
        dict[str, Any] | None,
        Field(description="What is stored now; null if nothing, or the same."),
    ]


class ApplyWarning(Answer):
    """Defect of a definition that does not keep it from being stored."""

    pointer: Annotated[str, Field(description="JSON Pointer of the name in the request.")]
    detail: str


class ApplyResult(Answer):
    """Results, in the order in which the definitions were stored."""

    dry_run: bool
    items: list[Applied]
    warnings: Annotated[
        list[ApplyWarning],
        Field(
            description="Names of agents, graphs and MCP servers that do not exist; only with "
            "`allow_missing`."
        ),
    ]
