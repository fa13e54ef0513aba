"""The model for all. It decides by a request's tools, so no participant has a script.

``python -m benchmarks.peers.model`` serves it as ``benchmarks.model`` serves the demo model.
"""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from benchmarks.model import ModelConnection, encoded
from benchmarks.model import main as serve
from benchmarks.peers.work import DONE, QUERIES, SPECIALISTS, STEPS, TEAM, WIDTH
from bottega.llm.demo_model.rules import Answer, DemoCall

EXPRESSION = " + ".join(["1"] * 60)
WORDS = "what a specialist found out about its part, in a sentence or two of ordinary length. " * 2


def decide(request: dict[str, Any]) -> Answer:
    """Call the next tool of the work, or answer."""
    tools = {each["function"]["name"]: each["function"] for each in request.get("tools") or ()}
    messages = request["messages"]
    done = sum(message["role"] == "tool" for message in messages)
    if "calculator" in tools:
        return _call(tools, "calculator", EXPRESSION) if done < STEPS else Answer(DONE)
    if SPECIALISTS[0] in tools:
        is_over = done == len(SPECIALISTS)
        return Answer(DONE) if is_over else _call(tools, SPECIALISTS[done], QUERIES[TEAM])
    if "helper" in tools:
        parts = [f"part {number}" for number in range(WIDTH)]
        return Answer(DONE) if done else _call(tools, "helper", *parts)
    return Answer(WORDS)


def _call(tools: dict[str, Any], name: str, *texts: str) -> Answer:
    """Call a tool once for each text, which is all that it needs."""
    (argument,) = tools[name]["parameters"]["required"]
    return Answer(calls=tuple(DemoCall(name, {argument: text}) for text in texts))


class PeersConnection(ModelConnection):
    def parts(self, body: bytes) -> Sequence[bytes]:
        found = self.answers.get(body)
        if found is None:
            request = from_json(body)
            found = self.answers[body] = encoded(decide(request), request)
        return found


if __name__ == "__main__":
    serve(PeersConnection)
