"""Find the helper among the tools of an MCP server, and ask it about a file, as an editor does.

python ask.py FILE QUESTION
"""

import asyncio
import os
import sys
from pathlib import Path

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client


async def main(question: str) -> None:
    key = os.environ.get("BOTTEGA_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    http = httpx2.AsyncClient(headers=headers, timeout=60)
    server = streamable_http_client(f"{os.environ['BOTTEGA_URL']}/mcp", http_client=http)
    async with http, Client(server) as mcp:
        for tool in (await mcp.list_tools()).tools:
            print(f"tool {tool.name}: {tool.description}")
        answer = await mcp.call_tool("coding-helper", {"input": question})
        text = "\n".join(part.text for part in answer.content if part.type == "text")
        sys.exit(text) if answer.is_error else print(f"\n{text}")


if __name__ == "__main__":
    file = Path(sys.argv[1])
    asyncio.run(main(f"{sys.argv[2]}\n\n{file.name}:\n{file.read_text()}"))
