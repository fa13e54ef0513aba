"""The demo model's answers: a pure function from a Chat Completions request to an answer."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from json import JSONDecoder
from textwrap import shorten
from typing import Any
from zlib import crc32

from pydantic_core import from_json, to_json

from bottega.llm.dialects.schemas import ANSWER_TOOL, BY_TEXT
from bottega.llm.dialects.wire import GO_ON

_REQUIRED_TOOL = re.compile(r"call the tool '([^']+)'")
_FOLDER = re.compile(r"\n\nYour own folder is /subagent/[\w-]+[^\n]*(?:\n|\Z)")
_ASYNC_HINT = "\n\nYou are coordinating sub-agents with dependencies.\n"
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
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_TIME = re.compile(r"what(?:'s| is)? (?:the )?(?:current )?(?:time|date|day)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_COUNT = re.compile(r",?\s*in (\d{1,3}) (?:parts?|tasks?)\b")
_FIRST_IS_ENOUGH = re.compile(r",?\s*the first answer is enough")
_DISPATCH, _SEND, _CANCEL = "dispatch_subagents", "send_to_subagent", "cancel_subagent"
_POLL, _AWAIT = "poll_subagent", "await_subagent"
_TASK_TOOLS = frozenset(("dispatch_subagent", _DISPATCH, _SEND, _CANCEL, _POLL, _AWAIT))
_POINTS = ("Input is checked.", "Equal input has equal results.", "Errors say what to mend.")
_ENDS = ("completed", "failed", "timeout", "cancelled")
_ASPECTS = (
    "market", "technology", "risks", "costs", "regulation", "history", "outlook", "competition",
    "customers", "supply", "energy", "environment", "workforce", "funding", "regions", "standards",
    "pricing", "logistics", "safety", "criticism",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoCall:
    """A tool call of the model. ``arguments`` are the decoded JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str = ""
    calls: tuple[DemoCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: dict[str, Any]

    @property
    def properties(self) -> dict[str, Any]:
        return self.parameters.get("properties") or {}

    @property
    def is_agent(self) -> bool:
        """True for the signature of a sub-agent: a ``query``, and at most a ``context``."""
        return "query" in self.properties and not self.properties.keys() - {"query", "context"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A parsed request.

    Attributes:
        own: the agent's system message, without the text about its sub-agents.
        system: the whole system message.
        context: the pieces of context before the query.
        asked: the current query, without the note that names this agent's part.
        part: the agent's part in that note; empty: there is no note.
        is_task: true if the query belongs to an asynchronous task.
        later: messages of users or of the service after the query.
        outcomes: (name of the tool, text) of each result after the query, oldest first.
        tools: tools that ``tool_choice`` allows.
    """

    own: str
    system: str
    context: tuple[re.Match[str], ...]
    asked: str
    part: str
    is_task: bool
    later: tuple[str, ...]
    outcomes: tuple[tuple[str, str], ...]
    tools: tuple[Tool, ...]


def decide(request: dict[str, Any]) -> Answer:
    """Answer the body of a Chat Completions request, in the form of its schema, if any."""
    conversation = read(request)
    schema, by_tool = _output_schema(request, conversation.system)
    answer = _answer(conversation)
    must_call = not by_tool and request.get("tool_choice") not in (None, "auto", "none")
    if must_call and not answer.calls:
        return Answer(calls=(_call(conversation.tools[0], conversation.asked),))
    if answer.calls or schema is None:
        return answer
    value = _value(schema, answer.text, schema)
    call = DemoCall(ANSWER_TOOL, value)
    return Answer(calls=(call,)) if by_tool else Answer(to_json(value).decode())


def _output_schema(request: dict[str, Any], system: str) -> tuple[Any, bool]:
    """Return the answer's schema, or ``None``, and whether a tool call carries the answer."""
    form = request.get("response_format") or {}
    if "json_schema" in form:
        return form["json_schema"].get("schema"), False
    functions = {item["function"]["name"]: item["function"] for item in request.get("tools") or ()}
    if ANSWER_TOOL in functions:
        return functions[ANSWER_TOOL]["parameters"], True
    _, found, text = system.rpartition(BY_TEXT)
    return (JSONDecoder().raw_decode(text)[0] if found else None), False


def _answer(conversation: Conversation) -> Answer:
    """Call the tools that the query names, dispatch tasks, or ask agents; otherwise answer."""
    if calls := _tool_calls(conversation):
        return Answer(calls=calls)
    names = {tool.name for tool in conversation.tools}
    if _DISPATCH in names and not conversation.is_task:
        return _next_step_of_tasks(conversation)
    if any(tool.is_agent for tool in conversation.tools):
        calls = _agent_calls(conversation)
        return Answer(calls=calls) if calls else Answer(_summary(conversation))
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
        own=system.split(_ASYNC_HINT)[0],
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
    """Return the index of the current query: a task's query, or else the user's last query."""
    texts = {i: text_of(m) for i, m in enumerate(messages) if m["role"] == "user"}
    tasks = [i for i, text in texts.items() if _FOLDER.search(text)]
    queries = [i for i, text in texts.items() if text != GO_ON and not _REQUIRED_TOOL.search(text)]
    return tasks[0] if tasks else max(queries or texts or [0])


def _outcomes(messages: Sequence[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = {call["id"]: call["function"]["name"] for call in calls}
    results = [message for message in messages if message["role"] == "tool"]
    return tuple((names.get(m.get("tool_call_id"), "tool"), text_of(m)) for m in results)


def _allowed_tools(request: dict[str, Any]) -> tuple[Tool, ...]:
    choice = request.get("tool_choice")
    functions = [item["function"] for item in request.get("tools") or () if choice != "none"]
    if isinstance(choice, dict):
        functions = [each for each in functions if each["name"] == choice["function"]["name"]]
    tools = tuple(Tool(each["name"], each.get("parameters") or {}) for each in functions)
    return tuple(tool for tool in tools if tool.name != ANSWER_TOOL)


def text_of(message: dict[str, Any]) -> str:
    """Return a message's text; if it has several parts, the joined texts of the parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def json_object(text: str) -> dict[str, Any]:
    """Decode a JSON object; return an empty object if the text is no JSON object."""
    try:
        found = from_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _tool_calls(conversation: Conversation) -> tuple[DemoCall, ...]:
    """Return calls of the plain tools: each tool once per request, or as often as required."""
    asked = conversation.asked
    called = Counter(name for name, _ in conversation.outcomes)
    required = Counter(name for text in conversation.later for name in _REQUIRED_TOOL.findall(text))
    return tuple(
        _call(tool, asked)
        for tool in conversation.tools
        if not tool.is_agent and tool.name not in _TASK_TOOLS
        if called[tool.name] < max(required[tool.name], _asks_for(asked, tool))
    )


def _asks_for(text: str, tool: Tool) -> bool:
    name = tool.name.lower()
    if re.search(rf"\b{re.escape(name).replace('_', '[_ ]')}\b", text.lower()):
        return True
    if "calc" in name:
        return arithmetic(text) is not None
    return ("time" in name or "date" in name) and _TIME.search(text) is not None


def _call(tool: Tool, text: str) -> DemoCall:
    """Make a call with a tool's required arguments, or with its only argument."""
    names = tool.parameters.get("required") or []
    if not names and len(tool.properties) == 1:
        names = list(tool.properties)
    if "calc" in tool.name.lower():
        text = arithmetic(text) or text
    values = {name: _value(tool.properties.get(name), text, tool.parameters) for name in names}
    return DemoCall(tool.name, values)


def arithmetic(text: str) -> str | None:
    """Find the first arithmetic expression, with ``**`` as power."""
    found = _ARITHMETIC.search(_DATE.sub(" ", text))
    return found[0].strip(" .\n").replace("^", "**") if found else None


def _value(schema: Any, text: str, root: dict[str, Any], depth: int = 0) -> Any:
    """Make a value of a schema's type, from the text if possible.

    Args:
        root: the whole schema, for local references.
    """
    if not isinstance(schema, dict) or depth > 16:
        return text
    target: Any = next((schema[n][0] for n in ("anyOf", "oneOf", "allOf") if schema.get(n)), None)
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
    if target is not None:
        return _value(target, text, root, depth + 1)
    if "const" in schema or "default" in schema:
        return schema.get("const", schema.get("default"))
    if choices := schema.get("enum"):
        return next((choice for choice in choices if str(choice) in text), choices[0])
    return _typed_value(schema, text, root, depth)


def _typed_value(schema: dict[str, Any], text: str, root: dict[str, Any], depth: int) -> Any:
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            properties = schema.get("properties") or {}
            names = schema.get("required") or (properties if depth < 8 else ())
            return {name: _value(properties.get(name), text, root, depth + 1) for name in names}
        case "array":
            item = _value(schema.get("items"), text, root, depth + 1)
            return [item] * schema.get("minItems", 0)
        case "integer" | "number" as kind:
            found = _NUMBER.search(text)
            number = max(float(found[0]) if found else 1.0, schema.get("minimum", float("-inf")))
            number = min(number, schema.get("maximum", number))
            return int(number) if kind == "integer" else number
        case "boolean":
            return False
        case "null":
            return None
    if schema.get("format") in ("date", "date-time"):
        return "2026-01-31" if schema["format"] == "date" else "2026-01-31T12:00:00Z"
    return text.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength")]


def _agent_calls(conversation: Conversation) -> tuple[DemoCall, ...]:
    """Return the next calls of agents; no call if each agent has answered, or has failed twice.

    Agents are called one at a time, in the recommended order, unless the query has "in parallel".
    """
    asked = conversation.asked
    tries = Counter(name for name, _ in conversation.outcomes)
    answered = {name for name, text in conversation.outcomes if not text.startswith("Error:")}
    due = [name for name in _order(conversation) if name not in answered and tries[name] < 2]
    if "in parallel" not in asked.lower():
        due = due[:1]
    return tuple(DemoCall(name, {"query": f"{asked} (your part: {name})"}) for name in due)


def _order(conversation: Conversation) -> list[str]:
    """Return the agents in the recommended order, followed by agents that the order omits.

    A coordinator that may choose the order uses the order of a recalled pattern. Without a pattern,
    the order depends only on the request.
    """
    names = [tool.name for tool in conversation.tools if tool.is_agent]
    if _FREE_ORDER in conversation.own:
        for steps in _PATTERN_STEPS.findall("\n".join(each[0] for each in conversation.context)):
            known = [step.strip().removeprefix("call ") for step in steps.split("→")]
            if sorted(known) == sorted(names):
                return known
        orders = list(permutations(sorted(names)))
        return list(orders[crc32(conversation.asked.encode()) % len(orders)])
    lines = _ORDER.findall(conversation.system)
    first = lines[-1].split(", ") if lines else []
    return sorted(names, key=lambda name: first.index(name) if name in first else len(first))


def _summary(conversation: Conversation) -> str:
    last = dict(conversation.outcomes)
    answers = {name: last[name] for name in _order(conversation) if name in last}
    good = sum(not text.startswith("Error:") for text in answers.values())
    lines = [f"{good} of {len(answers)} agents answered:", ""]
    lines += [f"- {name}: {' '.join(text.split())[:240]}" for name, text in answers.items()]
    if _FREE_ORDER in conversation.own:
        lines += ["", f"Asked: {' → '.join(last)}"]
    return "\n".join(lines)


def _next_step_of_tasks(conversation: Conversation) -> Answer:
    """Return the next action: dispatch, message, await one, cancel, poll, await all, or report."""
    done = Counter(name for name, _ in conversation.outcomes)
    waits = done[_AWAIT]
    enough = _FIRST_IS_ENOUGH.search(conversation.asked) is not None
    parts = _parts(conversation)
    tasks = _tasks(conversation, len(parts))
    ids = [task["task_id"] for task in tasks if "task_id" in task]
    running = [task["task_id"] for task in tasks if task["status"] not in (*_ENDS, "refused")]
    if not done[_DISPATCH]:
        call = DemoCall(_DISPATCH, {"tasks": list(parts.values())})
    elif ids and not done[_SEND]:
        message = "Say too what is not known yet."
        call = DemoCall(_SEND, {"task_id": ids[-1], "message": message})
    elif ids and not waits:
        call = DemoCall(_AWAIT, {"task_ids": ids, "mode": "any_success"})
    elif enough and running and not done[_CANCEL]:
        call = DemoCall(_CANCEL, {"task_ids": running})
    elif ids and not done[_POLL]:
        call = DemoCall(_POLL, {"task_ids": ids})
    elif ids and (waits < 2 or (running and waits < 5)):
        call = DemoCall(_AWAIT, {"task_ids": ids, "mode": "all"})
    else:
        return Answer(_report(_topic(conversation), dict(zip(parts, tasks, strict=True))))
    return Answer(calls=(call,))


def _topic(conversation: Conversation) -> str:
    return _COUNT.sub("", _FIRST_IS_ENOUGH.sub("", conversation.asked)).strip(" .")


def _parts(conversation: Conversation) -> dict[str, dict[str, Any]]:
    """Return the arguments of each task, by title.

    There is a task for each agent that the tool names, and further tasks up to the number in the
    query.
    """
    dispatch = next(tool for tool in conversation.tools if tool.name == "dispatch_subagent")
    schema = dispatch.properties.get("agent") or {}
    options = [schema, *schema.get("anyOf", ())]
    names = [name for each in options for name in each.get("enum") or [each.get("const")] if name]
    count = _COUNT.search(conversation.asked)
    total = max(1, int(count[1])) if count else len(names) or 3
    others = [aspect for aspect in _ASPECTS if aspect not in names][: max(0, total - len(names))]
    return {
        title: {
            "prompt": f"{_topic(conversation)} (your part: {title})",
            **({"agent": title} if title in names else {"metadata": {"title": title}}),
        }
        for title in (*names, *others)
    }


def _tasks(conversation: Conversation, count: int) -> list[dict[str, Any]]:
    """Return the last known state of each task, in the order of their dispatch."""
    results = [json_object(text) for name, text in conversation.outcomes if name in _TASK_TOOLS]
    states = [state for result in results for state in result.get("tasks") or ()]
    dispatched = {state["index"]: state for state in states if "index" in state}
    latest = {state["task_id"]: state for state in states if "task_id" in state}
    tasks = [dispatched.get(index, {}) for index in range(count)]
    return [{"status": "refused"} | task | latest.get(task.get("task_id"), {}) for task in tasks]


def _report(topic: str, tasks: dict[str, dict[str, Any]]) -> str:
    """Return Markdown with each task's result or error, and the number of each status."""
    sections = []
    for title, task in tasks.items():
        text = str(task.get("final_output") or task.get("result") or task.get("error") or "")
        text = re.sub(r"^(?=#+ )", "##", text[:2000], flags=re.MULTILINE)
        status = "" if task["status"] == "completed" else f"{task['status'].capitalize()}: "
        sections.append(f"## {title}\n\n{status}{text or '(nothing)'}")
    ends = Counter(str(task["status"]) for task in tasks.values())
    sums = ", ".join(f"{ends[status]} {status}" for status in dict.fromkeys((*_ENDS, *ends)))
    return "\n\n".join([f"# Report: {topic}", *sections, f"{len(tasks)} tasks: {sums}."])


def _own_text(conversation: Conversation) -> str:
    """Answer from the tools' results and the shared context; quote the context with its sources.

    The answer has numbered points if the system message asks for them, as in "requirements (R1, R2,
    …)". There is one point for each numbered line of the sources, or else for each of ``_POINTS``.
    """
    results = [
        f"{name} says: {text}".replace("says: Error:", "failed:", 1)
        for name, text in conversation.outcomes
    ]
    sources = [(each["source"], each["content"]) for each in conversation.context if each["source"]]
    lines = [f'{name} said: "{_shortened(text)}"' for name, text in sources]
    if numbering := _NUMBERING.search(conversation.own):
        cited = [(line, name) for name, text in sources for line in _NUMBERED_LINE.findall(text)]
        points = [f"covers {line} (from {name})." for line, name in cited]
        numbered = enumerate(points or _POINTS, 1)
        lines = [f"{numbering[1]}{number} {point}" for number, point in numbered]
    elif conversation.is_task and not sources:
        lines = [f"Most of what is known of the {conversation.part or 'subject'} is recent."]
    if conversation.is_task:
        lines += [f"Noted: {note}" for note in conversation.later]
    if results and not lines:
        return "\n".join(results)
    title = (conversation.part or "my answer").capitalize()
    head = f'{title} on "{_shortened(conversation.asked)}":'
    return "\n".join([head, *(lines or ["no other agent shared anything with me."]), *results])


def _shortened(text: str) -> str:
    return shorten(text, 80, placeholder="…")


def usage(answer: Answer, request: dict[str, Any]) -> dict[str, int]:
    """Estimate input and output tokens, at four characters each."""
    texts = [text_of(message) for message in request["messages"]]
    for message in request["messages"]:
        for call in message.get("tool_calls") or ():
            texts += [call["function"]["name"], call["function"]["arguments"]]
    tools = to_json(request["tools"]) if request.get("tools") else b""
    read = len("".join(texts)) + len(tools)
    written = len(answer.text)
    written += sum(len(call.name) + len(to_json(call.arguments)) for call in answer.calls)
    prompt, output = -(-read // 4), -(-written // 4)
    total = prompt + output
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total}
