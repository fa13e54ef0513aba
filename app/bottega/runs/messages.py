"""A run's conversations as lists of messages, derived from the run's log.

The log has the input of a run or task, context from other agents, the model's answers, and tool
results. The log does not contain the agent's system message, because the agent's definition has it.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from pydantic_core import from_json
from sqlalchemy import ColumnElement, Select, and_, case, or_, select, true

from bottega.agents.messages import AssistantMessage, ToolMessage, ToolResult, demands_message
from bottega.agents.parts import Part, text_of
from bottega.agents.query import task_id_at
from bottega.agents.subagent import question_of
from bottega.db.pages import PAGE_BYTES, PageItems, fetch_page
from bottega.db.pool import AsyncConnection
from bottega.db.tables import run_events, tasks
from bottega.engine.replay import CONTEXT, TOOL_ENDS, RunReplay, replay_run, result_of
from bottega.errors import NotFoundError
from bottega.events.data import (
    ContentPart,
    ContextRecalledData,
    MessageDeliveredData,
    SubagentDispatchedData,
    shared_metadata,
)
from bottega.events.log import STEP_EVENTS
from bottega.events.types import FINAL_EVENT, Event, EventType
from bottega.llm.dialects.wire import tool_outputs
from bottega.runs import read
from bottega.subagents.child import first_message

SAID = (
    EventType.LLM_COMPLETED,
    *TOOL_ENDS,
    EventType.MESSAGE_DELIVERED,
)
"""Types of events that contain a message of the model, a tool or a user."""
_ENDS = (EventType.AGENT_COMPLETED, EventType.AGENT_FAILED, *FINAL_EVENT.values())
_TOLD = (*SAID, *CONTEXT)


def message_of(
    event: Event, answer: AssistantMessage | None, replay: RunReplay, heard: str | None = None
) -> dict[str, Any]:
    """Return a model's answer, a tool's result, context, or a user's text as a message. Pure.

    Args:
        answer: the model's answer, if the event has one.
        heard: the text that the model read as the tool's result, if the event has a different text.
    """
    if answer is not None:
        calls = [call.model_dump() for call in answer.tool_calls]
        usage = event.data["usage"]
        return {
            "role": "assistant",
            "content": answer.content,
            "tool_calls": calls,
            "usage": usage,
        }
    at = event.data.get("answer_seq")
    if event.type in TOOL_ENDS:
        result = result_of(event.data, replay.texts.get(at or 0))
        tool_message = _read_as(result, heard)
        content = {"content": tool_outputs(tool_message)[0].text, "parts": _parts_of(tool_message)}
        about = {"tool_call_id": result.tool_call_id, "name": result.tool_name}
        return {"role": "tool", "status": result.status, **content, **about}
    if event.type in CONTEXT:
        context: ContextRecalledData = event.data
        text = context.get("content") if at is None else replay.texts.get(at)
        source = {"source": context["source"], "version": context["version"]}
        return {"role": "system", "content": text, **source}
    delivered: MessageDeliveredData = event.data
    message = _shown({"content": delivered["content"]})
    return {**message, "role": "user", "message_id": delivered["message_id"]}


async def page(
    connection: AsyncConnection,
    tenant_id: UUID,
    run_id: UUID,
    task_id: UUID | None,
    *,
    types: Sequence[str] = _TOLD,
    after: tuple[int, int] | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List messages of a task or (without ``task_id``) of the run's agent, in the log's order.

    Args:
        types: event types whose messages are listed. The question to the agent is always listed.
        after: (``seq``, ``part``) of the last message of the previous page.

    Raises:
        NotFoundError: the run or task does not exist.
    """
    run = await read.get(connection, tenant_id, run_id)
    parent: UUID | None = None
    if task_id is not None:
        parent = await _parent_of(connection, tenant_id, run_id, task_id)
    first = EventType.RUN_QUEUED if task_id is None else EventType.AGENT_STARTED
    of_task = run_events.c.task_id.is_not_distinct_from(task_id)
    asked_by_agent = task_id is not None and (parent is not None or run["mode"] == "orchestrated")

    async def question() -> Sequence[Mapping[str, Any]]:
        if asked_by_agent and task_id is not None:
            return await _asked(connection, run, parent, task_id)
        return _input(run)

    return await _page(
        connection,
        run,
        of_task,
        first,
        question,
        types,
        after=after,
        descending=descending,
        limit=limit,
    )


async def page_of_turn(
    connection: AsyncConnection,
    run: Mapping[str, Any],
    agent: str | None,
    *,
    after: tuple[int, int] | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List messages of a run's agent or of the agents in the run's graph, with the agents' names.

    System messages are not listed.

    Args:
        run: the run's row.
        agent: list only messages of this agent; ``None``: list the messages of all agents.
        after: as for :func:`page`.
    """
    which: ColumnElement[bool]
    if run["mode"] == "orchestrated":
        which = run_events.c.task_id.is_(None)
    else:
        which = run_events.c.parent_task_id.is_(None)
        if agent is not None:
            which = and_(which, or_(run_events.c.task_id.is_(None), run_events.c.agent == agent))

    async def question() -> Sequence[Mapping[str, Any]]:
        messages_in = (message for message in _input(run) if message["role"] != "system")
        return [{**message, "agent": run["agent"] or agent} for message in messages_in]

    first, types = EventType.RUN_QUEUED, SAID
    return await _page(
        connection,
        run,
        which,
        first,
        question,
        types,
        after=after,
        descending=descending,
        limit=limit,
    )


async def _page(
    connection: AsyncConnection,
    run: Mapping[str, Any],
    which: ColumnElement[bool],
    first: EventType,
    asked: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
    types: Sequence[str],
    *,
    after: tuple[int, int] | None,
    descending: bool,
    limit: int,
) -> PageItems[dict[str, Any]]:
    """List the messages of the run's events that meet ``which`` and have one of ``types``.

    Args:
        first: event type; the question is listed before the first event of this type.
        asked: function that returns the question's messages.
    """
    query = _conversation(run, which, (first, *types))
    places = (run_events.c.step, run_events.c.seq)
    query = query.order_by(*(place.desc() if descending else place for place in places))
    items: list[dict[str, Any]] = []
    more = True
    while more and not items:  # the rows may have no message after ``after``
        rows = await fetch_page(connection, query.where(_beyond(after, descending)), limit + 1)
        begins = any(row["type"] == first for row in rows)
        question = await asked() if begins else ()
        heard = {row["seq"]: row["heard"] for row in rows}
        for message in _listed(run["id"], rows, first, question, heard, descending=descending):
            place = (message["seq"], message["part"])
            if after is None or (place < after if descending else place > after):
                items.append(message)
        more = rows.more
        if rows:
            after = (rows[-1]["seq"], -1 if descending else _LAST)
    return fitting(items, limit, more=more)


def _listed(
    run_id: UUID,
    rows: Sequence[Mapping[str, Any]],
    first: EventType,
    question: Sequence[Mapping[str, Any]],
    heard: Mapping[int, str | None],
    *,
    descending: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the messages of the events in ``rows``, each with its position and agent."""
    events = events_of_rows(run_id, rows)
    references = zip(rows, events, strict=True)
    texts = {event.data.get("answer_seq") or 0: row["output"] for row, event in references}
    replay = replay_run(sorted(events, key=lambda event: event.seq), texts=texts)
    answers = {event.seq: each for task in replay.tasks.values() for event, each in task.said}
    for event in events:
        if event.type == first:
            messages = [dict(message) for message in question]
        else:
            messages = [message_of(event, answers[event.seq], replay, heard[event.seq])]
        about = {"seq": event.seq, "at": event.at}
        parts = [
            {"agent": event.agent, **message, **about, "part": part}
            for part, message in enumerate(messages)
        ]
        yield from reversed(parts) if descending else parts


def events_of_rows(run_id: UUID, rows: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Build events from rows. The column ``body`` keeps the order of keys; ``data`` does not."""
    return [
        Event(
            run_id=run_id,
            seq=row["seq"],
            type=row["type"],
            at=row["at"],
            task_id=row["task_id"],
            parent_task_id=None,
            agent=row["agent"],
            data=from_json(row["body"]),
        )
        for row in rows
    ]


async def read_events(
    connection: AsyncConnection, run: Mapping[str, Any], *where: ColumnElement[bool]
) -> list[Event]:
    events = run_events.c
    query = select(events.seq, events.type, events.at, events.task_id, events.agent, events.body)
    query = query.where(events.tenant_id == run["tenant_id"], events.run_id == run["id"], *where)
    rows = await connection.execute(query.order_by(events.step, events.seq))
    return events_of_rows(run["id"], [dict(row) for row in rows.mappings()])


_LAST = 2**31 - 1


def _beyond(after: tuple[int, int] | None, descending: bool) -> ColumnElement[bool]:
    if after is None:
        return true()
    seq, part = after
    if descending:
        last = seq - 1 if part == -1 else seq
        step = run_events.c.step < last + STEP_EVENTS
        return and_(run_events.c.seq <= last, step)
    first = seq + 1 if part == _LAST else seq
    return and_(run_events.c.seq >= first, run_events.c.step >= first)


def fitting(items: list[dict[str, Any]], limit: int, *, more: bool) -> PageItems[dict[str, Any]]:
    """Return the first messages that fit on a page. One input may have more messages than fit."""
    size = 0
    for number, message in enumerate(items):
        size += len((message["content"] or "").encode(errors="replace"))
        if number == limit or (number and size > PAGE_BYTES):
            return PageItems(items[:number], more=True)
    return PageItems(items, more=more)


def _conversation(
    run: Mapping[str, Any], which: ColumnElement[bool], types: Sequence[str]
) -> Select[Any]:
    """Select some of a run's events, each with the text of the answer to which the event refers."""
    events = run_events.c
    columns = events.seq, events.type, events.task_id, events.agent, events.at, events.body
    return read.with_answers(*columns, _heard().label("heard")).where(
        events.tenant_id == run["tenant_id"],
        events.run_id == run["id"],
        which,
        events.type.in_(types),
    )


def _heard() -> ColumnElement[Any]:
    """Select the text that the model read as a tool's result.

    The next ``llm.started`` event has this text. NULL: the model read the text of the result's
    event, or no model call followed.
    """
    own, later = run_events.c, run_events.alias("later").c
    result_text = later.data["results"].op("->>")(own.data["tool_call_id"].astext)
    following = (
        select(case((later.type == EventType.LLM_STARTED, result_text)))
        .where(
            later.tenant_id == own.tenant_id,
            later.run_id == own.run_id,
            later.step >= own.step,
            later.seq > own.seq,
            later.task_id.is_not_distinct_from(own.task_id),
            later.type.in_((EventType.LLM_STARTED, *_ENDS)),
        )
        .order_by(later.step, later.seq)
        .limit(1)
        .correlate(run_events)
        .scalar_subquery()
    )
    return case((own.type.in_(TOOL_ENDS), following))


def events_of(
    tenant_id: UUID, run_id: UUID, task_id: UUID | None
) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that select the events of a task or, for ``None``, of the root."""
    return (
        run_events.c.tenant_id == tenant_id,
        run_events.c.run_id == run_id,
        run_events.c.task_id.is_not_distinct_from(task_id),
    )


async def _parent_of(
    connection: AsyncConnection, tenant_id: UUID, run_id: UUID, task_id: UUID
) -> UUID | None:
    query = select(tasks.c.parent_id).where(
        tasks.c.tenant_id == tenant_id, tasks.c.run_id == run_id, tasks.c.id == task_id
    )
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(f"run {run_id} has no task {task_id}")
    parent: UUID | None = row.parent_id
    return parent


def _input(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    run_input, demands = run["input"], demands_message(run)
    head = [] if demands is None else [{"role": "system", "content": demands.content}]
    if isinstance(run_input, str):
        return [*head, {"role": "user", "content": run_input}]
    call_ids = {
        call["id"]: call["name"] for message in run_input for call in message.get("tool_calls", ())
    }
    return [
        *head,
        *({**_shown(each), "name": call_ids.get(each.get("tool_call_id"))} for each in run_input),
    ]


def _read_as(result: ToolResult, heard: str | None) -> ToolMessage:
    if heard is None:
        return ToolMessage.answering(result)
    if not result.parts:
        return ToolMessage(content=heard, tool_results=(result,))
    return ToolMessage.of(Part("text", text=heard), *result.parts, tool_results=(result,))


def _parts_of(message: ToolMessage) -> list[ContentPart]:
    return [part.to_dict() for part in message.parts]


def _shown(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": text_of(map(Part.from_dict, content)), "parts": content}


async def _asked(
    connection: AsyncConnection, run: Mapping[str, Any], parent: UUID | None, task_id: UUID
) -> list[Mapping[str, str]]:
    """Return the question to a sub-agent: the prompt of a dispatch, or the arguments of a call."""
    dispatched = select(run_events.c.data).where(
        *events_of(run["tenant_id"], run["id"], task_id),
        run_events.c.type == EventType.SUBAGENT_DISPATCHED,
    )
    if data := await connection.scalar(dispatched.limit(1)):
        task: SubagentDispatchedData = data
        text = first_message(task_id, task["prompt"], shared_metadata(task))
        return [{"role": "user", "content": text}]
    calls = events_of(run["tenant_id"], run["id"], parent)
    answers = select(
        run_events.c.data["call"].as_integer(), run_events.c.data["message"]["tool_calls"]
    ).where(*calls, run_events.c.type == EventType.LLM_COMPLETED)
    namespace = parent or run["task_root"] or run["id"]
    for call, made in await connection.execute(answers):
        for index, tool_call in enumerate(made or ()):
            if task_id_at(namespace, ((call, index),)) != task_id:
                continue
            # Read the arguments of the executed call, because a hook may have changed the
            # arguments in the model's message.
            started = select(run_events.c.data["arguments"]).where(
                *calls,
                run_events.c.type == EventType.TOOL_STARTED,
                run_events.c.data["call"].as_integer() == call,
                run_events.c.data["tool_call_id"].astext == tool_call["id"],
            )
            if arguments := await connection.scalar(started.limit(1)):
                return [{"role": "user", "content": question_of(arguments)}]
    return []
