"""A customer's chat of two messages. Refunds wait until a person decides."""

import json
import os
import time
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

CHAT = f"chat-{uuid4()}"
TALK = [
    ("My kettle arrived broken. Please refund 240 euros.", {"decision": "approve"}),
    (
        "My toaster is two years old. Please refund it, too.",
        {"decision": "deny", "comment": "The guarantee is over."},
    ),
]


def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request to Bottega; return its answer."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("BOTTEGA_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    url = f"{os.environ['BOTTEGA_URL']}/v1/{path}"
    with urlopen(Request(url, data, headers, method=method)) as answer:
        return json.load(answer)


def say(message: str, decision: dict[str, Any]) -> None:
    """Send a customer's message, decide on each call that waits, and print the answer."""
    print(f"customer: {message}")
    body = {"agent": "shop-support", "session_id": CHAT, "user": "ada", "input": message}
    run = call("POST", "runs?wait=30", body)
    while run["ended_at"] is None:
        for waiting in call("GET", f"interrupts?status=pending&run_id={run['id']}")["items"]:
            print(f"  waits:  {waiting['tool']} {waiting['arguments']}")
            print(f"  person: {decision}")
            call("POST", f"interrupts/{waiting['id']}/resolve", decision)
        time.sleep(0.2)
        run = call("GET", f"runs/{run['id']}")
    if run["status"] != "completed":
        raise SystemExit(run["error"])
    print(f"desk:     {run['output']}\n")


for message, decision in TALK:
    say(message, decision)
