"""The kinds of definitions: agents, graphs, providers and MCP servers."""

from dataclasses import dataclass

from sqlalchemy import Table

from bottega.db import tables


@dataclass(frozen=True, slots=True)
class DefinitionKind:
    """A kind of definition: its noun in messages, its table, and the table of its versions.

    Attributes:
        bodies: names of large fields, which only the full view includes.
    """

    noun: str
    table: Table
    versions: Table
    bodies: tuple[str, ...]

    @property
    def word(self) -> str:
        """The noun in names of operations and of actions in the audit log."""
        return self.noun.lower().replace(" ", "_")

    @property
    def path(self) -> str:
        """The path of the kind's resources in the API."""
        return f"/v1/{self.word.replace('_', '-')}s"

    @property
    def article(self) -> str:
        return "an" if self.noun[0] in "aM" else "a"


AGENTS = DefinitionKind(
    "agent",
    tables.agents,
    tables.agent_versions,
    ("system_message", "tools", "success_check"),
)
GRAPHS = DefinitionKind(
    "graph", tables.graphs, tables.graph_versions, ("nodes", "edges", "success_check")
)
PROVIDERS = DefinitionKind(
    "provider",
    tables.providers,
    tables.provider_versions,
    ("headers", "models", "prices"),
)
MCP_SERVERS = DefinitionKind(
    "MCP server",
    tables.mcp_servers,
    tables.mcp_server_versions,
    ("headers", "tools", "warnings"),
)
