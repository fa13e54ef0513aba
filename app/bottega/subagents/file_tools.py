"""File tools for models: ``read_file``, ``write_file``, ``list_files``."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.tools import FunctionTool, ToolBase, error_result
from bottega.errors import ForbiddenError, InvalidInputError, NotFoundError
from bottega.subagents.files import MAX_FILE_BYTES, MAX_PATH_BYTES
from bottega.subagents.shared_context import Workspace

MAX_CONTENT = 200_000
"""Limit of one ``write_file``, in characters."""
DEFAULT_READ = 20_000
MAX_READ = 50_000
"""Limit of one ``read_file``, in characters."""
MAX_LISTED = 500

Path = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_PATH_BYTES,
        description="Names separated by /, such as 'notes/plan.md' (only you see it), "
        "'/global/NAME' or '/subagent/TASK_ID/NAME'.",
    ),
]


class _FileTool(FunctionTool):
    """A tool that returns refusals as error results, and has no effect outside the run."""

    local = True

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        try:
            return await super().execute(tool_call)
        except (InvalidInputError, ForbiddenError, NotFoundError) as error:
            return error_result(tool_call, error.detail, error.code)


def file_tools(workspace: Callable[[], Workspace]) -> tuple[ToolBase, ...]:
    """Return the three file tools.

    Args:
        workspace: returns the files to work on; called at each tool call.
    """

    async def read_file(
        path: Path,
        offset: Annotated[
            int, Field(ge=0, le=MAX_FILE_BYTES, description="Characters to skip.")
        ] = 0,
        limit: Annotated[
            int, Field(ge=1, le=MAX_READ, description="Characters to read at most.")
        ] = DEFAULT_READ,
    ) -> dict[str, Any]:
        text = await workspace().read(path)
        end = offset + limit
        part: dict[str, Any] = {"content": text[offset:end], "total_chars": len(text)}
        if end < len(text):
            part["next_offset"] = end
        return part

    async def write_file(
        path: Path,
        content: Annotated[str, Field(max_length=MAX_CONTENT, description="The whole new text.")],
    ) -> dict[str, Any]:
        await workspace().write(path, content)
        return {"written_chars": len(content)}

    async def list_files(
        prefix: Annotated[
            str,
            Field(max_length=MAX_PATH_BYTES, description="A folder; without it, all you may read."),
        ] = "",
    ) -> dict[str, Any]:
        paths = workspace().list(prefix)
        listed: dict[str, Any] = {"files": paths[:MAX_LISTED], "total": len(paths)}
        if len(paths) > MAX_LISTED:
            listed["note"] = f"only the first {MAX_LISTED} are listed: ask for a folder of them"
        return listed

    return (
        _FileTool(
            read_file,
            name="read_file",
            description="Reads a text file, or a part of it; next_offset says where it goes on.",
            idempotent=True,
        ),
        _FileTool(
            write_file,
            name="write_file",
            description="Writes a text file, in place of what was there.",
            idempotent=True,
        ),
        _FileTool(
            list_files, name="list_files", description="Lists files you may read.", idempotent=True
        ),
    )
