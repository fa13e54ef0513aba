"""The files of one run: files that its models read, and files that its tools return."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

import structlog

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.parts import FileContent, Part
from bottega.agents.tools import error_result
from bottega.db.failures import is_transient, persist
from bottega.errors import DatabaseAwayError, InvalidInputError, LimitedError, UnavailableError
from bottega.files.store import FileOrigin, FileStore

NOT_STORED = "result_not_stored"
"""Error code of a tool call whose answer could not be stored because of an internal error."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run's access to the files of its tenant."""

    store: FileStore
    tenant_id: UUID
    run_id: UUID
    session_id: str | None

    async def load(self, file: str) -> FileContent:
        """Load a file; it raises the errors of :meth:`FileStore.load`."""
        return await self.store.load(self.tenant_id, file)

    async def stored(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """Store the data in a tool's result as files; return the new result, or an error result.

        Raises:
            Exception: the database was unavailable for a minute.
        """
        try:
            parts = [await self._part(part) for part in result.parts]
        except DatabaseAwayError:  # ends the attempt, because no model can act on this
            raise
        except (InvalidInputError, LimitedError, UnavailableError) as error:
            text = f"its answer could not be stored: {error.detail}"
            return error_result(call, text, error.code)
        except (
            Exception
        ) as error:  # even an error of the database: a tool's answer must not end the run
            if is_transient(error):
                raise
            logger.exception("tool.result_not_stored", tool=call.name)
            return error_result(call, "its answer could not be stored", NOT_STORED)
        return result.model_copy(update={"parts": tuple(parts)})

    async def _part(self, part: Part) -> Part:
        if part.data is None:
            return part
        origin = FileOrigin(self.session_id, self.run_id, part.name, part.media_type)
        # If the tool's answer is not stored, the file stays unused, and is deleted with the run.
        row = await persist(partial(self._add, part.data, origin))
        if isinstance(row, UnavailableError):
            raise row
        return replace(
            part,
            data=None,
            file=str(row["id"]),
            media_type=row["media_type"],
            size_tokens=row["tokens"],
        )

    async def _add(self, data: bytes, origin: FileOrigin) -> dict[str, Any] | UnavailableError:
        """Store a file; return its row, or the error of an unavailable object store."""
        try:
            return await self.store.add(self.tenant_id, data, origin)
        except DatabaseAwayError:
            raise
        except UnavailableError as error:
            return error
