"""The prompt of a model call, derived from the run's log and pinned definitions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import select, tuple_

from bottega.agents.params import merged
from bottega.agents.shared_memory import awareness_message, shared_message
from bottega.db.pool import AsyncConnection
from bottega.db.tables import run_events
from bottega.definitions import store
from bottega.definitions.agents import overridden
from bottega.definitions.graphs import to_graph
from bottega.definitions.pinned import draft_of
from bottega.engine.replay import ANALYSIS, CONTEXT, MEMORY_PREFIXES, TaskReplay, replay_run
from bottega.errors import NotFoundError
from bottega.events.types import Event, EventType
from bottega.graph.publication import MemoryItem, PropagationPolicy
from bottega.runs import messages, read
from bottega.subagents.child import DEFAULT_INSTRUCTIONS
from bottega.tools.mcp import model_name, tools_in

MOST_CONTEXT = 100
"""Maximum number of messages before the conversation: question, shared context and memory."""
MOST_SAID = 200
"""Maximum number of the conversation's messages. The newest messages are read."""

Row = Mapping[str, Any]


async def prompt(
    connection: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    task_id: UUID | None,
    call: int | None,
) -> dict[str, Any]:
    """Return the prompt of a model call.

    Args:
        task_id: id of the agent's task; ``None``: the run's agent.
        call: number of the model call; ``None``: the last model call.

    Raises:
        NotFoundError: the run or task does not exist; ``no_model_call``: there is no such call.
    """
    run = await read.get(connection, tenant_id, run_id)

    async def page(types: Sequence[str], after: tuple[int, int] | None, limit: int) -> Any:
        return await messages.page(
            connection,
            tenant_id,
            run_id,
            task_id,
            types=types,
            after=after,
            descending=after is not None,
            limit=limit,
        )

    opening = await page(CONTEXT, None, MOST_CONTEXT)
    task = await _begun(connection, run, task_id)
    starts = _starts(run_id, call, task)
    first, last = starts[0], starts[-1]
    said = await page(messages.SAID, (first.seq, 0), MOST_SAID)
    agent, names = first.agent or "", run["pinned"]["agents"]
    definitions = await _definitions(connection, run, agent)
    changed = run["overrides"].get(agent) or {}
    definition = overridden(definitions.get(agent, {}), changed)
    own = _own(definition, None if task.dispatched is None else task.dispatched.data)
    own = "\n\n".join(filter(None, (own, changed.get("instructions"))))
    order = await _order(connection, run, _subagents(definition))
    return {
        "task_id": task_id,
        "agent": agent,
        "version": names.get(agent),
        **{name: last.data.get(name) for name in ("call", "attempt", "provider", "model")},
        "params": merged(definition.get("params"), changed.get("params")),
        "tools": [
            *_tools(definition, definitions, await _mcp_servers(connection, run, definition)),
            *map(_tool, changed.get("tools") or ()),
        ],
        "shortened": last.data.get("memory"),
        "messages": list(composed(own, order, opening, said, first.seq)),
        "more": opening.more or said.more,
    }


def composed(
    own: str, order: str | None, opening: Sequence[Row], said: Sequence[Row], before: int
) -> Iterator[dict[str, Any]]:
    """Yield the messages of a prompt, in order, each with its origin. Pure.

    Args:
        own: the agent's system message.
        order: the message that says in which order the agent must call its sub-agents.
        opening: the question, the shared context and the memory, in the log's order.
        said: the messages of the conversation, sorted from new to old.
        before: ``seq`` of the event that starts the model call.
    """
    yield {"role": "system", "origin": "agent", "content": own}
    if order is not None:
        yield {"role": "system", "origin": "graph", "content": order}
    given = [each for each in opening if each.get("source") and each["seq"] < before]
    given = [each for each in given if each["content"] and not each["source"].startswith(ANALYSIS)]
    for each in given:
        if not each["source"].startswith(MEMORY_PREFIXES):
            yield {**each, "origin": "context", "content": _fenced(each)}
    for each in given:
        if each["source"].startswith(MEMORY_PREFIXES):
            yield {**each, "origin": "memory"}
    asked = {each["seq"] for each in opening if not each.get("source")}
    for each in opening:
        if each["seq"] in asked:
            yield {**each, "origin": "input"}
    origins = {"assistant": "model", "tool": "tool", "user": "user"}
    for each in reversed(said):
        if each["seq"] not in asked:
            yield {**each, "origin": origins[each["role"]]}


def _fenced(row: Row) -> str:
    policy = PropagationPolicy.FINAL_RESPONSE_ONLY  # no effect on this content
    item = MemoryItem(row["source"], row["content"], row["at"], row["version"], policy)
    return shared_message(item).content


def _own(definition: Row, dispatched: Row | None) -> str:
    """Return an agent's system message. ``dispatched``: data of an asynchronous task's dispatch."""
    instructions = (dispatched or {}).get("instructions")
    own: str = definition.get("system_message") or ""
    if not definition:
        return instructions or DEFAULT_INSTRUCTIONS
    return f"{own}\n\n{instructions}" if instructions else own


def _subagents(definition: Row) -> list[str]:
    names: list[str] = (definition.get("subagents") or {}).get("names", [])
    return names


def _tools(
    definition: Row, definitions: Mapping[str, Row], mcp_servers: Mapping[str, Row]
) -> Iterator[dict[str, Any]]:
    for tool in definition.get("tools") or ():
        if tool["type"] != "mcp":
            yield _tool(tool)
            continue
        for each in tools_in(tool, mcp_servers[tool["server"]]):
            name = model_name(tool["server"], each["name"])
            yield _tool({**each, "name": name, "type": "mcp", "parameters": each["input_schema"]})
    for name in _subagents(definition):
        described = definitions.get(name, {}).get("description")
        yield {"name": name, "type": "agent", "description": described}


def _tool(tool: Row) -> dict[str, Any]:
    return {
        "name": tool["name"],
        "type": tool.get("type", "client"),
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
    }


async def _begun(connection: AsyncConnection, run: Row, task_id: UUID | None) -> TaskReplay:
    """Replay a task's dispatch and the starts of the task's model calls."""
    of_task = run_events.c.task_id.is_not_distinct_from(task_id)
    types = run_events.c.type.in_((EventType.LLM_STARTED, EventType.SUBAGENT_DISPATCHED))
    return replay_run(await messages.read_events(connection, run, of_task, types)).task(task_id)


def _starts(run_id: UUID, call: int | None, task: TaskReplay) -> Sequence[Event]:
    """Return the start events of a model call; ``None``: of the task's last model call."""
    number = max(task.calls, default=0) if call is None else call
    if number not in task.calls:
        which = "a model call" if call is None else f"the model call {call}"
        detail = f"the agent or task of run {run_id} has not begun {which}"
        raise NotFoundError(detail, code="no_model_call")
    return task.calls[number].starts


async def _definitions(connection: AsyncConnection, run: Row, agent: str) -> dict[str, Row]:
    pinned: Mapping[str, int] = run["pinned"]["agents"]
    definitions: dict[str, Row] = dict(draft_of(run["pinned"]))
    agent_names: Sequence[str] = [agent]
    for _ in ("agent", "sub-agents"):
        missing = [name for name in agent_names if name in pinned and name not in definitions]
        versions = store.AGENTS.versions.c
        query = select(versions.name, versions.definition).where(
            versions.tenant_id == run["tenant_id"],
            tuple_(versions.name, versions.version).in_([(each, pinned[each]) for each in missing]),
        )
        definitions |= {row.name: row.definition for row in await connection.execute(query)}
        agent_names = _subagents(definitions.get(agent, {}))
    return definitions


async def _mcp_servers(connection: AsyncConnection, run: Row, definition: Row) -> dict[str, Row]:
    """Return, by name, the pinned definitions of the MCP servers that an agent uses."""
    pinned: Mapping[str, int] = run["pinned"].get("mcp_servers") or {}
    tools = definition.get("tools") or ()
    wanted = {(each["server"], pinned[each["server"]]) for each in tools if each["type"] == "mcp"}
    if not wanted:
        return {}
    versions = store.MCP_SERVERS.versions.c
    query = select(versions.name, versions.definition).where(
        versions.tenant_id == run["tenant_id"],
        tuple_(versions.name, versions.version).in_(wanted),
    )
    return {row.name: row.definition for row in await connection.execute(query)}


async def _order(connection: AsyncConnection, run: Row, names: Sequence[str]) -> str | None:
    """Return the message that says in which order an agent must call its sub-agents."""
    pinned = run["pinned"]["graph"]
    if pinned is None or not names:
        return None
    versions = store.GRAPHS.versions.c
    query = select(versions.definition).where(
        versions.tenant_id == run["tenant_id"],
        versions.name == pinned["name"],
        versions.version == pinned["version"],
    )
    graph = to_graph((await connection.execute(query)).scalar_one())
    message = awareness_message(graph, {name: name for name in names if graph.has_node(name)})
    return message.content if message else None
