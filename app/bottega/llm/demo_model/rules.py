"""The demo model's answers: a pure function from a Chat Completions request to an answer."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from json import JSONDecoder
from textwrap import shorten
from typing import Any
from zlib import crc32

from pydantic_core import from_json, to_json

from bottega.agents.parts import tokens_in
from bottega.llm.dialects.schemas import BY_TEXT
from bottega.llm.dialects.wire import GO_ON

_REQUIRED_TOOL = re.compile(r"call the tool '[^']+'")
_FOLDER = re.compile(r"\n\nYour own folder is /subagent/[\w-]+[^\n]*(?:\n|\Z)")
_CONTEXT = re.compile(
    r"(?:Shared context from (?P<source>[^\n]+):|Working memory: [^\n]+)\n"
    r"<(?P<mark>(?:shared-context|working-memory)-[^>\s]+)>"
    r"(?P<content>.*?)</(?P=mark)>(?:\n\n|\Z)",
    re.DOTALL,
)
_PART = re.compile(r" \(your part: ([^)]*)\)\Z")
_ORDER = re.compile(r"^Recommended execution order: (.+)$", re.MULTILINE)
_FREE_ORDER = "in the order that you think is best"
_PATTERN_STEPS = re.compile(r"^\s*Steps: (.+)$", re.MULTILINE)
_NUMBERING = re.compile(r"\b([A-Z])1, \1\d")
_NUMBERED_LINE = re.compile(r"^([A-Z]\d+) ", re.MULTILINE)
_ARITHMETIC = re.compile(r"(?<![\w.])[-(\s]*\d[\d\s.()]*(?:(?:\*\*|[-+*/^%])[-\s.(]*\d[\d\s.()]*)+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COUNT = re.compile(r",?\s*in (\d{1,3}) (?:parts?|tasks?)\b")
_FIRST_IS_ENOUGH = re.compile(r",?\s*the first answer is enough")
_DISPATCH, _SEND, _CANCEL = "dispatch_subagents", "send_to_subagent", "cancel_subagent"
_POLL, _AWAIT = "poll_subagent", "await_subagent"
_TASK_TOOLS = frozenset(("dispatch_subagent", _DISPATCH, _SEND, _CANCEL, _POLL, _AWAIT))
_shortened = partial(shorten, width=80, placeholder="…")
_POINTS = ("Input is checked.", "Equal input has equal results.", "Errors say what to mend.")
_ASPECTS = (
    "market", "technology", "risks", "costs", "regulation", "history", "outlook", "competition",
    "customers", "supply", "energy", "environment", "workforce", "funding", "regions", "standards",
    "pricing", "logistics", "safety", "criticism",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoCall:
    """A tool call of the model. ``arguments`` is the decoded JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str = ""
    calls: tuple[DemoCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A parsed request.

    Attributes:
        system: the system messages.
        context: the pieces of context before the query.
        asked: the current query, without the note ``(your part: …)`` at its end.
        part: the agent's part of the task, from the note; empty: the query has no note.
        is_task: true if the query belongs to an asynchronous task.
        later: messages that users or the service sent after the query.
        outcomes: (name of the tool, text) of each result after the query, oldest first.
        tools: parameters of the tools that ``tool_choice`` allows, by name.
    """

    system: str
    context: tuple[re.Match[str], ...]
    asked: str
    part: str
    is_task: bool
    later: tuple[str, ...]
    outcomes: tuple[tuple[str, str], ...]
    tools: dict[str, dict[str, Any]]


def decide(request: dict[str, Any]) -> Answer:
    """Answer a Chat Completions request. If it has a schema, the answer is JSON of this schema."""
    conversation = read(request)
    answer = _answer(conversation)
    if answer.calls:
        return answer
    if request.get("tool_choice") not in (None, "auto", "none"):
        name = next(iter(conversation.tools))
        return Answer(calls=(_call(name, conversation),))
    form = request.get("response_format") or {}
    schema = form.get("json_schema", {}).get("schema")
    _, instruction, text = conversation.system.rpartition(BY_TEXT)
    if instruction:
        schema, _ = JSONDecoder().raw_decode(text)
    if schema is None:
        return answer
    return Answer(to_json(_value(schema, answer.text, schema)).decode())


def _answer(conversation: Conversation) -> Answer:
    """Call the tools that the query requests, dispatch tasks, call agents, or answer."""
    if calls := _tool_calls(conversation):
        return Answer(calls=calls)
    if _DISPATCH in conversation.tools and not conversation.is_task:
        return _next_step_of_tasks(conversation)
    if order := _order(conversation):
        return _ask_agents(conversation, order)
    return Answer(_own_text(conversation))


def read(request: dict[str, Any]) -> Conversation:
    messages: list[dict[str, Any]] = request["messages"]
    system = "\n\n".join(text_of(m) for m in messages if m["role"] in ("system", "developer"))
    start = _query_index(messages)
    query = text_of(messages[start])
    context: list[re.Match[str]] = []
    while piece := _CONTEXT.match(query):
        context.append(piece)
        query = query[piece.end() :]
    asked, *notes = _FOLDER.split(query, maxsplit=1)
    part = _PART.search(asked)
    later = [text_of(m) for m in messages[start + 1 :] if m["role"] == "user"]
    return Conversation(
        system=system,
        context=tuple(context),
        asked=asked[: part.start()] if part else asked,
        part=part[1] if part else "",
        is_task=bool(notes),
        later=tuple(text.strip() for text in (*notes, *later) if text.strip()),
        outcomes=_outcomes(messages[start:]),
        tools=_allowed_tools(request),
    )


def _query_index(messages: Sequence[dict[str, Any]]) -> int:
    """Return the index of the current query: a task's query, or the user's last query."""
    texts = {i: text_of(m) for i, m in enumerate(messages) if m["role"] == "user"}
    tasks = [i for i, text in texts.items() if _FOLDER.search(text)]
    queries = [i for i, text in texts.items() if text != GO_ON and not _REQUIRED_TOOL.search(text)]
    return tasks[0] if tasks else max(queries or texts or [0])


def _outcomes(messages: Sequence[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {call["id"]: call["function"]["name"] for call in calls}
    results = [message for message in messages if message["role"] == "tool"]
    return tuple((names.get(m.get("tool_call_id"), "tool"), text_of(m)) for m in results)


def _allowed_tools(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    choice = request.get("tool_choice")
    functions = [item["function"] for item in request.get("tools") or () if choice != "none"]
    if isinstance(choice, dict):
        functions = [each for each in functions if each["name"] == choice["function"]["name"]]
    return {each["name"]: each.get("parameters") or {} for each in functions}


def text_of(message: dict[str, Any]) -> str:
    """Return a message's text. If the message has several parts, join the texts of the parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _tool_calls(conversation: Conversation) -> tuple[DemoCall, ...]:
    """Return a call of each tool with fewer results than messages that name it. Omit agents."""
    texts = (conversation.asked, *conversation.later)
    called = Counter(name for name, _ in conversation.outcomes)
    return tuple(
        _call(name, conversation)
        for name, parameters in conversation.tools.items()
        if not _is_agent(parameters) and name not in _TASK_TOOLS
        if called[name] < sum(_asks_for(text, name) for text in texts)
    )


def _is_agent(parameters: dict[str, Any]) -> bool:
    names = set(parameters.get("properties") or ())
    return "query" in names and names <= {"query", "context"}


def _asks_for(text: str, tool: str) -> bool:
    name = re.escape(tool.lower()).replace("_", "[_ ]")
    is_named = re.search(rf"\b{name}\b", text.lower()) is not None
    return is_named or ("calc" in name and _ARITHMETIC.search(text) is not None)


def _call(name: str, conversation: Conversation) -> DemoCall:
    parameters, text = conversation.tools[name], conversation.asked
    properties = parameters.get("properties") or {}
    names = parameters.get("required") or (properties if len(properties) == 1 else ())
    if "calc" in name.lower() and (expression := _ARITHMETIC.search(text)):
        text = expression[0].strip(" .\n").replace("^", "**")
    return DemoCall(name, {each: _value(properties.get(each), text, parameters) for each in names})


def _value(schema: Any, text: str, root: dict[str, Any], depth: int = 0) -> Any:
    """Make a value of a schema's type, from the text if possible.

    Args:
        root: the whole schema, to which local references refer.
    """
    if not isinstance(schema, dict) or depth > 16:
        return text
    target = next((schema[n][0] for n in ("anyOf", "oneOf", "allOf") if schema.get(n)), None)
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
    if target is not None:
        return _value(target, text, root, depth + 1)
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return next((choice for choice in choices if str(choice) in text), choices[0])
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        names = schema.get("required") or (properties if depth < 8 else ())
        return {name: _value(properties.get(name), text, root, depth + 1) for name in names}
    if kind == "array":
        return [_value(schema.get("items"), text, root, depth + 1)] * schema.get("minItems", 0)
    if kind in ("integer", "number"):
        found = _NUMBER.search(text)
        number = max(float(found[0]) if found else 1.0, schema.get("minimum", float("-inf")))
        number = min(number, schema.get("maximum", number))
        return int(number) if kind == "integer" else number
    if kind == "string":
        return text.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]
    return False if kind == "boolean" else None


def _order(conversation: Conversation) -> list[str]:
    """Return the agents in the order of the system message, followed by all other agents.

    If the system message leaves the order open, a pattern in the context determines the order.
    Without a pattern, the order depends only on the query.
    """
    tools = conversation.tools
    names = [name for name, parameters in tools.items() if _is_agent(parameters)]
    if _FREE_ORDER in conversation.system:
        for steps in _PATTERN_STEPS.findall("\n".join(each[0] for each in conversation.context)):
            known = [step.strip().removeprefix("call ") for step in steps.split("→")]
            if sorted(known) == sorted(names):
                return known
        return sorted(names, key=lambda name: crc32(f"{name} {conversation.asked}".encode()))
    lines = _ORDER.findall(conversation.system)
    first = lines[-1].split(", ") if lines else []
    return sorted(names, key=lambda name: first.index(name) if name in first else len(first))


def _ask_agents(conversation: Conversation, order: Sequence[str]) -> Answer:
    """Call the next agent. At the end, sum up."""
    answers = dict(conversation.outcomes)
    if due := next((name for name in order if name not in answers), None):
        query = f"{conversation.asked} (your part: {due})"
        return Answer(calls=(DemoCall(due, {"query": query}),))
    good = sum(not answers[name].startswith("Error:") for name in order)
    lines = [f"{good} of {len(order)} agents answered:", ""]
    lines += [f"- {name}: {' '.join(answers[name].split())[:240]}" for name in order]
    if _FREE_ORDER in conversation.system:
        lines += ["", f"Asked: {' → '.join(order)}"]
    return Answer("\n".join(lines))


def _next_step_of_tasks(conversation: Conversation) -> Answer:
    topic = _COUNT.sub("", _FIRST_IS_ENOUGH.sub("", conversation.asked)).strip(" .")
    parts = _parts(conversation)
    texts = [text for name, text in conversation.outcomes if name in _TASK_TOOLS]
    if (step := len(texts)) == 0:
        tasks = [
            {"prompt": f"{topic} (your part: {title})", **part} for title, part in parts.items()
        ]
        return Answer(calls=(DemoCall(_DISPATCH, {"tasks": tasks}),))
    states = _states([from_json(text) for text in texts if text.startswith("{")], len(parts))
    ids = [state["task_id"] for state in states if "task_id" in state]
    if not ids or step > 4:
        return Answer(_report(topic, dict(zip(parts, states, strict=True))))
    is_enough = _FIRST_IS_ENOUGH.search(conversation.asked)
    steps = [
        DemoCall(_SEND, {"task_id": ids[-1], "message": "Say too what is not known yet."}),
        DemoCall(_AWAIT, {"task_ids": ids, "mode": "any_success"}),
        DemoCall(_CANCEL if is_enough else _POLL, {"task_ids": ids}),
        DemoCall(_AWAIT, {"task_ids": ids, "mode": "all"}),
    ]
    return Answer(calls=(steps[step - 1],))


def _parts(conversation: Conversation) -> dict[str, dict[str, Any]]:
    """Return, by title, the arguments of the tasks to dispatch, without the prompts.

    Each agent that the tool accepts gets a task. Further tasks are about aspects of the topic.
    """
    names = conversation.tools["dispatch_subagent"]["properties"].get("agent", {}).get("enum", ())
    count = _COUNT.search(conversation.asked)
    total = max(1, int(count[1])) if count else len(names) or 3
    titles = list(dict.fromkeys((*names, *_ASPECTS)))[: max(total, len(names))]
    return {
        title: {"agent": title} if title in names else {"metadata": {"title": title}}
        for title in titles
    }


def _states(results: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the last known status of each task, in the order of dispatch."""
    known = [state for result in results for state in result.get("tasks") or ()]
    latest = {state["task_id"]: state for state in known[count:]}
    dispatched = known[:count] or [{}] * count
    return [
        {"status": "refused"} | each | latest.get(each.get("task_id"), {}) for each in dispatched
    ]


def _report(topic: str, states: dict[str, dict[str, Any]]) -> str:
    """Return Markdown with each task's result or error, and the number of tasks per status."""
    sections = []
    for title, state in states.items():
        text = str(state.get("final_output") or state.get("result") or state.get("error") or "")
        status = "" if state["status"] == "completed" else f"{state['status'].capitalize()}: "
        sections.append(f"## {title}\n\n{status}{text[:2000] or '(nothing)'}")
    ends = Counter(str(state["status"]) for state in states.values())
    sums = ", ".join(f"{number} {status}" for status, number in ends.items())
    return "\n\n".join([f"# Report: {topic}", *sections, f"{len(states)} tasks: {sums}."])


def _own_text(conversation: Conversation) -> str:
    """Write an answer from the tools' results and the shared context. Name the context's sources.

    The answer has numbered points if the system message requests them, as in "requirements (R1, R2,
    …)". Each numbered line of the sources becomes a point. Without numbered lines, ``_POINTS`` are
    the points.
    """
    results = [f"{name} says: {text}" for name, text in conversation.outcomes]
    sources = [(each["source"], each["content"]) for each in conversation.context if each["source"]]
    lines = [f'{name} said: "{_shortened(text)}"' for name, text in sources]
    if numbering := _NUMBERING.search(conversation.system):
        cited = [(line, name) for name, text in sources for line in _NUMBERED_LINE.findall(text)]
        points = [f"covers {line} (from {name})." for line, name in cited]
        numbered = enumerate(points or _POINTS, 1)
        lines = [f"{numbering[1]}{number} {point}" for number, point in numbered]
    if conversation.is_task:
        lines += [f"Noted: {note}" for note in conversation.later]
    if results and not lines:
        return "\n".join(results)
    title = (conversation.part or "my answer").capitalize()
    head = f'{title} on "{_shortened(conversation.asked)}":'
    return "\n".join([head, *(lines or ["no other agent shared anything with me."]), *results])


def usage(answer: Answer, request: dict[str, Any]) -> dict[str, int]:
    """Estimate input and output tokens. Only texts of messages count as input."""
    prompt = tokens_in(sum(len(text_of(message)) for message in request["messages"]))
    output = tokens_in(len(answer.text) + sum(len(to_json(call)) for call in answer.calls))
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
