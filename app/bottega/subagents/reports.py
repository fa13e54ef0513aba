"""Reports about tasks for the agents that dispatched them."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from bottega.agents.loop import FINAL_ANSWER
from bottega.subagents.handle import SubagentHandle
from bottega.subagents.states import SubagentStatus
from bottega.subagents.swarm import QueryScope


def find(scope: QueryScope, task_id: str) -> SubagentHandle | None:
    """Return the task of this id if it is a descendant of the calling query."""
    known = as_id(task_id)
    return None if known is None else scope.swarm.registry.get(known, scope.parent)


async def report(scope: QueryScope, ids: Sequence[str], longest_partial: int) -> dict[str, Any]:
    """Build the result of ``poll_subagent``; mark the caller's finished tasks as received."""
    now = scope.swarm.registry.scheduler.now()
    views: dict[str, dict[str, Any] | None] = {}
    for each in ids:
        handle = find(scope, each)
        views[each] = None if handle is None else _view(handle, now, longest_partial)
        if handle is not None and handle.status.is_final and handle.parent is scope.parent:
            handle.received = True
    if scope.swarm.lookup is not None and None in views.values():
        await _look_up(scope, views)
    tasks = [
        view or {"task_id": each, "status": "not_found", "error": "no task of yours has this id"}
        for each, view in views.items()
    ]
    counts = {str(status): 0 for status in SubagentStatus} | {"not_found": 0}
    for view in tasks:
        counts[view["status"]] += 1
    return {"tasks": tasks, "summary": {"total": len(tasks), **counts}}


async def _look_up(scope: QueryScope, views: dict[str, dict[str, Any] | None]) -> None:
    """Fill in collected tasks from the stored records."""
    assert scope.swarm.lookup is not None
    gone = {task: each for each, view in views.items() if view is None and (task := as_id(each))}
    if not gone:
        return
    for task, view in (await scope.swarm.lookup(list(gone), scope.task_id)).items():
        views[gone[task]] = view


def as_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _view(handle: SubagentHandle, now: float, longest_partial: int) -> dict[str, Any]:
    view: dict[str, Any] = {"task_id": str(handle.task_id), "status": str(handle.status)}
    if longest_partial and handle.partial_output and handle.final_output is None:
        view["partial_output"] = handle.partial_output[-longest_partial:]
    if handle.final_output is not None:
        view["final_output"] = handle.final_output
        if handle.stop_reason not in (None, FINAL_ANSWER):
            view["stop_reason"] = handle.stop_reason
    if handle.error is not None:
        view["error"] = handle.error
    view["duration_ms"] = handle.duration_ms(now)
    view["token_usage"] = handle.token_usage.model_dump()
    return view
