"""CPU of a call of an MCP tool, beside a plain request.

    python -m benchmarks.mcp_calls [--calls 500]

The server is a process of its own, on loopback, and answers at once with JSON; it costs this
process nothing. A plain request is what an HTTP tool sends, of the same size.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bottega.mcp.client import McpConnections
from bottega.mcp.servers import McpServer
from bottega.tools.egress import Egress

SERVER = """
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers["content-length"])))
        result = {"resultType": "complete"}
        if said["method"] == "server/discover":
            about = {"name": "fast", "version": "1"}
            result |= {"supportedVersions": ["2026-07-28"], "serverInfo": about}
            result |= {"capabilities": {"tools": {}}, "ttlMs": 0, "cacheScope": "public"}
        else:
            result["content"] = [{"type": "text", "text": "x" * 200}]
        body = json.dumps({"jsonrpc": "2.0", "id": said.get("id"), "result": result}).encode()
        self.wfile.write(b"HTTP/1.1 200 X\\r\\ncontent-type: application/json\\r\\ncontent-length: "
                         + str(len(body)).encode() + b"\\r\\n\\r\\n" + body)
    def log_message(self, *_): pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


async def cpu_ms(calls: int, call: Callable[[], Awaitable[Any]]) -> float:
    """Return the CPU of a call in milliseconds: the best of five rounds."""
    rounds = []
    await call()
    for _ in range(5):
        began = time.process_time()
        for _ in range(calls // 5):
            await call()
        rounds.append((time.process_time() - began) / (calls // 5) * 1000)
    return min(rounds)


async def measure(port: int, calls: int) -> None:
    url = f"http://127.0.0.1:{port}/mcp"
    egress = Egress(["127.0.0.1"])
    arguments = {"words": "x" * 50}
    params = {"name": "echo", "arguments": arguments}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    content = json.dumps(message).encode()
    plain = await cpu_ms(
        calls,
        lambda: egress.request("POST", url, content=content, timeout_s=30, max_bytes=1_000_000),
    )
    connections = McpConnections(egress)
    server = McpServer("fast", url=url)
    mcp = await cpu_ms(calls, lambda: connections.call(server, "echo", arguments))
    await connections.aclose()
    await egress.aclose()
    print(f"plain {plain:.2f} ms, MCP {mcp:.2f} ms: {mcp / plain:.1f} times as much CPU")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mcp_calls")
    parser.add_argument("--calls", type=int, default=500)
    options = parser.parse_args()
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            asyncio.run(measure(int(server.stdout.readline()), options.calls))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
