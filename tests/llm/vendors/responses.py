"""OpenAI's Responses API without a store.

Rules and error texts: developers.openai.com/api/reference, "Create a model response", and
…/api/docs/guides/reasoning; fields from the types of its SDK 3.54.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import Request

from bottega.llm.demo_model.rules import Answer
from tests.fake_model import error_body
from tests.fake_responses import _problem, call, events, say, thought
from tests.llm.vendors.openai import strict_schema_problem
from tests.llm.vendors.vendor import Body, Message, Vendor, digest, response_format, unknown

_FIELDS = {
    "model", "input", "instructions", "include", "tools", "tool_choice", "parallel_tool_calls",
    "temperature", "top_p", "max_output_tokens", "max_tool_calls", "reasoning", "text", "store",
    "stream", "stream_options", "service_tier", "truncation", "metadata", "user",
    "prompt_cache_key", "safety_identifier", "top_logprobs",
}  # fmt: skip
_TOOL = {"type", "name", "description", "parameters", "strict"}


class Responses(Vendor):
    dialect = "responses"
    prefix = "/v1"
    path = "/v1/responses"

    def refusal(self, body: Body, request: Request) -> str | None:
        if not request.headers.get("authorization"):
            return "Missing bearer authentication in header"
        if extra := unknown(body, _FIELDS):
            return f"Unknown parameter: '{extra}'."
        if body["model"].startswith(("gpt-5", "o")) and body.get("temperature", 1) != 1:
            return "Unsupported parameter: 'temperature' is not supported with this model."
        for tool in body.get("tools") or ():
            if extra := unknown(tool, _TOOL):
                return f"Unknown parameter: 'tools[0].{extra}'."
        if "tools" in body and not body["tools"]:
            return "Invalid 'tools': empty array."
        if body.get("tool_choice") and not body.get("tools"):
            return "Tool choice 'required' must be specified with 'tools' parameter."
        form = (body.get("text") or {}).get("format") or {}
        if form.get("strict") and (wrong := strict_schema_problem(form["schema"])):
            return wrong
        return _problem(body) or _unsigned(body)

    def as_chat(self, body: Body, request: Request) -> Body:
        messages: list[Message] = []
        for item in body["input"]:
            _add(messages, item)
        tools = [
            {
                "type": "function",
                "function": {name: tool[name] for name in ("name", "description", "parameters")},
            }
            for tool in body.get("tools") or ()
        ]
        chat = {"model": body["model"], "messages": messages, "stream": True, "tools": tools}
        form = (body.get("text") or {}).get("format") or {}
        return chat | response_format(form.get("schema"))

    def events(self, answer: Answer, body: Body) -> Iterator[Mapping[str, Any]]:
        mark = digest(len(body["input"]), answer.text, [each.name for each in answer.calls])
        items = [thought(f"rs_{mark}", encrypted=digest(f"rs_{mark}"))]
        if answer.text:
            items.append(say(answer.text))
        items += [
            call(each.name, each.arguments, call_id=f"{mark}_{number}")
            for number, each in enumerate(answer.calls)
        ]
        usage = {"input_tokens": 22, "output_tokens": 20, "total_tokens": 42}
        details = {"input_tokens_details": {"cached_tokens": 7}}
        details["output_tokens_details"] = {"reasoning_tokens": 3}
        yield from events(*items, usage=usage | details)

    def encoded(self, event: Mapping[str, Any]) -> bytes:
        return b"event: %b\n" % event["type"].encode() + super().encoded(event)

    def error(self, message: str) -> bytes:
        return error_body(message)


def _unsigned(body: Body) -> str | None:
    for item in body["input"]:
        if item["type"] == "reasoning" and item["encrypted_content"] != digest(item["id"]):
            return f"The encrypted content of item {item['id']} could not be verified."
    return None


def _add(messages: list[Message], item: Body) -> None:
    """Add an item to the messages; an answer's items become one message."""
    match item["type"]:
        case "message":
            content = item["content"]
            if not isinstance(content, str):
                content = "\n\n".join(part.get("text", "") for part in content)
            messages.append({"role": item["role"], "content": content})
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            made = {"id": item["call_id"], "type": "function", "function": function}
            if messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(made)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        case "function_call_output":
            output = item["output"]
            if not isinstance(output, str):
                output = "\n".join(part.get("text", "") for part in output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
