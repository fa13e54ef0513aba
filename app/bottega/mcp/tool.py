"""Tools of MCP servers, for agents."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import to_json

from bottega.agents.approval import EXPIRES_S, Approval
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.tools import ToolBase, error_result, success_result
from bottega.errors import InvalidInputError, UnavailableError
from bottega.mcp.client import McpConnections
from bottega.mcp.connection import McpUnansweredError, OnProgress, OnQuestion
from bottega.mcp.servers import McpServer, McpToolSchema
from bottega.redaction import Redactor

ProgressOf = Callable[[ToolCall], OnProgress | None]
QuestionsOf = Callable[[ToolCall], OnQuestion | None]


def _nobody(call: ToolCall) -> None:
    """Follow no call."""


class McpTool(ToolBase):
    """A tool of an MCP server.

    Args:
        name: as models see it.
        known: redacts known secrets from answers, besides those that were sent to the server.
        approval: which calls a person must approve.
        progress: returns who takes the server's reports on a call.
        questions: returns who answers the server's questions in a call.
    """

    timeout_s = None
    """The connection has limits of its own: people may take longer than a server."""

    def __init__(
        self,
        name: str,
        server: McpServer,
        schema: McpToolSchema,
        connections: McpConnections,
        *,
        known: Redactor = Redactor(()),
        approval: Approval | None = None,
        expires_s: float = EXPIRES_S,
        progress: ProgressOf = _nobody,
        questions: QuestionsOf = _nobody,
    ) -> None:
        self.name = name
        self.description = schema.description
        self.approval = approval
        self.expires_s = expires_s
        self._server = server
        self._schema = schema
        self._connections = connections
        self._known = known
        self._progress = progress
        self._questions = questions

    def __repr__(self) -> str:
        return f"McpTool({self.name!r})"

    def create_schema(self) -> dict[str, Any]:
        return self._schema.input_schema

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Call the tool. An error of the server is an ERROR, as its failure to answer."""
        try:
            result = await self._connections.call(
                self._server,
                self._schema.name,
                tool_call.arguments,
                on_progress=self._progress(tool_call),
                on_question=self._questions(tool_call),
                schema=self._schema.input_schema,
            )
        except (InvalidInputError, UnavailableError) as error:
            said = error.detail
            if isinstance(error, McpUnansweredError):
                said += "; the call may have had its effect: look before you repeat it"
            return error_result(tool_call, self._clean(said, ()), error.code)
        value = self._clean(result.value, result.secrets)
        if result.is_error:
            text = value if isinstance(value, str) else to_json(value).decode()
            return error_result(tool_call, text or "the tool failed")
        shown = [part for part in result.parts if part.text is None]
        return success_result(tool_call, value, shown)

    def _clean(self, value: Any, secrets: Sequence[str]) -> Any:
        return Redactor(secrets, beside=self._known).value(value)
