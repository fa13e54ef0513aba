"""MCP servers as their definitions describe them, with the operator's commands and the secrets."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from bottega.errors import InvalidInputError
from bottega.mcp.servers import Headers, McpServer, StdioCommand
from bottega.secrets.lookup import SecretLookup


@dataclass(frozen=True, slots=True)
class McpAccess:
    """Needs of all tenants' servers besides their definitions.

    Attributes:
        commands: programs that the operator allows, by key.
    """

    commands: Mapping[str, StdioCommand]
    secrets: SecretLookup

    def server(
        self, tenant_id: UUID, tenant: str, name: str, definition: Mapping[str, Any]
    ) -> McpServer:
        """Return a tenant's server, whose headers are looked up at each connection.

        Raises:
            InvalidInputError: ``unknown_command``: the operator has withdrawn its command.
        """
        command = definition["command"]
        if command is not None and command not in self.commands:
            raise InvalidInputError(
                f"the MCP server '{name}' needs the command '{command}', which the operator has "
                "withdrawn from BOTTEGA_MCP_STDIO",
                code="unknown_command",
            )
        return McpServer(
            name=name,
            url=definition["url"],
            headers=partial(self._headers, tenant_id, tenant, definition),
            command=None if command is None else self.commands[command],
            timeout_s=definition["timeout_s"],
            max_bytes=definition["max_bytes"],
            tenant=tenant,
        )

    async def _headers(
        self, tenant_id: UUID, tenant: str, definition: Mapping[str, Any]
    ) -> Headers:
        if definition["url"] is None:
            return Headers({})
        secret = self.secrets.bound(tenant_id, tenant, definition["url"])
        fields: dict[str, str] = {}
        sent: list[str] = []
        for name, value in definition["headers"].items():
            fields[name] = value
            if not isinstance(value, str):
                fields[name] = (await secret(value["secret"])).strip()
                sent.append(fields[name])
        return Headers(fields, sent)
