"""MCP servers for tests, made with the official SDK: over HTTP in this loop, and over stdio.

``python -m tests.mcp_server`` speaks on its standard input and output.
"""

import asyncio
import base64
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.types import Receive, Scope, Send

from tests.fake_model import serving

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@dataclass(slots=True)
class ToolServer:
    """An MCP server over HTTP, while the ``async with`` block of :func:`tool_server` lasts.

    Attributes:
        called: names of the tools that were called, in order.
        headers: of all requests, in order of arrival; names in lower case.
        gate: calls of the tool ``slow`` wait for it.
    """

    mcp: MCPServer
    port: int = 0
    called: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"


def make(server: ToolServer) -> None:
    """Give a server its tools."""
    mcp = server.mcp

    @mcp.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        server.called.append("add")
        return a + b

    @mcp.tool()
    def fail(word: str) -> str:
        """Fail."""
        server.called.append("fail")
        raise ToolError(f"no {word} here")

    @mcp.tool()
    def picture() -> Image:
        """Return an image."""
        return Image(data=PIXEL, format="png")

    @mcp.tool()
    def env() -> dict[str, str]:
        """Return the environment."""
        return dict(os.environ) | {"pid": str(os.getpid())}

    @mcp.tool()
    async def slow(steps: int, ctx: Context[Any, Any]) -> str:
        """Report progress, and wait."""
        server.called.append("slow")
        for step in range(steps):
            await ctx.report_progress(step + 1, steps, f"step {step + 1}")
        await server.gate.wait()
        return "slept"


@asynccontextmanager
async def tool_server(port: int = 0) -> AsyncIterator[ToolServer]:
    """Serve over HTTP on loopback."""
    server = ToolServer(MCPServer("tests"))
    make(server)
    app = server.mcp.streamable_http_app()

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            pairs = ((name.decode(), value.decode("latin-1")) for name, value in scope["headers"])
            server.headers.append(dict(pairs))
        await app(scope, receive, send)

    async with AsyncExitStack() as stack:
        listener = socket.create_server(("127.0.0.1", port))
        server.port = listener.getsockname()[1]
        await stack.enter_async_context(app.router.lifespan_context(app))
        await stack.enter_async_context(serving(noting, listener))
        yield server
        server.gate.set()


if __name__ == "__main__":
    own = ToolServer(MCPServer("tests"))
    own.gate.set()
    make(own)
    own.mcp.run("stdio")
