"""Repeat a finished run: as a new run, from the start or from its last good step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection

from app.errors import ConflictError
from app.events import log
from app.events.types import Event, EventType, RunStatus
from app.runs import read
from app.runs.recorder import CANCELLED
from app.runs.submit import Carried, accept

Parents = Mapping[UUID | None, UUID | None]
"""Of each task the one that asked for it; none: the root."""

_KEPT = (
    "mode",
    "agent",
    "graph",
    "session_id",
    "input",
    "pinned",
    "priority",
    "timeout_s",
    "queue_timeout_s",
    "token_budget",
    "webhook_url",
    "metadata",
)


async def retry(
    connection: AsyncConnection,
    pool: asyncpg.Pool,
    tenant_id: UUID,
    run_id: UUID,
    *,
    from_last_step: bool,
) -> dict[str, Any]:
    """Submit a run that repeats a finished one, with the versions that one pinned.

    Args:
        from_last_step: its log begins with what the finished one did up to its last good step:
            model calls and tools of that part are not paid for again.

    Raises:
        NotFoundError: unknown, or another tenant's.
        ConflictError: ``not_final``.
    """
    old = await read.get(connection, tenant_id, run_id)
    if old["status"] in (RunStatus.QUEUED, RunStatus.RUNNING):
        raise ConflictError(
            f"run {run_id} is not over (it is {old['status']}): wait for its end, or cancel it",
            code="not_final",
        )
    new = {name: old[name] for name in _KEPT} | {"retry_of": run_id}
    if not from_last_step:
        return await accept(connection, tenant_id, new)
    carried = carry_over(await log.read_all(pool, tenant_id, run_id))
    # What is repeated must see what the first one saw, and name its tasks as that did.
    new |= {"session_base": old["session_base"], "task_root": old["task_root"] or run_id}
    return await accept(connection, tenant_id, new, carried)


def carry_over(events: Sequence[Event]) -> Carried:
    """What the repetition of a finished run need not do again. Pure.

    That is its log up to the first failure that nothing was built upon, without what was begun
    and not done, renumbered from 2 on (1 says that the new run is queued).
    """
    good = events[: _end_of_the_good(events)]
    answered = {
        (event.task_id, event.data["call"])
        for event in good
        if event.type == EventType.LLM_COMPLETED or _is_final_failure(event)
    }
    kept = [
        event
        for event in good
        if not event.type.startswith("run.")
        and not (
            event.type in (EventType.LLM_STARTED, EventType.LLM_FAILED)
            and (event.task_id, event.data["call"]) not in answered
        )
    ]
    numbers = {event.seq: new for new, event in enumerate(kept, start=2)}
    parents = {event.task_id: event.parent_task_id for event in events}
    rows = [_row(event, numbers, parents) for event in kept]
    return Carried(rows, _tasks(kept, rows), _publications(rows))


def _is_final_failure(event: Event) -> bool:
    """Whether a model call failed for good (not just a try of it)."""
    return event.type == EventType.LLM_FAILED and "try" not in event.data


def _end_of_the_good(events: Sequence[Event]) -> int:
    """Index of the first failure after which no agent above it made a step.

    A failure that a model was told of, and answered, is part of what was done.
    """
    parents = {event.task_id: event.parent_task_id for event in events}
    last_answer = {
        event.task_id: index
        for index, event in enumerate(events)
        if event.type == EventType.LLM_COMPLETED
    }
    for index, event in enumerate(events):
        if not (_is_final_failure(event) or _was_cancelled(event)):
            continue
        if not any(last_answer.get(agent, -1) > index for agent in _above(event.task_id, parents)):
            return index
    return len(events)


def _above(task: UUID | None, parents: Parents) -> Iterator[UUID | None]:
    """The tasks above one, up to the root, which is none."""
    while task is not None:
        task = parents[task]
        yield task


def _was_cancelled(event: Event) -> bool:
    failed = event.type == EventType.AGENT_FAILED
    return failed and event.data["error"]["code"] == CANCELLED["code"]


def _row(event: Event, numbers: Mapping[int, int], parents: Parents) -> dict[str, Any]:
    """The event as it is stored anew."""
    data = dict(event.data)
    if data.get("answer_seq") is not None:
        data["answer_seq"] = numbers[data["answer_seq"]]
    above = len(list(_above(event.task_id, parents)))
    return {
        "type": event.type,
        "task_id": event.task_id,
        "parent_task_id": event.parent_task_id,
        "agent": event.agent,
        "depth": above - 1 if above else None,
        "data": data,
    }


def _tasks(events: Sequence[Event], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the events make of the tasks, in the order in which those began.

    Args:
        rows: the events as they are stored anew.
    """
    tasks: dict[UUID, dict[str, Any]] = {}
    for seq, (event, row) in enumerate(zip(events, rows, strict=True), start=2):
        if event.task_id is None:
            continue
        task = tasks.setdefault(
            event.task_id,
            {
                "id": event.task_id,
                "parent_id": event.parent_task_id,
                "agent": event.agent,
                "depth": row["depth"],
                "status": RunStatus.RUNNING,
            },
        )
        if event.type == EventType.AGENT_COMPLETED:
            usage = event.data["usage"]
            task |= {"status": RunStatus.COMPLETED, "answer_seq": seq, "usage": usage}
        elif event.type == EventType.AGENT_FAILED:
            status = RunStatus.CANCELLED if _was_cancelled(event) else RunStatus.FAILED
            task |= {"status": status, **event.data}
    return list(tasks.values())


def _publications(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each agent of the graph published last."""
    published = [row for row in rows if row["type"] == EventType.MEMORY_PUBLISHED]
    published.sort(key=lambda row: row["data"]["version"])
    last = {row["agent"]: row for row in published}
    return [
        {"agent": agent, "task_id": row["task_id"], **row["data"]} for agent, row in last.items()
    ]
