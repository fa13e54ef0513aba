"""An MCP server whose tool answers each call with hundreds of questions for people.

    python -m benchmarks.tenants.questions

It prints its port.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_QUESTIONS = 300
_TOOL = {"name": "ask", "description": "Asks.", "inputSchema": {"type": "object"}}
_ABOUT = {
    "supportedVersions": ["2026-07-28"],
    "serverInfo": {"name": "asks", "version": "1"},
    "capabilities": {"tools": {}},
    "ttlMs": 0,
    "cacheScope": "public",
}
_QUESTION = {
    "method": "elicitation/create",
    "params": {
        "mode": "form",
        "message": "Which one?",
        "requestedSchema": {"type": "object", "properties": {"one": {"type": "string"}}},
    },
}


def _result(method: str) -> dict[str, Any]:
    if method == "server/discover":
        return {"resultType": "complete", **_ABOUT}
    if method == "tools/list":
        return {"resultType": "complete", "tools": [_TOOL], "ttlMs": 0, "cacheScope": "public"}
    asked = {f"q{number}": _QUESTION for number in range(_QUESTIONS)}
    return {"resultType": "input_required", "inputRequests": asked, "requestState": "s"}


class Asking(BaseHTTPRequestHandler):
    """Handler of one connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a message."""
        said = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = {"jsonrpc": "2.0", "id": said.get("id"), "result": _result(said["method"])}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Asking)
    print(f"listens on http://127.0.0.1:{server.server_port}/mcp", flush=True)
    server.serve_forever()
