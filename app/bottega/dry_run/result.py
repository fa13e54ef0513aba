"""A dry run, from its plan to its answer.

The team is built as for a real run, but its model is the demo model. Tools do nothing if they use
something outside the run, or if they ask people. A :class:`Note` records each task.
"""

import asyncio
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic_core import from_json, to_json

from bottega.agents import BaseAgent, Recall, ToolBase
from bottega.agents.messages import (
    AssistantMessage,
    AssistantResponse,
    StandardMessage,
    ToolCall,
    ToolMessage,
    Usage,
)
from bottega.agents.provider import LLMProvider, ModelOptions, OnDelta, ToolSchema
from bottega.agents.query import Invoke, Query, Recorder
from bottega.agents.shared_memory import AncestorRecall, RecallEmbedder
from bottega.definitions.graphs import to_graph
from bottega.definitions.teams import BuiltTeam, build_team
from bottega.dry_run import CPU_S, MOST_BYTES, NO_MEMORY
from bottega.errors import BottegaError
from bottega.graph.decisions import (
    Decision,
    EdgeDecided,
    GraphCourse,
    GraphRules,
    NodeEnd,
    NodeReady,
    NodeSkipped,
    name_of_node,
)
from bottega.graph.shared_memory import MemoryItem, SharedMemoryGraph
from bottega.llm.demo_model.rules import Answer, decide, text_of, usage
from bottega.llm.dialects.chat import chat
from bottega.llm.server import ServerSpec
from bottega.subagents.registry import SubagentRegistry
from bottega.subagents.tools import use_defined_subagents
from bottega.tools.builtin import NOT_CALLED, NotCalled, ToolDeps, harmless_tools
from bottega.tools.egress import Egress

PROMPT = "prompt"
"""Key of the sent messages in the metadata of a model's answer."""

_DEFAULTS = ModelOptions()


class DemoProvider:
    """Provider that sends each request to the demo model, and stores the sent messages."""

    def __init__(self) -> None:
        self._dialect = chat(ServerSpec(), "demo", "")
        self._calls = 0

    async def invoke(
        self,
        messages: Sequence[StandardMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        options: ModelOptions = _DEFAULTS,
        on_delta: OnDelta | None = None,
    ) -> AssistantMessage:
        """Answer a request. The request's parameters have no effect on the demo model."""
        output = self._dialect.output(options)
        plain = replace(options, params=None)
        request: dict[str, Any] = from_json(self._dialect.body(messages, tools, plain, output))
        message = self._message(decide(request), request)
        if output is not None:
            message = output.read(message, isinstance(messages[-1], ToolMessage))
        message.metadata[PROMPT] = request["messages"]
        return message

    def _message(self, answer: Answer, request: dict[str, Any]) -> AssistantMessage:
        calls = []
        for call in answer.calls:
            self._calls += 1
            calls.append(
                ToolCall(id=f"call_{self._calls}", name=call.name, arguments=call.arguments)
            )
        used = usage(answer, request)
        return AssistantMessage(
            content=answer.text,
            tool_calls=tuple(calls),
            usage=Usage(used["prompt_tokens"], used["completion_tokens"]),
            metadata={"finish_reason": "tool_calls" if calls else "stop"},
        )


LONGEST_TEXT = 20_000
"""Maximum number of characters of a text; recording cuts longer texts to save memory."""
MOST_TASKS = 1_000
MOST_CALLS = 5_000
"""Maximum number of model calls of all tasks."""


class TooMuchError(Exception):
    """The dry run reached a limit; the error's text names the limit."""


@dataclass(slots=True)
class Note:
    """Record of one task.

    Attributes:
        number: number of the task, from 1, in the order in which tasks start.
        parent: number of the task whose agent called this task; ``None``: a root task.
        received: answers of other agents, in the prompt's order.
        messages: the prompt of the last model call, and the model's answer.
    """

    number: int
    agent: str
    parent: int | None
    question: str
    received: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    model_calls: int = 0
    output: str = ""
    error: str | None = None


class Notes(Recorder):
    """A recorder that stores notes about all tasks in memory, within limits."""

    def __init__(self) -> None:
        self.tasks: list[Note] = []
        self.warnings: list[tuple[str, str]] = []
        self._of: dict[Query, Note] = {}
        self._calls = 0

    def query_started(self, query: Query) -> None:
        if len(self.tasks) >= MOST_TASKS:
            raise TooMuchError(f"the dry run ended at its limit of {MOST_TASKS} tasks")
        parent = None if query.parent is None else self._of[query.parent].number
        question = "\n".join(message.content for message in query.messages)
        name = query.agent.agent_id or query.agent.agent_name
        self._of[query] = self.add(name, question, parent)

    def add(self, agent: str, question: str, parent: int | None = None) -> Note:
        """Record the start of a task."""
        note = Note(len(self.tasks) + 1, agent, parent, shortened(question))
        self.tasks.append(note)
        return note

    def query_ended(self, query: Query, response: AssistantResponse) -> None:
        note = self._of[query]
        note.output, note.error = shortened(response.content), response.error

    async def model_call(self, query: Query, invoke: Invoke) -> AssistantMessage:
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise TooMuchError(f"the dry run ended at its limit of {MOST_CALLS} model calls")
        answer = await super().model_call(query, invoke)
        note = self._of[query]
        note.model_calls += 1
        note.messages = [_shown(message) for message in answer.metadata.pop(PROMPT)]
        calls = [_call(each.id, each.name, each.arguments) for each in answer.tool_calls]
        note.messages.append(_message("assistant", answer.content, calls))
        return answer

    def injected(self, query: Query, items: Sequence[MemoryItem]) -> None:
        self._receive(query, items, direct=True)

    def recalled(self, query: Query, items: Sequence[tuple[MemoryItem, float | None]]) -> None:
        self._receive(query, [item for item, _ in items], direct=False)

    def warning(self, query: Query, code: str, message: str) -> None:
        self.warnings.append((code, message))

    def _receive(self, query: Query, items: Sequence[MemoryItem], *, direct: bool) -> None:
        self._of[query].received += [
            {
                "source": item.source_id,
                "version": item.version,
                "policy": str(item.policy) if direct else None,
                "content": shortened(item.content),
            }
            for item in items
        ]


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        _call(each["id"], each["function"]["name"], from_json(each["function"]["arguments"]))
        for each in message.get("tool_calls") or ()
    ]
    said = text_of(dict(message))
    return _message(message["role"], said, calls, message.get("tool_call_id"))


def _call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "name": name, "arguments": dict(arguments)}


def _message(
    role: str, content: str, calls: Sequence[dict[str, Any]], answers: str | None = None
) -> dict[str, Any]:
    said = shortened(content)
    return {"role": role, "content": said, "tool_calls": calls, "tool_call_id": answers}


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text cut to ``longest`` characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


async def team_of(
    definitions: Mapping[str, Mapping[str, Any]],
    graph: SharedMemoryGraph,
    roots: Mapping[str, str],
    registry: SubagentRegistry,
    mcp_servers: Mapping[str, Mapping[str, Any]],
) -> BuiltTeam:
    """Build the agents of a dry run, without approvals.

    Args:
        mcp_servers: definitions of the MCP servers that the agents name.

    Raises:
        InvalidInputError: ``tool_outdated``.
    """
    provider, deps = DemoProvider(), ToolDeps(Egress())

    async def equip(
        name: str, definition: Mapping[str, Any]
    ) -> tuple[LLMProvider, Sequence[ToolBase]]:
        found: list[ToolBase] = []
        for tool in definition["tools"]:
            found += harmless_tools(tool, deps, mcp_servers)
        return provider, found

    asked_nobody = {name: {**each, "approval": None} for name, each in definitions.items()}
    built = await build_team(asked_nobody, graph, roots, equip, with_async=True)
    for member in built.members:
        agent, definition = member.agent, member.definition
        if member.children is not None:
            use_defined_subagents(agent, registry, member.children, definition["subagents"])
        if recall := definition["recall"]:
            everything = recall["mode"] == "ancestors"
            agent.recall = AncestorRecall() if everything else Recall(_embedder(), recall["k"])
    return built


def _embedder() -> RecallEmbedder:
    from bottega.llm.builtin_embedder import BuiltinEmbedder  # this import loads numpy

    return BuiltinEmbedder()


def tools_of(agent: BaseAgent) -> list[dict[str, Any]]:
    """Return an agent's tools in the API's form. ``called``: true if dry runs execute the tool."""
    return [
        {
            "name": tool.name,
            "description": tool.description,
            "called": not isinstance(tool, NotCalled),
            "agent": next((each.agent_id for each in tool.subagents), None),
        }
        for tool in agent.registered_tools
    ]


MOST_CHARACTERS = 4_000_000
"""Approximate maximum number of characters of an answer."""
_CUTS = (LONGEST_TEXT, 2_000, 200)
"""Lengths to which texts are cut; the first length that makes the answer short enough is used."""


async def dry_run(plan: Mapping[str, Any]) -> bytes:
    """Run a team with the demo model, and return the API's answer.

    Args:
        plan: ``graph`` (name), ``version``, ``agent`` (``None``: all agents of the graph), the
            ``content`` of the graph and its sub-graphs, the definitions of all ``agents`` by name,
            their ``versions``, and the ``input``.
    """
    graph, notes = to_graph(plan["content"]), Notes()
    course = GraphCourse(GraphRules.of(plan["content"]), {"input": plan["input"]})
    async with SubagentRegistry() as registry:
        trial = _Trial(notes, registry, plan)
        try:
            team = await trial.team(plan["content"], graph, plan["agent"])
        except BottegaError as refused:
            return _answer(plan, graph, None, notes, refused.detail, course, {})
        try:
            if plan["agent"]:
                error = await _query_agent(notes, team.roots[plan["agent"]], plan["input"])
            else:
                error = await trial.ask_all(plan["content"], graph, team, course)
        except TooMuchError as reason:
            notes.warnings.append(("dry_run_cut", str(reason)))
            error = str(reason)
    return _answer(plan, graph, team, notes, error, course, trial.ends)


async def _query_agent(notes: Notes, agent: BaseAgent, question: str) -> str | None:
    """Query an agent. Return the error's text, or ``None`` if the agent answered."""
    return (await agent.execute_query_async(question, recorder=notes)).error


@dataclass(slots=True)
class _Trial:
    """A dry run in progress.

    Attributes:
        ends: how each node of the graph ended, by the node's name.
    """

    notes: Notes
    registry: SubagentRegistry
    plan: Mapping[str, Any]
    ends: dict[str, NodeEnd] = field(default_factory=dict)

    async def team(
        self, content: Mapping[str, Any], graph: SharedMemoryGraph, agent: str | None
    ) -> BuiltTeam:
        """Build all agents of a graph, or only ``agent``."""
        rules = GraphRules.of(content)
        agents = {name: rule.agent for name, rule in rules.nodes.items() if rule.agent is not None}
        roots = {agent: agent} if agent else agents
        servers = self.plan.get("mcp_servers", {})
        team = await team_of(self.plan["agents"], graph, roots, self.registry, servers)
        if agent is None:
            team.let_route(rules)
        return team

    async def ask_all(
        self,
        content: Mapping[str, Any],
        graph: SharedMemoryGraph,
        team: BuiltTeam,
        course: GraphCourse,
    ) -> str | None:
        """Query the agents in the graph's order. Return the text of the first error, if any.

        A node that calls a tool or asks people is not executed: its answer is ``NOT_CALLED``. A
        node with ``for_each`` or ``loop`` runs once.
        """
        number = {name: index for index, name in enumerate(graph.get_topological_order())}
        nodes = {name_of_node(node): node for node in content["nodes"]}
        waiting: list[Decision] = course.begin()
        ends: dict[str, NodeEnd] = {}
        first: str | None = None
        while waiting:
            waiting.sort(key=lambda each: number[each.name] if isinstance(each, NodeReady) else -1)
            decision = waiting.pop(0)
            if isinstance(decision, EdgeDecided):
                if not decision.taken:
                    graph.close_edge(decision.source, decision.target)
            elif isinstance(decision, NodeSkipped):
                if course.rules.is_plain:
                    note = self.notes.add(decision.name, self.plan["input"])
                    note.error = f"skipped, because {decision.source} has no answer"
            else:
                name = decision.name
                end, error = await self._end_of(nodes[name], name, graph, team)
                ends[name] = end
                waiting += course.end(end)
                if error is not None and not course.rules.nodes[name].goes_on:
                    first = first or f"{name}: {error}"
        self.ends = ends
        return first

    async def _end_of(
        self, node: Mapping[str, Any], name: str, graph: SharedMemoryGraph, team: BuiltTeam
    ) -> tuple[NodeEnd, str | None]:
        """Query a node's agents. Return the node's end and the error's text."""
        if "for_each" in node or "loop" in node:
            text = f"'{name}' runs only once in a dry run: a run repeats it"
            self.notes.warnings.append(("dry_run_once", text))
        if (inner := node.get("definition")) is not None:
            return await self._end_of_graph(inner, name, graph)
        if name not in team.roots:
            return NodeEnd(name, output=NOT_CALLED), None
        answer = await team.roots[name].execute_query_async(self.plan["input"], recorder=self.notes)
        is_failed = answer.error is not None
        return NodeEnd(name, is_failed, answer.content, answer.output_json), answer.error

    async def _end_of_graph(
        self, content: Mapping[str, Any], name: str, outer: SharedMemoryGraph
    ) -> tuple[NodeEnd, str | None]:
        graph, rules = to_graph(content), GraphRules.of(content)
        graph.received = outer.pull_for(name)
        team = await self.team(content, graph, None)
        course = GraphCourse(rules, {"input": self.plan["input"]})
        error = await self.ask_all(content, graph, team, course)
        last = self.ends.get(rules.answering[0], NodeEnd(name, output=""))
        if error is None and last.output:
            await outer.publish(name, last.output)
        return NodeEnd(name, error is not None, last.output, last.output_json), error


def _answer(
    plan: Mapping[str, Any],
    graph: SharedMemoryGraph,
    team: BuiltTeam | None,
    notes: Notes,
    error: str | None,
    course: GraphCourse,
    ends: Mapping[str, NodeEnd],
) -> bytes:
    members = () if team is None else team.members
    tools = {member.agent.agent_id: tools_of(member.agent) for member in members}
    warnings = [*(() if team is None else team.warnings), *notes.warnings]
    answer = {
        "graph": plan["graph"],
        "version": plan["version"],
        "mode": "orchestrated" if plan["agent"] else "dag",
        "agent": plan["agent"],
        "levels": levels(graph),
        "nodes": [
            {"name": name, "status": status, "reason": course.reasons.get(name)}
            for name, status in course.statuses.items()
        ],
        "agents": [
            {"agent": name, "version": version, "tools": tools.get(name, [])}
            for name, version in plan["versions"].items()
        ],
        "output": _output(plan["agent"], course.rules, notes, ends),
        "error": error,
        "warnings": [{"code": code, "message": text} for code, text in warnings],
    }
    whole = {**answer, "tasks": [asdict(note) for note in notes.tasks]}
    longest = next((each for each in _CUTS if size_of(whole, each) <= MOST_CHARACTERS), _CUTS[-1])
    if size_of(whole, longest) > MOST_CHARACTERS:
        whole["tasks"] = [{**task, "messages": []} for task in whole["tasks"]]
    return to_json(cut(whole, longest) | {"longest_text": longest})


def _output(
    agent: str | None, rules: GraphRules, notes: Notes, ends: Mapping[str, NodeEnd]
) -> str | dict[str, str]:
    """Return the answer of ``agent`` or of the only answering node; or several answers, by node."""
    first: dict[str, Note] = {note.agent: note for note in notes.tasks if note.parent is None}
    if agent is not None:
        return first[agent].output if agent in first else ""
    ran = {
        name: end.output or ""
        for name in rules.answering
        if (end := ends.get(name)) is not None and not end.is_failed
    }
    return ran.get(rules.answering[0], "") if len(rules.answering) == 1 else ran


def levels(graph: SharedMemoryGraph) -> list[list[str]]:
    """Return the agents by level: first the agents that read no agent, then their readers. Pure."""
    level: dict[str, int] = {}
    found: list[list[str]] = []
    for name in graph.get_topological_order():
        level[name] = max((level[each] + 1 for each in graph.predecessors(name)), default=0)
        if level[name] == len(found):
            found.append([])
        found[level[name]].append(name)
    return found


def cut(value: Any, longest: int) -> Any:
    """Return a JSON value in which long texts are shortened."""
    if isinstance(value, str):
        return shortened(value, longest)
    if isinstance(value, dict):
        return {name: cut(each, longest) for name, each in value.items()}
    return [cut(each, longest) for each in value] if isinstance(value, list | tuple) else value


def size_of(value: Any, longest: int) -> int:
    """Return the approximate length of a value's JSON, with its texts cut to ``longest``."""
    if isinstance(value, str):
        return min(len(value), longest) + 2
    if isinstance(value, dict):
        return sum(len(name) + 4 + size_of(each, longest) for name, each in value.items())
    if isinstance(value, list | tuple):
        return sum(1 + size_of(each, longest) for each in value)
    return 4


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    try:
        answer = asyncio.run(dry_run(from_json(sys.stdin.buffer.read())))
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            raise
        sys.exit(NO_MEMORY)  # too little memory: a MemoryError, or PyO3's panic (not an Exception)
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    main()
