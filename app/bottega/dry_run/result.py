"""A dry run, from its plan to its answer."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic_core import to_json

from bottega.agents import BaseAgent, SharedMemoryGraph
from bottega.definitions.graphs import to_graph
from bottega.definitions.teams import BuiltTeam
from bottega.dry_run.notes import LONGEST_TEXT, Note, Notes, TooMuchError, shortened
from bottega.dry_run.team import team_of, tools_of
from bottega.errors import BottegaError
from bottega.subagents.registry import SubagentRegistry

MOST_CHARACTERS = 4_000_000
"""Limit of an answer, about."""
_CUTS = (LONGEST_TEXT, 2_000, 200)
"""Lengths of texts, from the longest that fits."""


async def dry_run(plan: Mapping[str, Any]) -> bytes:
    """Run a team on the demo model and return the API's answer.

    Args:
        plan: ``graph`` (name), ``version``, ``agent`` (``None``: all agents of the graph), the
            graph's ``content``, the ``agents`` that a run has, by name, with their ``versions``,
            and the ``input``.
    """
    graph = to_graph(plan["content"])
    roots = [plan["agent"]] if plan["agent"] else graph.get_topological_order()
    notes = Notes()
    async with SubagentRegistry() as registry:
        try:
            team = await team_of(
                plan["agents"], graph, roots, registry, plan.get("mcp_servers", {})
            )
        except BottegaError as refused:
            return _answer(plan, graph, None, notes, refused.detail)
        try:
            if plan["agent"]:
                error = await _ask(notes, team.roots[plan["agent"]], plan["input"])
            else:
                error = await _ask_all(notes, graph, team, plan["input"])
        except TooMuchError as reason:
            notes.warnings.append(("dry_run_cut", str(reason)))
            error = str(reason)
    return _answer(plan, graph, team, notes, error)


async def _ask(notes: Notes, agent: BaseAgent, question: str) -> str | None:
    """Ask an agent; return the text of its failure."""
    return (await agent.execute_query_async(question, recorder=notes)).error


async def _ask_all(
    notes: Notes, graph: SharedMemoryGraph, team: BuiltTeam, question: str
) -> str | None:
    """Ask all agents in the graph's order; return the text of the first failure."""
    failed: dict[str, str] = {}
    for name in graph.get_topological_order():
        missing = next((each for each in graph.predecessors(name) if each in failed), None)
        if missing is not None:
            note = notes.add(name, question)
            note.error = failed[name] = f"skipped, because {missing} has no answer"
        elif error := await _ask(notes, team.roots[name], question):
            failed[name] = error
    return next((f"{name}: {error}" for name, error in failed.items()), None)


def _answer(
    plan: Mapping[str, Any],
    graph: SharedMemoryGraph,
    team: BuiltTeam | None,
    notes: Notes,
    error: str | None,
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
        "agents": [
            {"agent": name, "version": version, "tools": tools.get(name, [])}
            for name, version in plan["versions"].items()
        ],
        "output": _output(plan["agent"], graph, notes),
        "error": error,
        "warnings": [{"code": code, "message": text} for code, text in warnings],
    }
    whole = {**answer, "tasks": [asdict(note) for note in notes.tasks]}
    longest = next((each for each in _CUTS if size_of(whole, each) <= MOST_CHARACTERS), _CUTS[-1])
    if size_of(whole, longest) > MOST_CHARACTERS:
        whole["tasks"] = [{**task, "messages": []} for task in whole["tasks"]]
    return to_json(cut(whole, longest) | {"longest_text": longest})


def _output(agent: str | None, graph: SharedMemoryGraph, notes: Notes) -> str | dict[str, str]:
    """Return the text of the root, or of the only sink, or the texts by sink."""
    first: dict[str, Note] = {note.agent: note for note in notes.tasks if note.parent is None}
    if agent is not None:
        return first[agent].output if agent in first else ""
    sinks = [name for name in graph.nodes if not graph.successors(name) and name in first]
    if len(sinks) == 1:
        return first[sinks[0]].output
    return {name: first[name].output for name in sinks}


def levels(graph: SharedMemoryGraph) -> list[list[str]]:
    """Return the agents by level: each is one below the deepest that it reads from. Pure."""
    level: dict[str, int] = {}
    found: list[list[str]] = []
    for name in graph.get_topological_order():
        level[name] = max((level[each] + 1 for each in graph.predecessors(name)), default=0)
        if level[name] == len(found):
            found.append([])
        found[level[name]].append(name)
    return found


def cut(value: Any, longest: int) -> Any:
    """Return a JSON value with its long texts shortened."""
    if isinstance(value, str):
        return shortened(value, longest)
    if isinstance(value, dict):
        return {name: cut(each, longest) for name, each in value.items()}
    return [cut(each, longest) for each in value] if isinstance(value, list | tuple) else value


def size_of(value: Any, longest: int) -> int:
    """Return the characters of a JSON value whose texts are shortened, about."""
    if isinstance(value, str):
        return min(len(value), longest) + 2
    if isinstance(value, dict):
        return sum(len(name) + 4 + size_of(each, longest) for name, each in value.items())
    if isinstance(value, list | tuple):
        return sum(1 + size_of(each, longest) for each in value)
    return 4
