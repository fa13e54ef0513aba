"""A run's working memory in the form of the API, derived from the run's log.

The intermediate results are the answers of the root agent's tools and sub-agents. In a DAG, the
intermediate results are the answers of the agents. An agent can recall each result by a reference.
Only the newest texts are read, so reading a long run costs no more than reading a short run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Row, and_, or_, select, text

from bottega.agents.messages import AssistantMessage, ToolCall, with_distinct_ids
from bottega.agents.parts import content_text, tokens_in
from bottega.db.pool import AsyncConnection
from bottega.db.tables import run_events
from bottega.definitions import store
from bottega.engine.replay import MEMORY_PREFIXES, replay_run
from bottega.events.types import EventType
from bottega.memory.prompts import RECALL
from bottega.memory.text.summaries import summary_of
from bottega.memory.working_memory import (
    SET_PLAN,
    Area,
    Budgets,
    Retrieved,
    VariableScope,
    WorkingMemory,
    plan_of,
)
from bottega.runs import messages, read

NEWEST = 50
"""Maximum number of results, the newest ones, that are listed with their texts."""
_LONGEST = 40_000  # maximum number of characters that are read of a result
_EXCERPT_TOKENS = 60

_e = run_events.c

_TEXT = """
    coalesce(
        CASE WHEN e.data ? 'answer_seq' OR e.data ? 'output'
             THEN answer_in(e.tenant_id, e.run_id, e.data) END,
             'Error: ' || (e.data #>> '{error,message}'),
             e.data ->> 'result', '')
"""
_OF_RUN = """
FROM run_events e
WHERE e.tenant_id = :tenant_id AND e.run_id = :run_id
"""
_ROOT = text(f"""
SELECT e.seq, e.type, CAST(e.data ->> 'call' AS integer) AS call, e.data ->> 'tool_call_id' AS id,
       e.data ->> 'name' AS name, octet_length({_TEXT}) AS size,
       jsonb_path_query_array(e.data, '$.message.tool_calls[*].id') AS ids
{_OF_RUN} AND e.task_id IS NULL AND e.type IN ('llm.completed', 'tool.completed', 'tool.failed')
ORDER BY e.step, e.seq
""")
_NODES = text(f"""
SELECT e.seq, e.type, 0 AS call, e.agent AS id, e.agent AS name, octet_length({_TEXT}) AS size
{_OF_RUN} AND e.depth = 0 AND e.type IN ('agent.completed', 'agent.failed')
ORDER BY e.step, e.seq
""")
_TEXTS = text(f"""
SELECT e.seq, left({_TEXT}, {_LONGEST}) AS text
{_OF_RUN} AND e.seq = ANY(CAST(:seqs AS bigint[]))
""")
_SPENT = text("""
SELECT count(*) AS model_calls, CAST(coalesce(sum(
    CAST(e.data #>> '{usage,input}' AS bigint)
  + CAST(e.data #>> '{usage,output}' AS bigint)), 0) AS bigint) AS tokens,
    CAST(coalesce(sum(CAST(e.data #>> '{usage,cost,amount}' AS numeric)), 0) AS float) AS cost
FROM run_events e
WHERE e.tenant_id = :tenant_id AND e.run_id = :run_id AND e.type = 'llm.completed'
""")


@dataclass(frozen=True, slots=True)
class Result:
    """An intermediate result. ``size``: in bytes. ``text``: first part of the text, if read."""

    seq: int
    name: str
    failed: bool
    size: int
    text: str | None = None


def in_order(results: Mapping[tuple[int, str], Result], calls: Mapping[int, Any]) -> list[Result]:
    """Return the results in the order in which the agent's history has them. Pure.

    Args:
        results: the results, by (model call, id of the tool call).
        calls: ids of the tool calls, in the model's order, by model call.
    """
    found: list[Result] = []
    for call, ids in sorted(calls.items()):
        made = tuple(ToolCall(id=each, name="") for each in ids or ())
        distinct = with_distinct_ids(AssistantMessage(tool_calls=made)).tool_calls
        found += [results[call, each.id] for each in distinct if (call, each.id) in results]
    return found


def fold_working(
    run: Mapping[str, Any],
    definition: Mapping[str, Any] | None,
    results: Sequence[Result],
    spent: Mapping[str, Any],
    tasks: Sequence[Mapping[str, Any]] = (),
    retrieved: Sequence[Retrieved] = (),
    prompt: Mapping[str, int] | None = None,
    plan: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the working memory of a run in the form of the API. Pure.

    Args:
        definition: definition of the root agent; ``None`` in a DAG.
        results: all results; only the newest results have texts.
        spent: the run's ``tokens``, ``model_calls`` and ``cost`` in US dollars.
        tasks: the newest tasks, sorted from new to old.
        retrieved: memory of earlier runs that this run's prompts contain.
        prompt: of a shortened last prompt: ``tokens``, messages ``shrunk`` and left out (``left``).
        plan: the root agent's plan, if the agent wrote a plan.
    """
    memory = _filled(run, definition, results, spent)
    at_work = next((each for each in tasks if each["started_at"] and not each["ended_at"]), None)
    at_work = None if run["ended_at"] else at_work
    agent = at_work["agent"] if at_work else run["agent"]
    memory.set("current_agent", agent, VariableScope.EXECUTION)
    memory.set("current_task", at_work and at_work["id"], VariableScope.EXECUTION)
    memory.load_task_context(plan=plan)
    memory.retrieve_from_episodic(retrieved)
    first = len(results) - NEWEST
    return {
        "run_id": run["id"],
        "limit": memory.budgets.total,
        "tokens": memory.tokens,
        "sections": [
            {
                "name": part,
                "budget": memory.budgets.of(part),
                "tokens": memory.tokens_of(part),
                "content": memory.compose(part).partition("\n")[2],  # without the title
            }
            for part in Area
        ],
        "variables": {scope.value: memory.variables(scope) for scope in VariableScope}
        | {VariableScope.INTERMEDIATE.value: _outputs(tasks)},
        "results": len(results),
        "references": [
            {
                "reference": f"m{number}",
                "name": each.name,
                "seq": each.seq,
                "tokens": tokens_in(each.size),
                "failed": each.failed,
                "excerpt": summary_of(each.text or "", _EXCERPT_TOKENS),
            }
            for number, each in enumerate(results, 1)
            if number > first
        ][::-1],
        "prompt": prompt,
    }


def _outputs(tasks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {
        str(each["id"]): f"Error: {error['message']}"
        if (error := each["error"])
        else each["output"]
        for each in tasks
        if each["error"] or each["output"] is not None
    }


def _filled(
    run: Mapping[str, Any],
    definition: Mapping[str, Any] | None,
    results: Sequence[Result],
    spent: Mapping[str, Any],
) -> WorkingMemory:
    memory = WorkingMemory(Budgets())
    system = definition["system_message"] if definition else ""
    names = ", ".join(_tool_names(definition)) if definition else ""
    memory.initialize(f"{system}\nTools: {names}" if names else system)
    memory.set("input", question_of(run["input"]))
    memory.load_task_context(
        goals=run["goals"],
        criteria=run["success_criteria"],
        constraints=run["constraints"],
    )
    for name in ("agent", "session_id"):
        if run[name] is not None:
            memory.set(name, run[name], VariableScope.GLOBAL)
    started = run["started_at"] and run["started_at"].isoformat()
    about = {"started_at": started, **spent, "results": len(results)}
    for name, value in about.items():
        memory.set(name, value, VariableScope.METADATA)
    unread = next((i for i, each in enumerate(results) if each.text is not None), len(results))
    memory.skip(unread)
    for result in results[unread:]:
        reference = memory.add_intermediate(result.name, result.text)
        state = {reference: f"{result.name}: {(result.text or '')[:200]}"} if result.failed else {}
        ended = [] if result.failed else [f"{reference} {result.name}"]
        memory.push_state(run["status"], completed=ended, failed=state)
    memory.push_state(run["status"])
    return memory


def _tool_names(definition: Mapping[str, Any]) -> list[str]:
    subagents: list[str] = (definition["subagents"] or {}).get("names", [])
    own = (tool["name"] for tool in definition["tools"] if tool["type"] != "mcp")
    return [*own, *subagents]


def question_of(asked: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(asked, str):
        return asked
    return content_text([each["content"] for each in asked if each["role"] == "user"][-1])


async def working_memory(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID
) -> dict[str, Any]:
    """Return a run's working memory; see :func:`fold_working`.

    Raises:
        NotFoundError: the tenant has no such run.
    """
    run = await read.get(connection, tenant_id, run_id)
    of_run = {"tenant_id": tenant_id, "run_id": run_id}
    spent = dict((await connection.execute(_SPENT, of_run)).mappings().one())
    tasks = await read.tasks_page(
        connection, tenant_id, run_id, status=None, after=None, descending=True, limit=NEWEST
    )
    rows = await connection.execute(_NODES if run["mode"] == "dag" else _ROOT, of_run)
    definition = None if run["mode"] == "dag" else await _definition(connection, tenant_id, run)
    results = _results(rows.all(), definition)
    newest = {"seqs": [result.seq for result in results[-NEWEST:]]}
    rows = await connection.execute(_TEXTS, of_run | newest)
    texts = {row.seq: row.text for row in rows}
    results = [replace(result, text=texts.get(result.seq)) for result in results]
    root = replay_run(await messages.read_events(connection, run, *_about_memory(run))).task(None)
    retrieved = [
        Retrieved(each["source"], text)
        for each in root.contexts()
        if (text := each.get("content")) and each["source"].startswith(MEMORY_PREFIXES)
    ]
    starts = [start for call in root.calls.values() for start in call.starts]
    prompt = starts[-1].data.get("memory") if starts else None
    plans = [call.started["arguments"] for call in root.tools.values() if call.started is not None]
    plan = plan_of(plans[-1]) if plans else None
    return fold_working(run, definition, results, spent, tasks, retrieved, prompt, plan or ())


def _about_memory(run: Mapping[str, Any]) -> tuple[ColumnElement[bool], ...]:
    """Return conditions that select recalled memory, the last plan and the last model call."""
    of_root = _e.tenant_id == run["tenant_id"], _e.run_id == run["id"], _e.task_id.is_(None)

    def last(*where: ColumnElement[bool]) -> ColumnElement[bool]:
        newest = select(_e.seq).where(*of_root, *where).order_by(_e.step.desc(), _e.seq.desc())
        return _e.seq == newest.limit(1).scalar_subquery()

    is_plan = _e.type == EventType.TOOL_STARTED, _e.data["name"].astext == SET_PLAN
    return _e.task_id.is_(None), or_(
        _e.type == EventType.CONTEXT_RECALLED,
        and_(*is_plan, last(*is_plan)),
        and_(_e.type == EventType.LLM_STARTED, last(_e.type == EventType.LLM_STARTED)),
    )


def _results(rows: Sequence[Row[Any]], definition: Mapping[str, Any] | None) -> list[Result]:
    """Return the results that a log's rows contain, sorted by the results' references."""
    own = definition is None or RECALL in _tool_names(definition)
    found: dict[tuple[int, str], Result] = {}
    calls: dict[int, list[str]] = {}
    for row in rows:
        if row.type == EventType.LLM_COMPLETED:
            calls[row.call] = row.ids
        elif own or row.name != RECALL:
            failed = row.type in (EventType.TOOL_FAILED, EventType.AGENT_FAILED)
            found[row.call, row.id] = Result(row.seq, row.name, failed, row.size)
    return list(found.values()) if definition is None else in_order(found, calls)


async def _definition(
    connection: AsyncConnection, tenant_id: UUID, run: Mapping[str, Any]
) -> Mapping[str, Any]:
    versions = store.AGENTS.versions
    query = select(versions.c.definition).where(
        versions.c.tenant_id == tenant_id,
        versions.c.name == run["agent"],
        versions.c.version == run["pinned"]["agents"][run["agent"]],
    )
    definition: Mapping[str, Any] = (await connection.execute(query)).scalar_one()
    return definition
