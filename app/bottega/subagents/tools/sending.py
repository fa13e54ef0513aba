"""The tool ``send_to_subagent``."""

from typing import Any

from pydantic import ValidationError

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.tools import error_result, explain, success_result
from bottega.subagents.handle import SubagentHandle
from bottega.subagents.plugins import Refused, Skip
from bottega.subagents.states import Mailbox
from bottega.subagents.swarm import QueryScope
from bottega.subagents.tools.arguments import SendArguments, schema_of
from bottega.subagents.tools.guarding import checked_message
from bottega.subagents.tools.reports import find
from bottega.subagents.tools.shared import SubagentTool

MOST_UNREAD = 10
MOST_MESSAGES = 50
"""Messages to one task: each adds a step to its loop."""


class SendTool(SubagentTool):
    name = "send_to_subagent"
    description = "Sends a message to a task under way; it reads it before its next step."

    def create_schema(self) -> dict[str, Any]:
        return schema_of(SendArguments)

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            arguments = SendArguments.model_validate(tool_call.arguments)
        except ValidationError as error:
            return error_result(tool_call, explain(error))
        call, scope = self.shared.scope()
        handle = find(scope, arguments.task_id)
        if handle is None:
            return error_result(tool_call, "no task of yours under way has this id")
        message_id = str(scope.id_below((call.query.model_calls, call.index)))
        sent = {"task_id": str(handle.task_id), "status": "sent"}
        if handle.mailbox is not None and message_id in handle.mailbox.known:
            return success_result(tool_call, sent)  # before a crash
        text: str | Skip | Refused = arguments.message
        if scope.swarm.options.plugins:
            text = await checked_message(scope.swarm, call.query, handle.agent, arguments.message)
        if isinstance(text, Skip):
            return success_result(tool_call, {**sent, "status": "skipped", "result": text.result})
        problem = text.detail if isinstance(text, Refused) else _refusal(handle)
        if problem or isinstance(text, Refused):
            return error_result(tool_call, problem or "")
        if not await _told(scope, handle, message_id, text):
            return error_result(tool_call, "the task is over: it reads no more messages")
        handle.mailbox = handle.mailbox or Mailbox()
        handle.mailbox.put(message_id, text)
        about = {"message_id": message_id, "message": text}
        handle.parent.listener.on_event(handle, "message_sent", about)
        return success_result(tool_call, sent)


async def _told(scope: QueryScope, handle: SubagentHandle, message_id: str, text: str) -> bool:
    """Send a message on if a linked run does the task; return false if that is over."""
    elsewhere = scope.swarm.options.elsewhere if handle.spread else None
    return elsewhere is None or await elsewhere.tell(handle, message_id, text)


def _refusal(handle: SubagentHandle) -> str | None:
    if handle.status.is_final or handle.suspended:
        return f"the task is {handle.status}: it reads no more messages"
    if handle.has_answered:
        return "the task has given its answer already: it reads no more messages"
    if handle.mailbox is None:
        return None
    if len(handle.mailbox.unread) >= MOST_UNREAD and not handle.spread:  # it does not tell
        unread = len(handle.mailbox.unread)
        return f"the task has {unread} unread messages: wait until it has read some"
    if len(handle.mailbox.known) >= MOST_MESSAGES:
        sent = len(handle.mailbox.known)
        return f"the task got {sent} messages already, and may get no more"
    return None
