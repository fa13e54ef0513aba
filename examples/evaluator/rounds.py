"""Let a writer and a reviewer take turns on a text, and print the text of each turn.

python rounds.py QUESTION
"""

import json
import os
import sys
import time
from typing import Any
from urllib.request import Request, urlopen


def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request to Bottega; return its answer."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("BOTTEGA_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    url = f"{os.environ['BOTTEGA_URL']}/v1/{path}"
    with urlopen(Request(url, data, headers, method=method)) as answer:
        return json.load(answer)


run = call("POST", "runs?wait=30", {"mode": "dag", "graph": "evaluator", "input": sys.argv[1]})
while run["ended_at"] is None:
    time.sleep(0.2)
    run = call("GET", f"runs/{run['id']}")
for turn, task in enumerate(call("GET", f"runs/{run['id']}/tasks")["items"]):
    print(f"round {turn // 2 + 1}, {task['agent']}:\n{task['output'] or task['error']}\n")
sys.exit(0 if run["status"] == "completed" else run["error"])
