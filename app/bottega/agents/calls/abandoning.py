"""Calls of tools that may ignore their cancellation."""

import asyncio
import logging

from bottega.agents.messages import ToolCall
from bottega.agents.tools import ToolBase, error_result

GRACE_S = 5.0
"""Time that a cancelled tool has to end; then it is left to itself."""

logger = logging.getLogger(__name__)


async def abandonable(tool: ToolBase, call: ToolCall) -> object:
    """Execute a call within the tool's timeout, in a task of its own.

    A tool that does not end within ``GRACE_S`` after its timeout or a cancellation is abandoned.

    Raises:
        asyncio.CancelledError: the caller is cancelled, or the tool cancelled itself.
        Exception, SystemExit: the tool's error.
    """
    task = asyncio.ensure_future(_outcome(tool, call))
    try:
        await asyncio.wait([task], timeout=tool.timeout_s)
    except asyncio.CancelledError:
        await _stop(task, tool)
        raise
    if not task.done():
        await _stop(task, tool)
        if not task.done() or task.cancelled() or isinstance(task.result(), TimeoutError):
            return error_result(call, f"timed out after {tool.timeout_s:g} s", "timeout")
    result = task.result()
    if isinstance(result, BaseException):
        raise result
    return result


async def _outcome(tool: ToolBase, call: ToolCall) -> object:
    """Return the result or the error: a raised SystemExit would stop the event loop."""
    try:
        return await tool.execute(call)
    except (Exception, SystemExit) as error:
        return error


async def _stop(task: "asyncio.Task[object]", tool: ToolBase) -> None:
    """Cancel a tool's task, and wait for its end as long as ``GRACE_S``."""
    task.cancel()
    loop = asyncio.get_running_loop()
    until = loop.time() + GRACE_S
    while not task.done() and (left := until - loop.time()) > 0:
        try:
            await asyncio.wait([task], timeout=left)
        except asyncio.CancelledError:
            continue  # cancelled again: it still has this time
    if not task.done():
        logger.warning("the tool '%s' ignores its cancellation, and is abandoned", tool.name)
