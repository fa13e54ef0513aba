"""The files of one run: those that its models read, and those that its tools return."""

from dataclasses import dataclass, replace
from uuid import UUID

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.parts import FileContent, Part
from bottega.agents.tools import error_result
from bottega.errors import InvalidInputError, LimitedError, UnavailableError
from bottega.files.store import FileOrigin, FileStore


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run's access to the files of its tenant."""

    store: FileStore
    tenant_id: UUID
    run_id: UUID
    session_id: str | None

    async def load(self, file: str) -> FileContent:
        """Load a file; raises as :meth:`FileStore.load`."""
        return await self.store.load(self.tenant_id, file)

    async def stored(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """Return a result with files in place of its data, or the error of storing them."""
        try:
            parts = [await self._part(part) for part in result.parts]
        except (InvalidInputError, LimitedError, UnavailableError) as error:
            text = f"its answer could not be stored: {error.detail}"
            return error_result(call, text, error.code)
        return result.model_copy(update={"parts": tuple(parts)})

    async def _part(self, part: Part) -> Part:
        if part.data is None:
            return part
        origin = FileOrigin(self.session_id, self.run_id, part.name, part.media_type)
        row = await self.store.add(self.tenant_id, part.data, origin)
        return replace(
            part,
            data=None,
            file=str(row["id"]),
            media_type=row["media_type"],
            size_tokens=row["tokens"],
        )
