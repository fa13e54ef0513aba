"""The tools ``poll_subagent``, ``await_subagent`` and ``cancel_subagent``."""

from typing import Any

from pydantic import ValidationError

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.tools import error_result, explain, success_result
from bottega.subagents.states import SubagentStatus
from bottega.subagents.swarm import QueryScope
from bottega.subagents.tools.arguments import (
    AwaitArguments,
    CancelArguments,
    PollArguments,
    schema_of,
)
from bottega.subagents.tools.reports import distinct, find, own_tasks, report
from bottega.subagents.tools.shared import SubagentTool
from bottega.subagents.waits import as_id

CANCELLED = "its parent cancelled it"


class PollTool(SubagentTool):
    name = "poll_subagent"
    description = (
        "Says how tasks are doing, with what they wrote since you last read it. Never waits."
    )

    def create_schema(self) -> dict[str, Any]:
        return schema_of(PollArguments)

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            arguments = PollArguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        _, scope = self.shared.scope()
        longest = arguments.max_partial_output_length if arguments.include_partial_output else 0
        if arguments.task_ids is not None:
            answer = await report(scope, distinct(arguments.task_ids), longest, news=True)
            return success_result(tool_call, answer)
        ids, note = own_tasks(scope)
        answer = await report(scope, ids, longest, news=True)
        if note:
            answer["note"] = note
        return success_result(tool_call, answer)


class AwaitTool(SubagentTool):
    name = "await_subagent"
    description = (
        "Waits until a task, or all, any or a quorum of several, are over, or one has succeeded, "
        "and answers what they found. When timeout_ms is over first, they go on, and you may await "
        "them again."
    )

    def create_schema(self) -> dict[str, Any]:
        return schema_of(AwaitArguments)

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            arguments = AwaitArguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        ids = list(arguments.task_ids or ())
        ids = distinct([*ids, arguments.task_id] if arguments.task_id is not None else ids)
        if not ids:
            return error_result(tool_call, "invalid arguments: give task_id or task_ids")
        if problem := _bad_quorum(arguments, len(ids)):
            return error_result(tool_call, problem)
        call, scope = self.shared.scope()
        key = (scope.task_id, call.query.model_calls, tool_call.id)
        seconds = max(0.0, arguments.timeout_ms / 1000 - scope.swarm.options.waits.get(key, 0.0))
        met = await _met(scope, ids, arguments, seconds)
        answer = await report(scope, ids, 0)
        status = _status(arguments, met, [task["status"] for task in answer["tasks"]])
        answer = {"status": status, "wait_timed_out": not met, "tasks": answer["tasks"]}
        return success_result(tool_call, answer)


async def _met(
    scope: QueryScope, ids: list[str], arguments: AwaitArguments, seconds: float
) -> bool:
    """Wait until the condition is met; return false on timeout."""
    found = {each: find(scope, each) for each in ids}
    known = [handle for handle in found.values() if handle]
    gone = [
        each for each, handle in found.items() if not handle and as_id(each) in scope.dispatched
    ]
    if gone and arguments.mode == "any_success":
        views = (await report(scope, gone, 0))["tasks"]
        if any(view["status"] == SubagentStatus.COMPLETED for view in views):
            return True
    return await scope.wait(known, arguments.mode, arguments.quorum, seconds, len(gone))


def _status(arguments: AwaitArguments, met: bool, statuses: list[str]) -> str:
    if arguments.mode == "any_success" and met and SubagentStatus.COMPLETED not in statuses:
        return "none_succeeded"
    if len(statuses) == 1:
        return statuses[0]
    return "done" if met else "pending"


def _bad_quorum(arguments: AwaitArguments, tasks: int) -> str | None:
    if arguments.mode != "quorum":
        return None
    if arguments.quorum is None or arguments.quorum > tasks:
        return f"invalid arguments: quorum must say how many of the {tasks} tasks, at least 1"
    return None


class CancelTool(SubagentTool):
    name = "cancel_subagent"
    description = "Stops tasks and all that they started. What they found so far is lost."

    def create_schema(self) -> dict[str, Any]:
        return schema_of(CancelArguments)

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            arguments = CancelArguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        _, scope = self.shared.scope()
        ids = distinct(arguments.task_ids)
        for each in ids:
            if (handle := find(scope, each)) is not None:
                scope.swarm.registry.cancel(handle.task_id, CANCELLED)
        views = (await report(scope, ids, 0, reads=False))["tasks"]
        tasks = [{"task_id": view["task_id"], "status": view["status"]} for view in views]
        return success_result(tool_call, {"tasks": tasks})
