"""The parts that each dialect takes, for checks before a run."""

from collections.abc import Mapping

from bottega.agents.parts import FileContent, Part
from bottega.llm.dialects import anthropic, chat, gemini, responses
from bottega.llm.dialects.parts import Media, WritePart, loaded
from bottega.llm.server import DialectName

_WRITERS: Mapping[DialectName, WritePart] = {
    "chat": chat.write_media,
    "responses": responses.write_media,
    "anthropic": anthropic.write_media,
    "gemini": gemini.write_media,
}


def takes(dialect: DialectName, part: Part, media_type: str | None = None) -> bool:
    """Return true if a dialect has a form for a part.

    Args:
        media_type: of a part that is a stored file.
    """
    if part.text is not None:
        return True
    kind = media_type or part.media_type or ""
    files = {} if part.file is None else {part.file: FileContent(b"", kind)}
    found = loaded(part, files)
    return not isinstance(found, Media) or _WRITERS[dialect](found) is not None
