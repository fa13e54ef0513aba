"""An MCP server on standard input and output, without the SDK: ``python scripted.py ERA``.

ERA is ``2025-11-25`` (handshake) or ``2026-07-28`` (stateless). Its tools misbehave in many ways.
"""

import base64
import json
import os
import subprocess
import sys
from typing import Any

ERA = sys.argv[1]
OBJECT = {"type": "object", "properties": {}}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
UNFIT = {"type": "object", "properties": {"name": {"type": "string", "pattern": "a"}}}
INFO = {"name": "scripted", "version": "1"}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 16).decode()
TOOLS = (
    *("echo", "environment", "ask", "media", "fail", "hang", "huge", "exit", "children"),
    *("progress", "wrong_id", "not_json", "bad_result", "ask_often", "odd", "change"),
)
ODD_TOOLS: list[Any] = [
    {"name": "no_schema", "inputSchema": None},
    {"inputSchema": OBJECT},
    7,
    {"name": "old", "description": 7, "inputSchema": OBJECT | {"nullable": True}},
]
"""Only the last one can be used."""
listening: list[Any] = []
"""Ids of the requests that ask for changes."""


def say(**message: Any) -> None:
    """Write a message."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def heard() -> dict[str, Any]:
    """Read the next message; end with the input."""
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    message: dict[str, Any] = json.loads(line)
    return message


def text(said: str, **more: Any) -> dict[str, Any]:
    """Return a result with a text."""
    return {"resultType": "complete", "content": [{"type": "text", "text": said}], **more}


def asked(request: dict[str, Any]) -> dict[str, Any]:
    """Ask for a name, in the way of the era, and greet."""
    params = {"mode": "form", "message": "Your name?", "requestedSchema": NAME}
    if ERA == "2025-11-25":
        say(id="q1", method="elicitation/create", params=params)
        answer = heard()["result"]
    else:
        answers = request["params"].get("inputResponses")
        if answers is None:
            question = {"method": "elicitation/create", "params": params}
            return {
                "resultType": "input_required",
                "inputRequests": {"name": question},
                "requestState": "s1",
            }
        assert request["params"]["requestState"] == "s1"
        answer = answers["name"]
    said = answer["content"]["name"] if answer["action"] == "accept" else "nobody"
    return text(f"Hello {said}.")


def asked_often(request: dict[str, Any]) -> dict[str, Any]:
    """Ask one question after another; report how many were accepted, and how many declined.

    The first ones, ``unfit`` of them, are such that nobody can be asked.
    """
    wanted = request["params"]["arguments"]["questions"]
    unfit = request["params"]["arguments"].get("unfit", 0)

    def question(number: int) -> dict[str, Any]:
        schema = UNFIT if number < unfit else NAME
        return {"mode": "form", "message": "Your name?", "requestedSchema": schema}

    if ERA == "2025-11-25":
        actions = []
        for number in range(wanted):
            say(id=f"q{number}", method="elicitation/create", params=question(number))
            actions.append(heard()["result"]["action"])
    else:
        actions = json.loads(request["params"].get("requestState", "[]"))
        answers = request["params"].get("inputResponses") or {}
        actions += [answer["action"] for answer in answers.values()]
        if len(actions) < wanted:
            asks = {"method": "elicitation/create", "params": question(len(actions))}
            return {
                "resultType": "input_required",
                "inputRequests": {"name": asks},
                "requestState": json.dumps(actions),
            }
    return text(f"{actions.count('accept')} accepted, {actions.count('decline')} declined")


def called(request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call."""
    name, arguments = request["params"]["name"], request["params"].get("arguments", {})
    match name:
        case "echo":
            return text(json.dumps(arguments), structuredContent=arguments)
        case "meta":
            return text(json.dumps(request["params"].get("_meta")))
        case "environment":
            return text(json.dumps(dict(os.environ)))
        case "ask":
            return asked(request)
        case "ask_often":
            return asked_often(request)
        case "media":
            image = {"type": "image", "data": PNG, "mimeType": "text/html"}
            note = {"type": "resource", "resource": {"uri": "file:///a", "text": "A note."}}
            wrong = {"type": "audio", "data": "%%%", "mimeType": "audio/wav"}
            return {"resultType": "complete", "content": [image, note, wrong]}
        case "fail":
            return text("no luck", isError=True)
        case "hang":
            sys.stdin.read()  # it ends with the input
        case "huge":
            return text("x" * 3_000_000)
        case "exit":
            sys.exit()
        case "children":
            child = subprocess.Popen(["sleep", "600"])
            return text(str(child.pid))
        case "progress":
            token = request["params"]["_meta"]["progressToken"]
            for done in (1, 2):
                told = {"progressToken": token, "progress": done, "total": 2, "message": "so far"}
                say(method="notifications/progress", params=told)
            return text("done")
        case "wrong_id":
            say(id="nobody asked", result=text("not for you"))
            return text("for you")
        case "odd":
            return dict(arguments["result"])
        case "change":
            if ERA == "2025-11-25":
                say(method="notifications/tools/list_changed")
            for each in listening:
                meta = {"_meta": {"io.modelcontextprotocol/subscriptionId": each}}
                say(method="notifications/tools/list_changed", params=meta)
            return text(f"{len(listening)} listen")
        case "not_json":
            sys.stdout.write("what?\n")
            return text("after noise")
    return {"content": "not a list"}


def answer(request: dict[str, Any]) -> None:
    """Answer a request."""
    number, method = request["id"], request["method"]
    common: dict[str, Any] = {"capabilities": {"tools": {"listChanged": True}}}
    if method == "server/discover" and ERA == "2026-07-28":
        cached = {"ttlMs": 0, "cacheScope": "public"}
        about = {"supportedVersions": [ERA], "serverInfo": INFO, "resultType": "complete"}
        say(id=number, result=about | common | cached)
    elif method == "initialize" and ERA == "2025-11-25":
        say(id=number, result={"protocolVersion": ERA, "serverInfo": INFO} | common)
    elif method == "tools/list":
        # two pages
        first = "cursor" not in request.get("params", {})
        names = TOOLS[:5] if first else TOOLS[5:]
        tools: list[Any] = [
            {"name": each, "description": each, "inputSchema": OBJECT} for each in names
        ]
        if first:
            tools[1:1] = ODD_TOOLS
        page: dict[str, Any] = {"tools": tools, "resultType": "complete"}
        page |= {"ttlMs": 0, "cacheScope": "public"}
        say(id=number, result=page | ({"nextCursor": "2"} if first else {}))
    elif method == "subscriptions/listen" and ERA == "2026-07-28":
        listening.append(number)
        meta = {"_meta": {"io.modelcontextprotocol/subscriptionId": number}}
        params = meta | {"notifications": {"toolsListChanged": True}}
        say(method="notifications/subscriptions/acknowledged", params=params)
    elif method == "tools/call":
        say(id=number, result=called(request))
    else:
        say(id=number, error={"code": -32601, "message": "unknown method"})


while True:
    each = heard()
    if "id" in each and "method" in each:
        answer(each)
