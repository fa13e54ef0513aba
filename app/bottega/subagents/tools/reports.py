"""The state of tasks, as a model reads it."""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from bottega.agents.loop import FINAL_ANSWER
from bottega.agents.messages import Usage
from bottega.subagents.child import answer_file, is_long
from bottega.subagents.handle import SubagentHandle
from bottega.subagents.states import SubagentStatus
from bottega.subagents.swarm import QueryScope
from bottega.subagents.waits import as_id

MOST_LISTED = 50
"""Tasks of one report."""
NOT_FOUND = "not_found"
EXCERPT = 4_096
"""Characters of the head and of the tail of a long answer."""


def distinct(ids: Iterable[str]) -> list[str]:
    """Return ids without repetitions; two spellings of one UUID are the same id."""
    return list({as_id(each) or each: each for each in ids}.values())


def find(scope: QueryScope, task_id: str) -> SubagentHandle | None:
    """Return the task of this id if it is a descendant of the calling query."""
    known = as_id(task_id)
    return None if known is None else scope.swarm.registry.get(known, scope.parent)


async def report(
    scope: QueryScope,
    ids: Sequence[str],
    longest_partial: int,
    *,
    news: bool = False,
    reads: bool = True,
) -> dict[str, Any]:
    """Build the result of ``poll_subagent``; mark the caller's finished tasks as received.

    Args:
        news: leave out what the caller got before.
        reads: the caller gets the outputs.
    """
    now = scope.swarm.registry.scheduler.now()
    views: dict[str, dict[str, Any] | None] = {}
    for each in ids:
        handle = find(scope, each)
        views[each] = None if handle is None else _view(scope, handle, now, longest_partial, news)
        if handle is not None and reads:
            _note_read(scope, handle, longest_partial)
    if scope.swarm.options.lookup is not None and None in views.values():
        await _look_up(scope, views, news=news, reads=reads)
    tasks = [
        view or {"task_id": each, "status": NOT_FOUND, "error": "no task of yours has this id"}
        for each, view in views.items()
    ]
    counts = {str(status): 0 for status in SubagentStatus} | {NOT_FOUND: 0}
    for view in tasks:
        counts[view["status"]] += 1
    return {"tasks": tasks, "summary": {"total": len(tasks), **counts}}


def own_tasks(scope: QueryScope) -> tuple[list[str], str | None]:
    """Return the ids of at most ``MOST_LISTED`` of the caller's own tasks, and a note on others.

    Those whose end it has not read go first; then the latest. The ids are in order of dispatch.
    """
    places = {task_id: place for place, task_id in enumerate(scope.dispatched)}
    children = scope.parent.children

    def first_then_latest(task_id: UUID) -> tuple[bool, int]:
        child = children.get(task_id)
        return child is None or child.received, -places[task_id]

    ordered = sorted(places, key=first_then_latest)
    chosen, others = ordered[:MOST_LISTED], ordered[MOST_LISTED:]
    ids = [str(each) for each in sorted(chosen, key=places.__getitem__)]
    if not others:
        return ids, None
    under_way = sum(each in children and not children[each].status.is_final for each in others)
    return ids, (
        f"{len(others)} more of your tasks are not listed ({under_way} under way, "
        f"{len(others) - under_way} over): name their ids"
    )


async def _look_up(
    scope: QueryScope, views: dict[str, dict[str, Any] | None], *, news: bool, reads: bool
) -> None:
    """Fill in collected tasks from the stored records."""
    assert scope.swarm.options.lookup is not None
    gone = {task: each for each, view in views.items() if view is None and (task := as_id(each))}
    if not gone:
        return
    for task, view in (await scope.swarm.options.lookup(list(gone), scope.task_id)).items():
        if "final_output" in view and news and scope.dispatched.get(task):
            view = {key: view[key] for key in view if key not in ("final_output", "stop_reason")}
            view["sent_before"] = True
        elif "final_output" in view:
            view = {**view, "final_output": shown(scope, task, view["final_output"])}
        views[gone[task]] = view
        if reads and task in scope.dispatched:
            scope.dispatched[task] = True


def shown_usage(usage: Usage) -> dict[str, int]:
    """Return a task's tokens; a model needs no more of its usage."""
    return {"input": usage.input, "output": usage.output}


def shown(scope: QueryScope, task_id: UUID, output: str) -> str | dict[str, Any]:
    """Return a task's answer; of a long one its head and tail, and the file that has all of it."""
    if not is_long(output):
        return output
    parts = {"head": output[:EXCERPT], "tail": output[-EXCERPT:], "bytes": len(output.encode())}
    return parts | ({"file": answer_file(task_id)} if task_id in scope.dispatched else {})


def _view(
    scope: QueryScope, handle: SubagentHandle, now: float, longest_partial: int, news: bool
) -> dict[str, Any]:
    view: dict[str, Any] = {"task_id": str(handle.task_id), "status": str(handle.status)}
    is_own = handle.parent is scope.parent
    if longest_partial and handle.partial_output and handle.final_output is None:
        unread = handle.written - handle.polled if news and is_own else handle.written
        if new := handle.partial_output[-min(unread, longest_partial) :] if unread else "":
            view["partial_output"] = new
    if handle.final_output is not None and news and is_own and handle.received:
        view["sent_before"] = True
    elif handle.final_output is not None:
        view["final_output"] = shown(scope, handle.task_id, handle.final_output)
        if handle.stop_reason not in (None, FINAL_ANSWER):
            view["stop_reason"] = handle.stop_reason
    if handle.error is not None:
        view["error"] = handle.error
    if handle.status.is_final and handle.mailbox and handle.mailbox.unread and not handle.spread:
        view["unread_messages"] = len(handle.mailbox.unread)
    view["duration_ms"] = handle.duration_ms(now)
    view["token_usage"] = shown_usage(handle.token_usage)
    return view


def _note_read(scope: QueryScope, handle: SubagentHandle, longest_partial: int) -> None:
    """Note what the caller has read of its own task."""
    if handle.parent is not scope.parent:
        return
    handle.received = handle.received or handle.status.is_final
    if handle.task_id in scope.dispatched:
        scope.dispatched[handle.task_id] = handle.received
    if longest_partial:
        handle.polled = handle.written
