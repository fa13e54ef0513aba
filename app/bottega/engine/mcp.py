"""MCP servers of tenants, built from definitions, and the servers' tools for a run's agents.

A server may report a call's progress very often. Subscribers do not get every report.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from uuid import UUID

import asyncpg
from pydantic_core import to_json

from bottega.agents.approval import Interrupt
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.query import CurrentCall, current_call
from bottega.agents.tools import ToolBase
from bottega.clock import monotonic
from bottega.db.failures import is_transient
from bottega.db.pool import acting_as
from bottega.engine.claim import ClaimedRun
from bottega.engine.journal import Journal, Tasks, name_of
from bottega.engine.live_text import LiveText
from bottega.engine.waiting import MOST_OF_CALL
from bottega.errors import InvalidInputError
from bottega.events.data import ToolReport
from bottega.events.log import storable
from bottega.json_schema.output import output_schema
from bottega.logger import Logger
from bottega.mcp.client import McpConnections, McpTool
from bottega.mcp.connection import QUESTION_S
from bottega.redaction import Redactor
from bottega.secrets.lookup import SecretLookup
from bottega.tools.egress import Egress
from bottega.tools.mcp import (
    Headers,
    McpServer,
    McpToolDefinition,
    McpToolSchema,
    StdioCommand,
    model_name,
    tools_in,
)

LEAST_S = 0.2
"""Minimum seconds between two reports about a call that subscribers get."""
_SHARE = 0.02
"""Minimum pause between two reports, as a share of the call's duration so far."""
LONGEST_MESSAGE = 1000


@dataclass(slots=True, eq=False)
class CallProgress:
    """The progress of one tool call.

    Attributes:
        clean: removes secrets from the server's texts.
        started: monotonic time at which the call began, in seconds.
    """

    journal: Journal
    task_id: UUID | None
    parent_task_id: UUID | None
    agent: str
    call: int
    tool_call_id: str | None
    name: str
    clean: Callable[[str], str]
    started: float
    has_rows: bool = False
    _due_at: float = 0.0
    _number: int = 0
    _newest: ToolReport | None = None
    _text: str | None = None

    def report(self, progress: float, total: float | None, message: str | None) -> None:
        """Store the server's report in place of an earlier report that was not written yet."""
        if not math.isfinite(progress):
            return
        text = None if message is None else self.clean(storable(message))[:LONGEST_MESSAGE]
        self._newest = ToolReport(
            tool_call_id=self.tool_call_id or "",
            name=self.name,
            progress=progress,
            total=total if total is not None and math.isfinite(total) else None,
            message=text,
        )

    def take(self, now: float) -> tuple[int, str] | None:
        """Return the number and text of the newest report; ``None``: no report is due now."""
        if self._newest is None or now < self._due_at:
            return None
        text, self._newest = to_json(self._newest).decode(), None
        self._number += 1
        self._text = text
        self._due_at = now + max(LEAST_S, _SHARE * (monotonic() - self.started))
        self.has_rows = True
        return self._number, text

    def so_far(self) -> tuple[int, str] | None:
        return None if self._text is None else (self._number, self._text)

    def give_back(self, at: int, text: str) -> None:
        """Drop a report that could not be written: only the server's next report is written."""


@dataclass(frozen=True, slots=True)
class McpAccess:
    """Dependencies of MCP servers, in addition to the servers' definitions.

    Attributes:
        commands: programs that the operator allows, by key.
    """

    commands: Mapping[str, StdioCommand]
    secrets: SecretLookup

    def server(
        self, tenant_id: UUID, tenant: str, name: str, definition: Mapping[str, Any]
    ) -> McpServer:
        """Return a tenant's server, which looks up its headers at the start of each connection.

        Raises:
            InvalidInputError: ``unknown_command``: the operator has removed the server's command.
        """
        command = definition["command"]
        if command is not None and command not in self.commands:
            raise InvalidInputError(
                f"the MCP server '{name}' needs the command '{command}', which the operator has "
                "removed from BOTTEGA_MCP_STDIO",
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
        names: list[str] = []
        for name, value in definition["headers"].items():
            fields[name] = value
            if not isinstance(value, str):
                fields[name] = (await secret(value["secret"])).strip()
                names.append(fields[name])
        return Headers(fields, names)


logger = Logger(__name__)

_CLOSE_S = 10.0
_NO_CONNECTIONS = McpConnections(Egress())
_LONGEST_QUESTION = 10_000
_STALE = """
UPDATE mcp_server_versions v SET definition = v.definition || '{"stale": true}'
FROM mcp_servers m
WHERE m.tenant_id = $1 AND m.name = $2 AND m.deleted_at IS NULL
  AND v.tenant_id = $1 AND v.name = $2 AND v.version = m.version
  AND v.definition ->> 'url' IS NOT DISTINCT FROM $3
  AND v.definition -> 'tools' <> 'null' AND NOT v.definition @> '{"stale": true}'
"""


@dataclass(frozen=True, slots=True)
class McpSession:
    """The MCP connections of one attempt of a run, and the progress of the attempt's MCP calls."""

    connections: McpConnections
    tasks: Tasks
    live_text: LiveText | None

    def own(self, tool: ToolBase) -> ToolBase:
        """Return a copy of a tool. The copy uses the connections of this session."""
        return tool.within(self) if isinstance(tool, PinnedMcpTool) else tool

    @contextmanager
    def progress(self, call: CurrentCall, name: str, redactor: Redactor) -> Iterator[CallProgress]:
        """During the block, show the call's progress to the run's subscribers."""
        query = call.query
        parent = None if query.parent is None else self.tasks.id_of(query.parent)
        progress = CallProgress(
            self.tasks.journal,
            self.tasks.id_of(query),
            parent,
            name_of(query.agent),
            query.model_calls,
            call.id,
            name,
            redactor.text,
            monotonic(),
        )
        if self.live_text is None:
            yield progress
            return
        self.live_text.begin(progress)
        try:
            yield progress
        finally:
            self.live_text.end(progress)


@dataclass(frozen=True, slots=True)
class McpSessions:
    """Factory of the MCP sessions of this worker's runs."""

    pool: asyncpg.Pool
    egress: Egress
    live_text: LiveText | None

    def open(self, run: ClaimedRun, tasks: Tasks, ending: AsyncExitStack) -> McpSession:
        """Open the session of an attempt. ``ending`` closes the session."""
        connections = McpConnections(self.egress, partial(self._changed, run.tenant_id))
        ending.push_async_callback(_close, connections)
        return McpSession(connections, tasks, self.live_text)

    async def _changed(self, tenant_id: UUID, server: McpServer) -> None:
        """Mark a server's stored tools as stale. If that fails, a later run marks them."""
        try:
            async with acting_as(self.pool, tenant_id) as connection:
                await connection.execute(_STALE, tenant_id, server.name, server.url, timeout=3.0)
        except Exception as error:
            log = logger.warning if is_transient(error) else logger.exception
            log("mcp.stale_not_noted", server=server.name)


async def _close(connections: McpConnections) -> None:
    try:
        async with asyncio.timeout(_CLOSE_S):
            await connections.aclose()
    except Exception:  # an error while closing must not change the run's end
        logger.exception("mcp.not_closed")


class PinnedMcpTool(McpTool):
    """A server's tool with a pinned schema. All runs with the same schema share this object."""

    session: McpSession | None = None

    def within(self, session: McpSession) -> Self:
        """Return a copy of the tool that uses the session of a run's attempt."""
        tool = copy(self)
        tool.session = session
        return tool

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        call = current_call.get()
        assert self.session is not None
        assert call is not None
        one = copy(self)
        one._connections = self.session.connections
        server = self._server.name
        one._questions = lambda _: Questions(call, tool_call, self._known, server).ask
        with self.session.progress(call, self.name, self._known) as progress:
            one._progress = lambda _: progress.report
            return await McpTool.execute(one, tool_call)


class Questions:
    """The questions that a server asks people during one tool call."""

    def __init__(
        self, call: CurrentCall, tool_call: ToolCall, clean: Redactor, server: str
    ) -> None:
        self._call = call
        self._tool_call = tool_call
        self._clean = clean
        self._server = server
        self._questions = 0

    async def ask(self, message: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ask people, and return the answer; ``None``: no answer, or the question is refused."""
        self._questions += 1
        if self._questions > MOST_OF_CALL:
            return None
        try:
            checked = await asyncio.to_thread(output_schema, schema)
        except InvalidInputError:
            return None
        if checked.patterns:
            return None
        interrupt = Interrupt(
            kind="question",
            question=self._clean.text(storable(message))[:_LONGEST_QUESTION],
            schema=self._clean.value(schema),
            server=self._server,
            expires_s=QUESTION_S,
            number=self._questions,
        )
        query = self._call.query
        decided = await query.recorder.decision(query, self._tool_call, interrupt)
        answer = decided.said.get("answer")
        return dict(answer) if isinstance(answer, Mapping) else None


def mcp_tools(
    definition: Mapping[str, Any],
    pinned: Mapping[str, Any],
    server: Callable[[str, Mapping[str, Any]], McpServer],
    agents: Any,
    redactor: Redactor,
) -> Iterator[PinnedMcpTool]:
    """Yield the tools of a server that an agent may call. Each run uses copies of the tools.

    Args:
        definition: a :class:`McpToolDefinition` as a dict.
        pinned: pinned definition of the server.
        server: returns the server for a name and a definition.
        agents: the agent's approval rule, as JSON.
    """
    checked = McpToolDefinition.model_validate(definition)
    connection = server(checked.server, pinned)
    if connection.command is not None:
        redactor = Redactor(connection.command.secrets, beside=redactor)
    for tool in tools_in(definition, pinned):
        yield PinnedMcpTool(
            model_name(connection.name, tool["name"]),
            connection,
            McpToolSchema(tool["name"], tool["description"], tool["input_schema"]),
            _NO_CONNECTIONS,
            known=redactor,
            approval=checked.rule(agents),
            expires_s=checked.expires_s,
        )
