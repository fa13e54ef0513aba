"""Results of tools as the log has them, and as models read them."""

from collections.abc import Sequence

from bottega.agents.messages import StandardMessage, ToolMessage, ToolResult
from bottega.events.steps import as_stored


def storable_result(result: ToolResult) -> ToolResult:
    """Return a tool's result as the log can have it, so that the model reads what the log has."""
    said = {"result": result.result, "error": result.error}
    stored = as_stored(said)
    return result if stored is said else result.model_copy(update=stored)


def heard_in(
    history: Sequence[StandardMessage], logged: dict[str, ToolResult]
) -> dict[str, dict[str, str]]:
    """Return ``results`` for ``llm.started``: where the model reads more than the log has.

    Args:
        logged: results since the last model call as the log has them, by tool call; emptied.
    """
    found: dict[str, str] = {}
    for message in reversed(history):
        if not logged:
            break
        for result in message.tool_results if isinstance(message, ToolMessage) else ():
            known = logged.pop(result.tool_call_id, result)
            if result is not known and message.content != ToolMessage.answering(known).content:
                found[result.tool_call_id] = message.content
    return {"results": found} if found else {}
