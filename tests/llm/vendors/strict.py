"""A server with a chat template as strict as any in use.

Its rules and error texts are public:

- Qwen 3.5 and later, on vLLM and llama.cpp: "System message must be at the beginning."
  (github.com/vllm-project/vllm/issues/41114), "No user query found in messages.".
- Mistral's and many others' templates: "After the optional system message, conversation roles must
  alternate user/assistant/user/assistant/…"; mistral-common's ``protocol/instruct/validator.py``:
  "Unexpected role 'user' after role 'tool'" (github.com/mistralai/mistral-common/issues/169), tool
  call ids of nine letters or digits, as many results as calls, and a last role of user or tool.
- Gemini's OpenAI-compatible endpoint: no empty content.
"""

import re
from collections.abc import Callable
from typing import Any

from bottega.llm.demo_model.rules import decide as demo_decide
from tests.fake_model import FakeModel, Reply, http_error

_AFTER = {
    None: {"user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user"},
    "calls": {"tool"},
    "tool": {"tool", "assistant", "calls"},
}
_ID = re.compile(r"[a-zA-Z0-9]{9}", re.ASCII)


def refusal(messages: list[dict[str, Any]]) -> str | None:
    """Return the server's error for these messages; ``None``: it accepts them."""
    if any(message["role"] == "system" for message in messages[1:]):
        return "System message must be at the beginning."
    if not any(message["role"] == "user" for message in messages):
        return "No user query found in messages."
    before: str | None = None
    waiting: list[str] = []
    for index, message in enumerate(messages):
        said = message.get("content")
        if isinstance(said, list):
            said = "".join(part.get("text", part["type"]) for part in said)
        role = "calls" if message.get("tool_calls") else message["role"]
        if not (role in _AFTER[before] or (role == "system" and index == 0)) and not (
            role == "calls" and "assistant" in _AFTER[before]
        ):
            return f"Unexpected role '{role}' after role '{before}' (message {index})"
        if role != "calls" and not (said or "").strip():
            return f"messages[{index}]: content must not be empty"
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                return f"Unexpected tool call id {message['tool_call_id']} in tool results"
            waiting.remove(message["tool_call_id"])
        elif waiting:
            return "Not the same number of function calls and responses"
        waiting += [call["id"] for call in message.get("tool_calls") or ()]
        for call_id in waiting:
            if not _ID.fullmatch(call_id):
                return f"Tool call id was {call_id} but must be a-z, A-Z, 0-9, with a length of 9."
        before = role
    if waiting:
        return "Not the same number of function calls and responses"
    if before not in ("user", "tool"):
        return f"Expected last role User or Tool for serving but got {before}"
    return None


class StrictModel(FakeModel):
    """Model behind a strict chat template; ``decide`` answers accepted requests.

    Attributes:
        refusals: the refused requests, and the reasons.
    """

    def __init__(self, decide: Callable[[dict[str, Any]], Reply] = demo_decide) -> None:
        super().__init__(decide)
        self.refusals: list[tuple[str, list[dict[str, Any]]]] = []

    def _answer(self, request: dict[str, Any]) -> Any:
        if wrong := refusal(request["messages"]):
            self.refusals.append((wrong, request["messages"]))
            self.script(http_error(400, message=wrong, code="invalid_request_error"))
        return super()._answer(request)
